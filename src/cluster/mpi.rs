//! Ranks as MPI has them.
//!
//! MPI is called by the thread that calls the library, by no other one, and by one at a time. If the program has
//! initialized MPI, it keeps it: the library uses a communicator of its own and finalizes nothing. Else MPI is
//! initialized by the first `warm_up`, and finalized when the program exits: it cannot be initialized twice, and a
//! program may warm up again after `finish`. It is not finalized while a transformer is warm: finalizing waits for all
//! ranks, and they may wait for this one.
//!
//! Since one thread does all of MPI, `MPI_THREAD_FUNNELED` suffices. It looks for messages and sleeps between looks,
//! since MPI's own waiting would take a core from the CPU backend.

use super::launcher::{StartedBy, started_by};
use super::message::broken;
use super::transport::{Nap, Transport};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::process::Process;
use crate::report;
use mpi::Threading;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What MPI is to this process.
struct World {
    /// The library's own, so that its messages do not meet the program's. Locked for each call.
    communicator: Mutex<Own>,
    rank: usize,
    ranks: usize,
    /// Whether only the thread that initialized MPI may call it.
    one_thread: bool,
    /// The process that all this belongs to: not one that it forks.
    process: Process,
}

struct Own(SimpleCommunicator);

// SAFETY: it is a handle, a number or an address that only MPI follows. MPI was initialized for calls by different
// threads one at a time, which the lock around it sees to, or is called by one thread only, which `World::enter`
// checks.
unsafe impl Send for Own {}

static WORLD: OnceLock<World> = OnceLock::new();

/// Transports that there are, and those that there have been.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static JOINED: AtomicI32 = AtomicI32::new(0);

/// Whether other ranks wait for messages that this one will not send.
static ABANDONED: AtomicBool = AtomicBool::new(false);

/// The transport to the other ranks; `None` for a process that was started alone, or that cannot reach the others,
/// which a line says. All ranks must call it equally often.
pub fn join() -> Result<Option<Mpi>> {
    let world = match WORLD.get() {
        Some(world) => world,
        None => match World::find() {
            Some(world) => WORLD.get_or_init(|| world),
            None => return Ok(None),
        },
    };
    if world.process != Process::this() || mpi::environment::is_finalized() {
        return Ok(None);
    }
    report::set_rank(world.rank);
    LIVE.fetch_add(1, Ordering::Relaxed);
    // Every engine has a tag of its own, so that engines may be used by different threads.
    let tag = JOINED.fetch_add(1, Ordering::Relaxed);
    Ok(Some(Mpi { world, tag }))
}

impl World {
    fn find() -> Option<Self> {
        if mpi::environment::is_finalized() {
            return None;
        }
        let launched = if mpi::environment::is_initialized() {
            None
        } else {
            initialize()?
        };
        let world = SimpleCommunicator::world();
        if world.size() <= 1 {
            if let Some(processes @ 2..) = launched {
                say_alone(processes);
            }
            return None;
        }
        let level = mpi::environment::threading_support();
        if level == Threading::Single {
            report::warning(
                "MPI was initialized for a single thread, and the library has several; this process answers all \
                 requests by itself; call MPI_Init_thread with MPI_THREAD_FUNNELED or more",
            );
            return None;
        }
        let communicator = world.duplicate();
        // SAFETY: the communicator is valid, and the handler MPI's own. A program may have set another one for its own
        // communicators, which this one is a copy of.
        unsafe { ffi::MPI_Comm_set_errhandler(communicator.as_raw(), ffi::RSMPI_ERRORS_ARE_FATAL) };
        Some(Self {
            rank: communicator.rank() as usize,
            ranks: communicator.size() as usize,
            communicator: Mutex::new(Own(communicator)),
            one_thread: level == Threading::Funneled,
            process: Process::this(),
        })
    }

    /// The communicator, locked, if this thread may call MPI.
    fn enter(&self) -> Result<MutexGuard<'_, Own>> {
        let mut is_main = 0;
        if self.one_thread {
            // SAFETY: writes one int.
            unsafe { ffi::MPI_Is_thread_main(&mut is_main) };
        }
        if self.one_thread && is_main == 0 {
            let why = "MPI was initialized with MPI_THREAD_FUNNELED by another thread; call from that one, or initialize \
                       MPI with MPI_THREAD_SERIALIZED or more";
            return Err(Error::State(why.into()));
        }
        Ok(self.communicator.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// For a process that was started with others which MPI does not find.
fn say_alone(processes: usize) {
    report::warning(format_args!(
        "{processes} processes were started, but MPI finds only this one, which answers all requests by itself; start \
         them with the mpirun of the MPI that the library was built with, or with srun --mpi=pmix (Open MPI) or \
         --mpi=pmi2 (MPICH)"
    ));
}

/// Initializes MPI if a launcher has started this process with others; gives the number of processes, if that is known.
/// `None` if it is not initialized.
fn initialize() -> Option<Option<usize>> {
    let processes = match started_by(|name| std::env::var(name).ok()) {
        StartedBy::Alone => return None,
        StartedBy::WithoutMpi(processes) => {
            say_alone(processes);
            return None;
        }
        StartedBy::Together(processes) => processes,
    };
    let Some((universe, _)) = mpi::initialize_with_threading(Threading::Serialized) else {
        return mpi::environment::is_initialized().then_some(processes);
    };
    // Dropping it would finalize MPI.
    std::mem::forget(universe);
    // SAFETY: the function may be called when the program exits, or when the library is unloaded.
    unsafe { libc::atexit(finalize) };
    Some(processes)
}

/// Finalizes MPI at exit.
///
/// Finalizing waits for all ranks. If this one exits in the middle of its work, others may wait for it in turn; then it
/// is left to the launcher to end them, or, where an inference was abandoned, MPI is told to.
extern "C" fn finalize() {
    let Some(world) = WORLD.get() else { return };
    if world.process != Process::this() || mpi::environment::is_finalized() {
        return;
    }
    if ABANDONED.load(Ordering::Relaxed) {
        if let Ok(communicator) = world.enter() {
            // SAFETY: the communicator is valid.
            unsafe { ffi::MPI_Abort(communicator.0.as_raw(), 1) };
        }
    } else if LIVE.load(Ordering::Relaxed) == 0 {
        // SAFETY: initialized by us, not finalized yet, and nothing of ours is under way.
        unsafe { ffi::MPI_Finalize() };
    }
}

/// The way to the other ranks.
pub struct Mpi {
    world: &'static World,
    tag: i32,
}

impl Drop for Mpi {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.world.rank
    }

    fn ranks(&self) -> usize {
        self.world.ranks
    }

    /// Not one blocking call: other engines' threads need MPI meanwhile.
    fn send(&self, to: usize, words: &[u32]) -> Result<()> {
        mpi::request::scope(|scope| {
            let communicator = self.world.enter()?;
            let mut request = communicator
                .0
                .process_at_rank(to as i32)
                .immediate_send_with_tag(scope, words, self.tag);
            drop(communicator);
            let mut nap = Nap::default();
            loop {
                let communicator = self.world.communicator.lock().unwrap_or_else(PoisonError::into_inner);
                match request.test() {
                    Ok(_) => return Ok(()),
                    Err(not_yet) => request = not_yet,
                }
                drop(communicator);
                nap.sleep();
            }
        })
    }

    fn receive(&self, from: Option<usize>, words: &mut Vec<u32>) -> Result<Option<usize>> {
        let communicator = self.world.enter()?;
        let communicator = &communicator.0;
        let status = match from {
            Some(from) => communicator
                .process_at_rank(from as i32)
                .immediate_probe_with_tag(self.tag),
            None => communicator.any_process().immediate_probe_with_tag(self.tag),
        };
        let Some(status) = status else { return Ok(None) };
        let from = status.source_rank();
        let count = usize::try_from(status.count(u32::equivalent_datatype()));
        let count = count.map_err(|_| broken("a message is not of 32-bit words"))?;
        words.clear();
        memory::resize(words, count, 0, Purpose::Requests)?;
        communicator
            .process_at_rank(from)
            .receive_into_with_tag(&mut words[..], self.tag);
        Ok(Some(from as usize))
    }

    fn abandon(&self) {
        ABANDONED.store(true, Ordering::Relaxed);
    }
}

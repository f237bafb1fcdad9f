//! Thread pools whose threads have ended when the pool has been dropped.

use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::report;
use crate::threads::{self, Thread};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A thread pool and the handles of its threads. Dropping it waits for the threads, which dropping rayon's pool alone
/// does not: they might still run when the program unloads the library.
pub struct Workers {
    // Fields are dropped in this order: the pool tells its threads to end, then the handles wait for them.
    pool: ThreadPool,
    _threads: Vec<Thread<()>>,
}

/// Limits the number of threads: more than four a core and more than 64 become the larger of these two, with a line on
/// stderr. 0 (one thread a core) stays 0.
pub fn within_reason(threads: usize) -> usize {
    let most = (4 * cores()).max(64);
    if threads > most {
        report::warning(format_args!(
            "{threads} threads are more than {} cores can use; there will be {most}",
            cores()
        ));
    }
    threads.min(most)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Workers {
    /// Starts `threads` threads, or one a core if that is 0. Their names are `name` and a number.
    pub fn start(name: &str, threads: usize) -> Result<Self> {
        let threads = match threads {
            0 => cores(),
            n => n,
        };
        let mut handles = memory::room(threads, Purpose::Threads)?;
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .spawn_handler(|worker| {
                let name = format!("{name} {}", worker.index());
                handles.push(threads::spawn(&name, || worker.run())?);
                Ok(())
            })
            .build()
            .map_err(|e| Error::State(format!("cannot start {threads} threads: {e}; lower GETP_THREADS")))?;
        // Looking for work, a thread makes an object of its own. That takes memory, so it is done while this thread
        // takes none.
        pool.broadcast(|_| ());
        Ok(Self {
            pool,
            _threads: handles,
        })
    }

    /// The thread pool.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_as_many_as_asked_for_within_reason() {
        assert_eq!([0, 1, 64].map(within_reason), [0, 1, 64]);
        let most = within_reason(4096);
        assert!(most == 64.max(4 * cores()) && within_reason(most) == most);
        assert_eq!(Workers::start("few", 3).unwrap().pool().current_num_threads(), 3);
    }
}

//! An emulation of several GPUs on the CPU, for tests: the kernels, compiled for the CPU, behind trait [`Driver`].
//!
//! A [`System`] has several devices, each with memory of a given capacity; a driver is one device. Beside running
//! kernels it finds errors: memory is poisoned and has guard bytes, queued work runs as late or in as odd an order as
//! its events allow ([`Order`]), the threads of a block run in odd orders ([`Schedule`]), any call can be made to fail
//! ([`Fault`]), and what is not freed is counted ([`Live`]).
//!
//! A failing kernel, or a copy outside of all allocations, loses its device, as on a GPU: the next call that waits
//! returns the error, and from then on all calls fail except those that free something.

mod faults;
mod inspect;
mod library;
mod memory;
mod state;

pub use faults::{Call, Fault};
pub use library::Schedule;

use super::{
    Captured, Device, DeviceMemory, DevicePtr, Driver, EventHandle, FunctionHandle, GraphHandle, KernelLaunch, Link,
    ListedDevice, ModuleHandle, Pinned, StreamHandle,
};
use crate::backend::gpu::catalogue;
use crate::error::{Error, GpuFault, Result};
use library::{Library, SimtLaunch};
use memory::MemoryKind;
use state::{Event, Function, Graph, Module, State, Stream, Work};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A gfx90a's, in a block.
const MAX_SHARED_BYTES: u32 = 64 << 10;

/// Whether a kernel of the catalogue reads a step's plan only when its predecessor has ended.
fn reads_the_plan_late(name: &str) -> bool {
    let mut kernels = catalogue::TABLES.iter().flat_map(|family| family.kernels);
    kernels.any(|kernel| kernel.plan_after_predecessor && kernel.name() == name)
}

/// When queued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Immediately.
    Eager,
    /// When it is waited for; of other streams only what it depends on. A missing wait reads stale data.
    Deferred,
    /// At random times, of any stream, by seed: work may run too early or too late if a wait is missing.
    Random(u64),
}

/// The configuration of a system.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Number of devices.
    pub devices: usize,
    /// Memory of each device.
    pub capacity_bytes: u64,
    /// Memory that a graph takes of its device.
    pub graph_bytes: u64,
    /// When queued work runs.
    pub order: Order,
    /// In which order a block's threads run.
    pub schedule: Schedule,
    /// Host threads that run a kernel's blocks.
    pub threads: usize,
    /// Whether devices reach each other's memory; devices 2n and 2n + 1 are neighbours.
    pub peer_access: bool,
    /// Whether what waits for a lost device's events does so for ever. A call of the host that would wait for it
    /// panics.
    pub losses_block: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            devices: 1,
            capacity_bytes: 4 << 30,
            graph_bytes: 0,
            order: Order::Eager,
            schedule: Schedule::InOrder,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            peer_access: true,
            losses_block: false,
        }
    }
}

/// What has been allocated and not freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Allocations of device memory.
    pub allocations: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Allocations of pinned memory.
    pub pinned: usize,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Code objects.
    pub modules: usize,
    /// Graphs.
    pub graphs: usize,
}

/// Several devices, one host.
pub struct System {
    state: Mutex<State>,
    devices: usize,
    peer_access: bool,
}

impl System {
    /// A new one.
    pub fn new(setup: &Setup) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::new(setup)),
            devices: setup.devices,
            peer_access: setup.peer_access,
        })
    }

    /// The process's own, for `GETP_DEVICE=simt`: four plain devices.
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<System>> = OnceLock::new();
        let setup = Setup {
            devices: 4,
            ..Setup::default()
        };
        SHARED.get_or_init(|| Self::new(&setup)).clone()
    }

    /// How many devices there are.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// The driver of a device.
    pub fn driver(self: &Arc<Self>, ordinal: usize) -> Result<Arc<dyn Driver>> {
        if ordinal >= self.devices {
            return Err(error(ordinal, "open".into(), GpuFault::NoDevice));
        }
        let device = Device {
            runtime: "simt",
            ordinal,
            name: "CPU as a SIMT machine".into(),
            arch: "simt".into(),
            multiprocessors: 4,
        };
        let system = self.clone();
        Ok(Arc::new(SimtDriver { system, device }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The devices of the process's own system.
pub fn list() -> Result<Vec<ListedDevice>> {
    (0..System::shared().devices())
        .map(|ordinal| {
            let driver = open(ordinal)?;
            Ok(ListedDevice {
                device: driver.device().clone(),
                total_bytes: driver.memory()?.total,
            })
        })
        .collect()
}

/// One of them.
pub fn open(ordinal: usize) -> Result<Arc<dyn Driver>> {
    System::shared().driver(ordinal)
}

/// A name of a device for all processes of the machine: each of them has devices of its own, but tests share them out.
pub fn shared_name(ordinal: usize) -> Result<String> {
    Ok(format!("simt:{ordinal}"))
}

/// The names of an image's kernels, and the threads that each was made for.
pub fn kernels(image: &[u8]) -> Result<BTreeMap<String, usize>> {
    let made = Library::load(image).and_then(|library| library.made());
    made.map_err(|why| error(0, why, GpuFault::Other))
}

fn error(ordinal: usize, call: String, fault: GpuFault) -> Error {
    Error::Gpu {
        device: format!("simt:{ordinal}"),
        call,
        fault,
        code: None,
    }
}

/// One device of a system.
struct SimtDriver {
    system: Arc<System>,
    device: Device,
}

impl SimtDriver {
    fn error(&self, call: String, fault: GpuFault) -> Error {
        error(self.device.ordinal, call, fault)
    }

    /// Starts a call: counts it, and fails it if a fault asks for that or the device is lost.
    fn enter(&self, call: Call) -> Result<MutexGuard<'_, State>> {
        let mut state = self.system.lock();
        let fault = state.plan.count(self.device.ordinal, call);
        self.check_lost(&state, call)?;
        match fault {
            None => Ok(state),
            Some(fault) => {
                if fault == GpuFault::LostDevice {
                    self.own(&mut state).lost = Some(format!("lost in {call:?} as the fault plan asks"));
                }
                Err(self.error(format!("{call:?}"), fault))
            }
        }
    }

    fn own<'a>(&self, state: &'a mut State) -> &'a mut state::DeviceState {
        &mut state.devices[self.device.ordinal]
    }

    /// [`Self::enter`], for calls that a capture depends on: where a fault has it invalidated, the stream is of no more
    /// use.
    fn enter_capture(&self, call: Call, stream: StreamHandle) -> Result<MutexGuard<'_, State>> {
        self.enter(call).inspect_err(|error| {
            if let Error::Gpu {
                fault: GpuFault::Capture,
                ..
            } = error
                && let Some(stream) = self.system.lock().streams.get_mut(&stream.0)
            {
                stream.invalidated = true;
            }
        })
    }

    fn check_lost(&self, state: &State, call: Call) -> Result<()> {
        match &state.devices[self.device.ordinal].lost {
            Some(why) => Err(self.error(format!("{call:?}: {why}"), GpuFault::LostDevice)),
            None => Ok(()),
        }
    }

    /// A call that waits comes back, with an error if this device is lost itself.
    fn must_end(&self, state: &State, done: bool, call: &str) {
        let ends = done || state.devices[self.device.ordinal].lost.is_some();
        let ordinal = self.device.ordinal;
        assert!(ends, "simt:{ordinal}: {call} waits for a lost device for ever");
    }

    /// Refuses a call that makes no sense.
    fn refuse<T>(&self, call: Call, why: &str) -> Result<T> {
        Err(self.error(format!("{call:?}: {why}"), GpuFault::Other))
    }

    /// A stream of this device.
    fn stream_of<'a>(&self, state: &'a mut State, call: Call, stream: StreamHandle) -> Result<&'a mut Stream> {
        match state.streams.get_mut(&stream.0) {
            Some(found) if found.device == self.device.ordinal && found.invalidated => {
                Err(self.error(format!("{call:?}"), GpuFault::Capture))
            }
            Some(found) if found.device == self.device.ordinal => Ok(found),
            _ => self.refuse(call, "no such stream on this device"),
        }
    }

    /// An event of any device of the system.
    fn event_of<'a>(&self, state: &'a State, call: Call, event: EventHandle) -> Result<&'a Event> {
        match state.events.get(&event.0) {
            Some(found) => Ok(found),
            None => self.refuse(call, "no such event"),
        }
    }

    fn queue(&self, call: Call, stream: StreamHandle, work: Work) -> Result<()> {
        let mut state = self.enter(call)?;
        self.stream_of(&mut state, call, stream)?;
        state.submit(stream.0, work);
        Ok(())
    }

    fn alloc_of(&self, call: Call, kind: MemoryKind, bytes: usize) -> Result<u64> {
        let mut state = self.enter(call)?;
        if bytes == 0 {
            return self.refuse(call, "no bytes asked for");
        }
        let heap = &mut self.own(&mut state).heap;
        let free = heap.free_bytes();
        heap.alloc(kind, bytes).ok_or_else(|| {
            self.error(
                format!("{call:?}({bytes} bytes), {free} are free"),
                GpuFault::OutOfMemory,
            )
        })
    }

    fn free_of(&self, kind: MemoryKind, at: u64) -> Result<()> {
        let mut state = self.system.lock();
        let done = state.run_device(self.device.ordinal);
        self.must_end(&state, done, "free");
        let freed = self.own(&mut state).heap.free(kind, at);
        freed.map_err(|why| self.error(format!("free: {why}"), GpuFault::Other))
    }

    fn freed<T>(&self, found: Option<T>, what: &str) -> Result<()> {
        match found {
            Some(_) => Ok(()),
            None => Err(self.error(
                format!("free of {what}: no such thing; given back twice?"),
                GpuFault::Other,
            )),
        }
    }

    fn here(&self, at: DevicePtr) -> (Option<usize>, u64) {
        (Some(self.device.ordinal), at.0)
    }
}

impl Driver for SimtDriver {
    fn device(&self) -> &Device {
        &self.device
    }

    fn memory(&self) -> Result<DeviceMemory> {
        let mut state = self.enter(Call::Memory)?;
        let heap = &self.own(&mut state).heap;
        Ok(DeviceMemory {
            free: heap.free_bytes(),
            total: heap.capacity_bytes(),
        })
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr> {
        self.alloc_of(Call::Alloc, MemoryKind::Device, bytes).map(DevicePtr)
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        self.free_of(MemoryKind::Device, at.0)
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned> {
        let at = self.alloc_of(Call::AllocPinned, MemoryKind::Pinned, bytes)?;
        Ok(Pinned {
            host: at as *mut u8,
            device: DevicePtr(at),
        })
    }

    unsafe fn free_pinned(&self, pinned: Pinned) -> Result<()> {
        self.free_of(MemoryKind::Pinned, pinned.device.0)
    }

    fn stream(&self) -> Result<StreamHandle> {
        let mut state = self.enter(Call::Stream)?;
        let handle = state.new_handle();
        state.streams.insert(handle, Stream::new(self.device.ordinal));
        Ok(StreamHandle(handle))
    }

    fn free_stream(&self, stream: StreamHandle) -> Result<()> {
        let mut state = self.system.lock();
        let end = state.end_of(stream.0);
        let done = state.run_to(end);
        self.must_end(&state, done, "free_stream");
        self.freed(state.streams.remove(&stream.0), "a stream")
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        const CALL: Call = Call::Synchronize;
        let mut state = self.enter(CALL)?;
        if self.stream_of(&mut state, CALL, stream)?.captured.is_some() {
            return self.refuse(CALL, "the stream is captured");
        }
        let end = state.end_of(stream.0);
        let done = state.run_to(end);
        self.must_end(&state, done, "synchronize");
        self.check_lost(&state, CALL)
    }

    /// What is not done now never is.
    fn synchronize_within(&self, stream: StreamHandle, _: Duration) -> Result<bool> {
        const CALL: Call = Call::Synchronize;
        let mut state = self.system.lock();
        self.check_lost(&state, CALL)?;
        self.stream_of(&mut state, CALL, stream)?;
        let end = state.end_of(stream.0);
        let done = state.run_to(end);
        self.check_lost(&state, CALL)?;
        Ok(done)
    }

    fn event(&self, timing: bool) -> Result<EventHandle> {
        let mut state = self.enter(Call::Event)?;
        let handle = state.new_handle();
        let event = Event {
            device: self.device.ordinal,
            timing,
            point: None,
            time: None,
        };
        state.events.insert(handle, event);
        Ok(EventHandle(handle))
    }

    fn free_event(&self, event: EventHandle) -> Result<()> {
        let mut state = self.system.lock();
        self.freed(state.events.remove(&event.0), "an event")
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.event_of(&self.system.lock(), Call::Record, event)?;
        self.queue(Call::Record, stream, Work::Record(event.0))
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.event_of(&self.system.lock(), Call::Wait, event)?;
        self.queue(Call::Wait, stream, Work::WaitEvent(event.0))
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        const CALL: Call = Call::SynchronizeEvent;
        let mut state = self.enter(CALL)?;
        if let Some(point) = self.event_of(&state, CALL, event)?.point {
            let done = state.run_to(point);
            self.must_end(&state, done, "synchronize_event");
        }
        self.check_lost(&state, CALL)
    }

    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        const CALL: Call = Call::ElapsedUs;
        let state = self.enter(CALL)?;
        let (from, to) = (self.event_of(&state, CALL, from)?, self.event_of(&state, CALL, to)?);
        if !from.timing || !to.timing {
            return self.refuse(CALL, "an event without timing");
        }
        match (from.time, to.time) {
            (Some(from), Some(to)) if to >= from => Ok((to - from).as_secs_f64() * 1e6),
            (Some(from), Some(to)) => Ok(-(from - to).as_secs_f64() * 1e6),
            _ => self.refuse(CALL, "an event that is not done"),
        }
    }

    unsafe fn copy_to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        let (to, from) = (self.here(to), (None, from as u64));
        self.queue(Call::CopyToDevice, stream, Work::Copy { to, from, bytes })
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        let (to, from) = ((None, to as u64), self.here(from));
        self.queue(Call::CopyToHost, stream, Work::Copy { to, from, bytes })
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        let (to, from) = (self.here(to), self.here(from));
        self.queue(Call::Copy, stream, Work::Copy { to, from, bytes })
    }

    fn link(&self, peer: &dyn Driver) -> Result<Link> {
        const CALL: Call = Call::Link;
        drop(self.enter(CALL)?);
        let (own, peer) = (self.device.ordinal, peer.device());
        if peer.runtime != "simt" || peer.ordinal >= self.system.devices {
            return self.refuse(CALL, "the peer is no device of this system");
        }
        Ok(Link {
            direct: self.system.peer_access,
            distance: if own / 2 == peer.ordinal / 2 { 0 } else { 1 },
        })
    }

    unsafe fn copy_from_peer(
        &self,
        to: DevicePtr,
        peer: &dyn Driver,
        from: DevicePtr,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let peer = peer.device();
        if peer.runtime != "simt" || peer.ordinal >= self.system.devices {
            return self.refuse(Call::CopyFromPeer, "the peer is no device of this system");
        }
        if !self.system.peer_access {
            return self.refuse(Call::CopyFromPeer, "devices do not reach each other's memory");
        }
        let (to, from) = (self.here(to), (Some(peer.ordinal), from.0));
        self.queue(Call::CopyFromPeer, stream, Work::Copy { to, from, bytes })
    }

    unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        self.queue(Call::Fill, stream, Work::Fill { to: to.0, byte, bytes })
    }

    fn load_module(&self, image: &[u8]) -> Result<ModuleHandle> {
        const CALL: Call = Call::LoadModule;
        let mut state = self.enter(CALL)?;
        let library =
            Library::load(image).map_err(|why| self.error(format!("{CALL:?}: {why}"), GpuFault::InvalidImage))?;
        let handle = state.new_handle();
        let device = self.device.ordinal;
        state.modules.insert(handle, Module { device, library });
        Ok(ModuleHandle(handle))
    }

    fn free_module(&self, module: ModuleHandle) -> Result<()> {
        let mut state = self.system.lock();
        state.functions.retain(|_, function| function.module != module.0);
        self.freed(state.modules.remove(&module.0), "a module")
    }

    fn function(&self, module: ModuleHandle, name: &str, shared_bytes: u32) -> Result<FunctionHandle> {
        const CALL: Call = Call::Function;
        let mut state = self.enter(CALL)?;
        let device = self.device.ordinal;
        let Some(found) = state.modules.get(&module.0).filter(|module| module.device == device) else {
            return self.refuse(CALL, "no such module on this device");
        };
        if shared_bytes > MAX_SHARED_BYTES {
            return self.refuse(
                CALL,
                &format!("{name}: {shared_bytes} bytes of shared memory, {MAX_SHARED_BYTES} are there"),
            );
        }
        let kernel = found.library.kernel(name, shared_bytes);
        let kernel = kernel.map_err(|why| self.error(format!("{CALL:?}({name}): {why}"), GpuFault::NoKernel))?;
        let handle = state.new_handle();
        let module = module.0;
        state.functions.insert(handle, Function { module, device, kernel });
        Ok(FunctionHandle(handle))
    }

    unsafe fn launch(&self, launch: &KernelLaunch<'_>, stream: StreamHandle) -> Result<()> {
        const CALL: Call = Call::Launch;
        let mut state = self.enter_capture(CALL, stream)?;
        self.stream_of(&mut state, CALL, stream)?;
        let device = self.device.ordinal;
        let Some(function) = state
            .functions
            .get(&launch.function.0)
            .filter(|function| function.device == device)
        else {
            return self.refuse(CALL, "no such function on this device");
        };
        let kernel = function.kernel.clone();
        if launch.shared_bytes > kernel.shared_bytes {
            return self.refuse(
                CALL,
                &format!("{}: more shared memory than it was found with", kernel.name),
            );
        }
        if launch.grid == 0 || launch.grid > i32::MAX as u32 {
            return self.refuse(CALL, &format!("{}: a grid of {} blocks", kernel.name, launch.grid));
        }
        let fetching = &mut self.stream_of(&mut state, CALL, stream)?.fetching;
        let early = std::mem::replace(fetching, kernel.name == "upload") && launch.overlap;
        if early && !reads_the_plan_late(&kernel.name) {
            return self.refuse(CALL, &format!("{} may read the plan before it is fetched", kernel.name));
        }
        let launch = SimtLaunch {
            kernel,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            args: launch.args.into(),
            overlap: launch.overlap,
        };
        state.submit(stream.0, Work::Launch(launch));
        Ok(())
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        const CALL: Call = Call::BeginCapture;
        let mut state = self.enter_capture(CALL, stream)?;
        let stream = self.stream_of(&mut state, CALL, stream)?;
        if stream.captured.is_some() {
            return self.refuse(CALL, "the stream is captured already");
        }
        stream.captured = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<Captured> {
        const CALL: Call = Call::EndCapture;
        // Ended also if the call fails, as a runtime does.
        let captured = self
            .system
            .lock()
            .streams
            .get_mut(&stream.0)
            .and_then(|stream| stream.captured.take());
        let mut state = self.enter_capture(CALL, stream)?;
        self.stream_of(&mut state, CALL, stream)?;
        let Some(work) = captured else {
            return self.refuse(CALL, "the stream is not captured");
        };
        let bytes = state.graph_bytes();
        if !self.own(&mut state).heap.take(bytes) {
            return Err(self.error(format!("{CALL:?}"), GpuFault::OutOfMemory));
        }
        let handle = state.new_handle();
        let nodes = work.iter().filter(|work| work.is_node()).count();
        let graph = Graph {
            device: self.device.ordinal,
            work: work.into(),
        };
        state.graphs.insert(handle, graph);
        Ok(Captured {
            graph: GraphHandle(handle),
            nodes,
        })
    }

    unsafe fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<()> {
        const CALL: Call = Call::LaunchGraph;
        let mut state = self.enter(CALL)?;
        if self.stream_of(&mut state, CALL, stream)?.captured.is_some() {
            return self.refuse(CALL, "the stream is captured");
        }
        let device = self.device.ordinal;
        let Some(graph) = state.graphs.get(&graph.0).filter(|graph| graph.device == device) else {
            return self.refuse(CALL, "no such graph on this device");
        };
        let work = graph.work.clone();
        state.submit_graph(stream.0, &work);
        Ok(())
    }

    fn free_graph(&self, graph: GraphHandle) -> Result<()> {
        let mut state = self.system.lock();
        let graph = state.graphs.remove(&graph.0);
        if graph.is_some() {
            let bytes = state.graph_bytes();
            self.own(&mut state).heap.give_back(bytes);
        }
        self.freed(graph, "a graph")
    }
}

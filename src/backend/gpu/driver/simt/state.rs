//! The state of the emulated devices, and the order in which queued work runs.
//!
//! Nothing runs by itself. A stream's work waits in its queue until a call runs it, in an order that [`Order`] chooses
//! among those that streams and events allow. A point of a stream (what an event records) is the number of work items
//! queued before it.

use super::faults::{Call, FaultPlan};
use super::library::{Library, LoadedKernel, SimtLaunch};
use super::memory::{Heap, MemoryKind};
use super::{Live, Order, Setup};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// A queued work item. Addresses are plain numbers; all use of them happens under the system's lock.
#[derive(Clone)]
pub enum Work {
    /// A copy; `to` and `from` have the device whose memory the address must be in; `None` is the host.
    Copy {
        to: (Option<usize>, u64),
        from: (Option<usize>, u64),
        bytes: usize,
    },
    Fill {
        to: u64,
        byte: u8,
        bytes: usize,
    },
    Launch(SimtLaunch),
    /// Records an event.
    Record(u64),
    /// Waits for the point that an event has recorded when this is queued (in a graph: when the graph is queued).
    WaitEvent(u64),
    Wait(Point),
}

/// The first `count` work items of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    stream: u64,
    count: u64,
}

pub struct Stream {
    pub device: usize,
    queue: VecDeque<Work>,
    done: u64,
    /// Work recorded instead of queued, during a capture.
    pub captured: Option<Vec<Work>>,
    /// A capture on it was invalidated: like a stream of HIP's it takes no more work, captured or not.
    pub invalidated: bool,
    /// The kernel launched last fetches a step's plan, which most read before their predecessor has ended.
    pub fetching: bool,
}

pub struct Event {
    pub device: usize,
    pub timing: bool,
    pub point: Option<Point>,
    /// When the point was reached.
    pub time: Option<Instant>,
}

pub struct Module {
    pub device: usize,
    pub library: Arc<Library>,
}

pub struct Function {
    pub module: u64,
    pub device: usize,
    pub kernel: Arc<LoadedKernel>,
}

pub struct Graph {
    pub device: usize,
    pub work: Arc<[Work]>,
}

pub struct DeviceState {
    pub heap: Heap,
    /// Why the device is lost.
    pub lost: Option<String>,
}

pub struct State {
    setup: Setup,
    pub plan: FaultPlan,
    pub devices: Vec<DeviceState>,
    pub streams: HashMap<u64, Stream>,
    pub events: HashMap<u64, Event>,
    pub modules: HashMap<u64, Module>,
    pub functions: HashMap<u64, Function>,
    pub graphs: HashMap<u64, Graph>,
    last_handle: u64,
    launches: u64,
    random: u64,
}

impl Stream {
    pub fn new(device: usize) -> Self {
        Self {
            device,
            queue: VecDeque::new(),
            done: 0,
            captured: None,
            invalidated: false,
            fetching: false,
        }
    }
}

impl Work {
    /// Whether it becomes a node of a graph; events become dependencies.
    pub fn is_node(&self) -> bool {
        matches!(self, Self::Copy { .. } | Self::Fill { .. } | Self::Launch(_))
    }
}

impl State {
    pub fn new(setup: &Setup) -> Self {
        let device = |_| DeviceState {
            heap: Heap::new(setup.capacity_bytes),
            lost: None,
        };
        Self {
            setup: setup.clone(),
            plan: FaultPlan::default(),
            devices: (0..setup.devices).map(device).collect(),
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            last_handle: 0,
            launches: 0,
            random: match setup.order {
                Order::Random(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
                Order::Eager | Order::Deferred => 1,
            },
        }
    }

    /// An unused handle.
    pub fn new_handle(&mut self) -> u64 {
        self.last_handle += 1;
        self.last_handle
    }

    /// Memory that a graph takes.
    pub fn graph_bytes(&self) -> u64 {
        self.setup.graph_bytes
    }

    /// What a device holds.
    pub fn live(&self, device: usize) -> Live {
        let heap = &self.devices[device].heap;
        let (allocations, bytes) = heap.live(MemoryKind::Device);
        Live {
            allocations,
            bytes,
            pinned: heap.live(MemoryKind::Pinned).0,
            streams: self.streams.values().filter(|stream| stream.device == device).count(),
            events: self.events.values().filter(|event| event.device == device).count(),
            modules: self.modules.values().filter(|module| module.device == device).count(),
            graphs: self.graphs.values().filter(|graph| graph.device == device).count(),
        }
    }

    /// Queues work, or records it during a capture. The stream exists.
    pub fn submit(&mut self, stream: u64, work: Work) {
        let queue = self.streams.get_mut(&stream).expect("checked by the caller");
        if let Some(captured) = &mut queue.captured {
            let lost = work.is_node() && self.plan.count(queue.device, Call::Node).is_some();
            if !lost {
                captured.push(work);
            }
            return;
        }
        self.enqueue(stream, work);
        self.run_ahead(stream);
    }

    /// Queues a graph's work.
    pub fn submit_graph(&mut self, stream: u64, graph: &[Work]) {
        for work in graph {
            self.enqueue(stream, work.clone());
        }
        self.run_ahead(stream);
    }

    fn enqueue(&mut self, stream: u64, work: Work) {
        let work = match work {
            Work::WaitEvent(event) => match self.events.get(&event).and_then(|event| event.point) {
                Some(point) => Work::Wait(point),
                None => return,
            },
            work => work,
        };
        let recorded = if let Work::Record(event) = work {
            Some(event)
        } else {
            None
        };
        self.streams
            .get_mut(&stream)
            .expect("checked by the caller")
            .queue
            .push_back(work);
        let point = self.end_of(stream);
        if let Some(event) = recorded.and_then(|event| self.events.get_mut(&event)) {
            event.point = Some(point);
            event.time = None;
        }
    }

    /// Runs the work that the order runs before it is waited for.
    fn run_ahead(&mut self, stream: u64) {
        match self.setup.order {
            Order::Eager => {
                self.run_to(self.end_of(stream));
            }
            Order::Deferred => {}
            Order::Random(_) => {
                while self.next_random().is_multiple_of(2) {
                    let Some(stream) = self.any_runnable() else {
                        return;
                    };
                    self.run_next(stream);
                }
            }
        }
    }

    /// The point after all work queued in a stream so far.
    pub fn end_of(&self, stream: u64) -> Point {
        let count = self
            .streams
            .get(&stream)
            .map_or(0, |queue| queue.done + queue.queue.len() as u64);
        Point { stream, count }
    }

    /// Whether a point is reached. A destroyed stream has reached all its points.
    pub fn is_done(&self, point: Point) -> bool {
        self.streams
            .get(&point.stream)
            .is_none_or(|stream| stream.done >= point.count)
    }

    /// Runs work until a point is reached; false if it never is, as it comes behind work of a lost device.
    pub fn run_to(&mut self, point: Point) -> bool {
        while !self.is_done(point) {
            let needed = self.needed_first(point);
            if self.is_blocked(needed) {
                return false;
            }
            let stream = match self.setup.order {
                Order::Random(_) => self.any_runnable().unwrap_or(needed),
                Order::Eager | Order::Deferred => needed,
            };
            self.run_next(stream);
        }
        true
    }

    /// Whether a stream's work never ends, as its device is lost.
    fn is_blocked(&self, stream: u64) -> bool {
        self.setup.losses_block && self.devices[self.streams[&stream].device].lost.is_some()
    }

    /// Runs all work of a device's streams; false if it never ends.
    pub fn run_device(&mut self, device: usize) -> bool {
        let of_device = self.streams.iter().filter(|(_, stream)| stream.device == device);
        let ends: Vec<Point> = of_device.map(|(&stream, _)| self.end_of(stream)).collect();
        ends.into_iter().filter(|&end| !self.run_to(end)).count() == 0
    }

    /// The point that the head of a stream waits for.
    fn blocker(&self, stream: u64) -> Option<Point> {
        match self.streams[&stream].queue.front() {
            Some(&Work::Wait(point)) if !self.is_done(point) => Some(point),
            _ => None,
        }
    }

    /// The stream whose next work must run for a point to be reached. Events record only work queued before them, so
    /// there is no cycle.
    fn needed_first(&self, point: Point) -> u64 {
        let mut stream = point.stream;
        while let Some(blocker) = self.blocker(stream) {
            stream = blocker.stream;
        }
        stream
    }

    fn any_runnable(&mut self) -> Option<u64> {
        let with_work = self.streams.iter().filter(|(_, stream)| !stream.queue.is_empty());
        let mut runnable: Vec<u64> = with_work
            .map(|(&handle, _)| handle)
            .filter(|&s| self.blocker(s).is_none() && !self.is_blocked(s))
            .collect();
        runnable.sort_unstable();
        let pick = self.next_random() as usize % runnable.len().max(1);
        runnable.get(pick).copied()
    }

    fn run_next(&mut self, stream: u64) {
        let queue = self.streams.get_mut(&stream).expect("only live streams have work");
        let device = queue.device;
        let work = queue.queue.pop_front().expect("a stream with work");
        queue.done += 1;
        let point = Point {
            stream,
            count: queue.done,
        };
        if self.devices[device].lost.is_some() {
            return;
        }
        let injected = match work {
            Work::Record(_) | Work::Wait(_) | Work::WaitEvent(_) => None,
            _ => self.plan.count(device, Call::Work),
        };
        let result = match injected {
            Some(_) => Err("work failed as the fault plan asks".to_owned()),
            None => self.run(device, &work, point),
        };
        self.devices[device].lost = result.err();
    }

    fn run(&mut self, device: usize, work: &Work, point: Point) -> Result<(), String> {
        match work {
            Work::Copy { to, from, bytes } => self.run_copy(*to, *from, *bytes),
            Work::Fill { to, byte, bytes } => self.run_fill(device, *to, *byte, *bytes),
            Work::Launch(launch) => self.run_kernel(device, launch),
            Work::Record(event) => {
                self.note_time(*event, point);
                Ok(())
            }
            Work::Wait(_) | Work::WaitEvent(_) => Ok(()),
        }
    }

    fn check_range(&self, device: Option<usize>, at: u64, bytes: usize) -> Result<(), String> {
        match device {
            Some(device) if !self.devices[device].heap.holds(at, bytes) => Err(format!(
                "{bytes} bytes at {at:#x} are not within an allocation of simt:{device}"
            )),
            _ => Ok(()),
        }
    }

    fn run_copy(&self, to: (Option<usize>, u64), from: (Option<usize>, u64), bytes: usize) -> Result<(), String> {
        self.check_range(to.0, to.1, bytes)?;
        self.check_range(from.0, from.1, bytes)?;
        // SAFETY: device sides were checked; host sides and that the two do not overlap the caller of the driver
        // vouches.
        unsafe { std::ptr::copy(from.1 as *const u8, to.1 as *mut u8, bytes) };
        Ok(())
    }

    fn run_fill(&self, device: usize, to: u64, byte: u8, bytes: usize) -> Result<(), String> {
        self.check_range(Some(device), to, bytes)?;
        // SAFETY: checked to be within an allocation.
        unsafe { (to as *mut u8).write_bytes(byte, bytes) };
        Ok(())
    }

    fn run_kernel(&mut self, device: usize, launch: &SimtLaunch) -> Result<(), String> {
        self.launches += 1;
        // SAFETY: whoever launched vouches for the arguments.
        unsafe { launch.run(self.setup.schedule, self.launches, self.setup.threads) }?;
        let beside = self.devices[device].heap.check();
        beside.map_err(|text| format!("kernel {}: {text}", launch.kernel.name))
    }

    fn note_time(&mut self, event: u64, point: Point) {
        if let Some(event) = self.events.get_mut(&event).filter(|event| event.point == Some(point)) {
            event.time = Some(Instant::now());
        }
    }

    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }
}

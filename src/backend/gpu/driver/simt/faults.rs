//! Fault injection: which call fails, and how.

use crate::error::GpuFault;
use std::collections::HashMap;
use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The calls of a driver that a fault can hit. Calls that free something are not among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named as the driver's functions")]
pub enum Call {
    Memory,
    Alloc,
    AllocPinned,
    Stream,
    Synchronize,
    Event,
    Record,
    Wait,
    SynchronizeEvent,
    ElapsedUs,
    CopyToDevice,
    CopyToHost,
    Copy,
    Link,
    CopyFromPeer,
    Fill,
    LoadModule,
    Function,
    Launch,
    BeginCapture,
    EndCapture,
    LaunchGraph,
    /// Not a call: queued work when it runs. The device is lost, as with a failing kernel.
    Work,
    /// Not a call: work when a capture records it. The graph lacks it, without an error.
    Node,
}

/// A call that fails.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// On this device; `None`: on any.
    pub device: Option<usize>,
    /// Of this kind; `None`: of any kind that is a call.
    pub call: Option<Call>,
    /// Which of the matching calls fails, counted from 1 since the fault was added.
    pub nth: u64,
    /// How it fails. After [`GpuFault::LostDevice`] all later calls of the device fail too.
    pub fault: GpuFault,
    /// Whether all later matching calls fail as well.
    pub lasting: bool,
}

impl Fault {
    /// Any of this device and kind.
    fn probe(device: Option<usize>, call: Option<Call>) -> Self {
        Self {
            device,
            call,
            nth: 0,
            fault: GpuFault::Other,
            lasting: false,
        }
    }

    fn fits(&self, device: usize, call: Call) -> bool {
        self.device.is_none_or(|wanted| wanted == device)
            && self
                .call
                .map_or(!matches!(call, Call::Work | Call::Node), |wanted| wanted == call)
    }
}

/// The faults, and the calls so far.
#[derive(Default)]
pub struct FaultPlan {
    faults: Vec<(Fault, u64)>,
    calls: HashMap<(usize, Call), u64>,
    /// Each call and its place, in order, if they are kept.
    places: Option<Vec<(usize, Call, u64)>>,
}

impl FaultPlan {
    /// Adds a fault.
    pub fn add(&mut self, fault: Fault) {
        self.faults.push((fault, 0));
    }

    /// Keeps the places of all calls from now on.
    pub fn keep_places(&mut self) {
        self.places = Some(Vec::new());
    }

    /// Counts a call; returns how it is to fail, if it is.
    pub fn count(&mut self, device: usize, call: Call) -> Option<GpuFault> {
        *self.calls.entry((device, call)).or_default() += 1;
        if let Some(places) = &mut self.places {
            places.push((device, call, place()));
        }
        let mut found = None;
        for (fault, seen) in self.faults.iter_mut().filter(|(fault, _)| fault.fits(device, call)) {
            *seen += 1;
            if *seen == fault.nth || fault.lasting && *seen > fault.nth {
                found = Some(fault.fault);
            }
        }
        found
    }

    /// Calls so far that a fault of this device and kind would match.
    pub fn calls(&self, device: Option<usize>, call: Option<Call>) -> u64 {
        let probe = Fault::probe(device, call);
        let fitting = self
            .calls
            .iter()
            .filter(|((device, call), _)| probe.fits(*device, *call));
        fitting.map(|(_, count)| count).sum()
    }

    /// The places of the calls, in order, that a fault of this device and kind would match.
    pub fn places(&self, device: Option<usize>, call: Option<Call>) -> Vec<u64> {
        let probe = Fault::probe(device, call);
        let kept = self.places.iter().flatten();
        kept.filter(|(device, call, _)| probe.fits(*device, *call))
            .map(|(.., place)| *place)
            .collect()
    }
}

/// The place of a call: the functions that it came through, and where in them; a number that only this process knows.
fn place() -> u64 {
    const DEEPEST: usize = 64;
    let mut stack = [std::ptr::null_mut(); DEEPEST];
    // SAFETY: writes at most so many addresses.
    let depth = unsafe { libc::backtrace(stack.as_mut_ptr(), DEEPEST as c_int) };
    let mut hasher = DefaultHasher::new();
    stack[..depth as usize].hash(&mut hasher);
    hasher.finish()
}

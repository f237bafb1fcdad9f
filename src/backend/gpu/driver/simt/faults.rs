//! Faults on purpose: which call fails, and how.

use crate::error::GpuFault;
use std::collections::HashMap;

/// What a driver is asked to do. Giving things back is not among them: it never fails for a fault's sake.
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
    CopyFromPeer,
    Fill,
    LoadModule,
    Function,
    Launch,
    BeginCapture,
    EndCapture,
    LaunchGraph,
    /// Not a call: a piece of queued work as it runs. It takes the device with it, as a failing kernel does.
    Work,
    /// Not a call: a piece of work as a capture notes it. The graph lacks it, without an error.
    Node,
}

/// A call that fails.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// On this device; `None`: on any.
    pub device: Option<usize>,
    /// Of this kind; `None`: of any kind that is a call.
    pub call: Option<Call>,
    /// The how-manieth of the calls that fit, counted from 1 since the fault was asked for.
    pub nth: u64,
    /// How it fails. [`GpuFault::LostDevice`] lasts: whatever the device is asked for from then on fails too.
    pub fault: GpuFault,
    /// Whether all later calls that fit fail as well.
    pub lasting: bool,
}

impl Fault {
    fn fits(&self, device: usize, call: Call) -> bool {
        self.device.is_none_or(|wanted| wanted == device)
            && self
                .call
                .map_or(!matches!(call, Call::Work | Call::Node), |wanted| wanted == call)
    }
}

/// The faults asked for, and the calls so far.
#[derive(Default)]
pub struct FaultPlan {
    faults: Vec<(Fault, u64)>,
    calls: HashMap<(usize, Call), u64>,
}

impl FaultPlan {
    /// Asks for a fault.
    pub fn add(&mut self, fault: Fault) {
        self.faults.push((fault, 0));
    }

    /// Counts a call; says whether it is to fail.
    pub fn count(&mut self, device: usize, call: Call) -> Option<GpuFault> {
        *self.calls.entry((device, call)).or_default() += 1;
        let mut found = None;
        for (fault, seen) in self.faults.iter_mut().filter(|(fault, _)| fault.fits(device, call)) {
            *seen += 1;
            if *seen == fault.nth || fault.lasting && *seen > fault.nth {
                found = Some(fault.fault);
            }
        }
        found
    }

    /// How many calls a fault of this device and kind would have counted so far.
    pub fn calls(&self, device: Option<usize>, call: Option<Call>) -> u64 {
        let probe = Fault {
            device,
            call,
            nth: 0,
            fault: GpuFault::Other,
            lasting: false,
        };
        let fitting = self
            .calls
            .iter()
            .filter(|((device, call), _)| probe.fits(*device, *call));
        fitting.map(|(_, count)| count).sum()
    }
}

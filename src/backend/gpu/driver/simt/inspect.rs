//! Faults that tests add, and what they ask of the devices.

use super::{Call, Fault, Live, System};

impl System {
    /// Adds a fault.
    pub fn inject(&self, fault: Fault) {
        self.lock().plan.add(fault);
    }

    /// Calls so far that a fault of this device and kind would match.
    pub fn calls(&self, device: Option<usize>, call: Option<Call>) -> u64 {
        self.lock().plan.calls(device, call)
    }

    /// Keeps the places of all calls from now on.
    pub fn keep_places(&self) {
        self.lock().plan.keep_places();
    }

    /// Where the calls were made that a fault of this device and kind would match, in order: equal numbers for calls
    /// that came through the same functions.
    pub fn places(&self, device: Option<usize>, call: Option<Call>) -> Vec<u64> {
        self.lock().plan.places(device, call)
    }

    /// What a device holds.
    pub fn live(&self, device: usize) -> Live {
        self.lock().live(device)
    }
}

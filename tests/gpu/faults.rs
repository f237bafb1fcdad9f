//! Injected faults: any call of any device fails, once or from then on. Answers are correct, nothing panics, and all
//! memory is freed.
//!
//! A run makes some 500 calls to a device, most of them from a few places: 120 look up a kernel in one loop, and every
//! decoding step is like the one before. A run without a fault tells by the call stack where each call is made. Of the
//! calls from one place the first two fail, and the last: nothing is in flight, something is, nothing comes after.
//! Where a device is lost, which leaves nothing in flight to care for, the first and the last. Where a call's failure
//! takes all devices, or calls of its kind fail from then on, one call from a place shows the same as another: the
//! first fails. Not so where memory runs out: then what was had before must do.

use super::devices::{all, open, options as options_of};
use super::fake::{self, Program};
use super::model::{self, Drawing, Model, replicas};
use getp::abi::lifecycle::Backends;
use getp::backend::cpu;
use getp::backend::gpu::driver::simt::{Call, Fault, Live, Order, Setup, System};
use getp::checkpoint::Checkpoint;
use getp::error::GpuFault;
use getp::options::Options;
use std::collections::{BTreeSet, HashMap};
use std::ffi::c_int;
use std::process::Command;
use std::sync::Arc;

/// Devices of a trial whose replicas have one each.
const DEVICES: usize = 2;

/// Every kind of call that a run can make.
const CALLS: [Call; 22] = [
    Call::Memory,
    Call::Alloc,
    Call::AllocPinned,
    Call::Stream,
    Call::Synchronize,
    Call::Event,
    Call::Record,
    Call::Wait,
    Call::SynchronizeEvent,
    Call::ElapsedUs,
    Call::CopyToDevice,
    Call::CopyToHost,
    Call::Copy,
    Call::Link,
    Call::CopyFromPeer,
    Call::Fill,
    Call::LoadModule,
    Call::Function,
    Call::Launch,
    Call::BeginCapture,
    Call::EndCapture,
    Call::LaunchGraph,
];

/// A model, what the CPU answers, how runs draw tokens, and on what.
struct Trial {
    model: Model,
    drawing: Drawing,
    replicas: usize,
    /// Devices of each.
    group: usize,
    order: Order,
    /// See [`Setup`]. What waits for ever keeps its memory.
    losses_block: bool,
    expected: Vec<Vec<c_int>>,
}

/// Which calls from a place fail in a sweep.
#[derive(Clone, Copy)]
enum OfAPlace {
    First,
    /// The first and the last.
    Ends,
    /// The first two and the last.
    Several,
}

/// The outcome of a run.
struct Ran {
    /// Replicas after warming up.
    warm: usize,
    /// Replicas at the end.
    left: usize,
    /// Calls that would have counted toward the fault.
    calls: u64,
    /// Graphs that the device of the fault has launched.
    graphs: u64,
    /// What it ran on; knows the calls' places if there was no fault.
    system: Arc<System>,
}

impl Ran {
    /// The calls that a sweep lets fail one after the other.
    fn chosen(&self, device: Option<usize>, call: Option<Call>, of_a_place: OfAPlace) -> BTreeSet<u64> {
        let mut calls_from = HashMap::<u64, Vec<u64>>::new();
        for (place, nth) in self.system.places(device, call).into_iter().zip(1..) {
            calls_from.entry(place).or_default().push(nth);
        }
        let some = |calls: &Vec<u64>| {
            let (first, second, last) = (calls[0], calls[calls.len().min(2) - 1], calls[calls.len() - 1]);
            match of_a_place {
                OfAPlace::First => [first; 3],
                OfAPlace::Ends => [first, last, last],
                OfAPlace::Several => [first, second, last],
            }
        };
        calls_from.values().flat_map(some).collect()
    }
}

impl Trial {
    /// A replica on each device.
    fn new(drawing: Drawing) -> Self {
        Self::of(Model::least(1), drawing, DEVICES, 1)
    }

    /// Groups of so many devices, each with a layer.
    fn of_groups(drawing: Drawing, replicas: usize, group: usize) -> Self {
        Self::of(Model::least(group), drawing, replicas, group)
    }

    fn of(model: Model, drawing: Drawing, replicas: usize, group: usize) -> Self {
        Self {
            expected: model.expected(drawing),
            model,
            drawing,
            replicas,
            group,
            order: Order::Eager,
            losses_block: false,
        }
    }

    /// Warms up, infers and finishes with a fault on the way; checks all that must hold whatever fails.
    fn run(&self, fault: Option<Fault>) -> Ran {
        let devices = self.replicas * self.group;
        let system = System::new(&Setup {
            devices,
            capacity_bytes: 256 << 20,
            order: self.order,
            threads: 1,
            losses_block: self.losses_block,
            ..Setup::default()
        });
        match fault {
            Some(fault) => system.inject(fault),
            None => system.keep_places(),
        }
        let mut program = self.model.program(self.drawing);
        let before = program.bytes();
        let open = |checkpoint: &dyn Checkpoint, options: &Options| {
            let own = Options {
                group: Some(self.group),
                ..options.clone()
            };
            let opened = open(all(&system), checkpoint, &own);
            // Who asks for groups is told that there are none; here the CPU shall do.
            opened.or_else(|_| Ok(vec![cpu::open(checkpoint, &options_of(options))?]))
        };
        let backends = Backends {
            open: &open,
            fallback: &cpu::open,
            join: &|| Ok(None),
        };
        model::warm_up(&mut program, &backends).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        let warm = replicas(&program);
        let tokens = model::inference(&mut program, &backends).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        self.check(&program, tokens, fault);
        let left = replicas(&program);
        let calls = fault.map_or(0, |fault| system.calls(fault.device, fault.call));
        let graphs = system.calls(fault.and_then(|fault| fault.device), Some(Call::LaunchGraph));
        fake::finish(&mut program).unwrap();
        assert!(program.bytes() == before, "{fault:?}: the struct is not as it was");
        for device in 0..devices {
            let live = system.live(device);
            assert!(
                live == Live::default() || self.losses_block,
                "{fault:?}: device {device}: {live:?}"
            );
        }
        Ran {
            warm,
            left,
            calls,
            graphs,
            system,
        }
    }

    fn check(&self, program: &Program, tokens: i64, fault: Option<Fault>) {
        assert_eq!(program.rows(), self.expected, "{fault:?}");
        assert_eq!(
            tokens as usize,
            self.expected.iter().map(Vec::len).sum::<usize>(),
            "{fault:?}"
        );
    }

    /// Runs with a call of a kind failing, for each chosen one.
    fn every(&self, device: Option<usize>, call: Option<Call>, fault: GpuFault, lasting: bool) {
        let of_a_place = match fault {
            _ if device.is_none() => OfAPlace::First,
            GpuFault::OutOfMemory => OfAPlace::Several,
            _ if lasting => OfAPlace::First,
            GpuFault::LostDevice => OfAPlace::Ends,
            _ => OfAPlace::Several,
        };
        let chosen = self.run(None).chosen(device, call, of_a_place);
        let mut failed = 0;
        for &nth in &chosen {
            let ran = self.run(Some(Fault {
                device,
                call,
                nth,
                fault,
                lasting,
            }));
            // Devices take requests as they come: this one may have had fewer than in the run without a fault.
            if ran.calls < nth {
                let all = self.replicas;
                assert_eq!((ran.warm, ran.left), (all, all), "nothing has failed");
                continue;
            }
            failed += 1;
            let others = self.replicas - device.map_or(self.replicas, |_| 1);
            // Without a device there is the CPU.
            assert!(ran.left >= others.max(1), "{call:?} {nth}: {} are left", ran.left);
            assert!(
                ran.left < self.replicas || self.replicas == 1,
                "{call:?} {nth}: a call failed, and its device goes on"
            );
        }
        assert_eq!(failed == 0, chosen.is_empty(), "{call:?}: no call failed");
        eprintln!("{device:?} {call:?} {fault:?}: {failed} of {} calls", chosen.len());
    }
}

#[test]
fn without_a_fault_all_devices_answer() {
    for drawing in [Drawing::GREEDY, Drawing::WIDE, Drawing::ALL] {
        let ran = Trial::new(drawing).run(None);
        assert_eq!((ran.warm, ran.left), (DEVICES, DEVICES));
    }
}

#[test]
fn any_call_of_a_device_may_fail_once() {
    Trial::new(Drawing::GREEDY).every(Some(0), None, GpuFault::Other, false);
}

#[test]
fn a_device_may_be_lost_in_any_call() {
    Trial::new(Drawing::WIDE).every(Some(0), None, GpuFault::LostDevice, false);
}

#[test]
fn any_piece_of_queued_work_may_fail() {
    Trial::new(Drawing::GREEDY).every(Some(1), Some(Call::Work), GpuFault::LostDevice, false);
}

#[test]
fn memory_may_run_out_at_any_time() {
    let trial = Trial::new(Drawing::GREEDY);
    for call in [Call::Alloc, Call::AllocPinned] {
        trial.every(Some(0), Some(call), GpuFault::OutOfMemory, true);
    }
}

#[test]
fn any_kind_of_call_may_stop_working() {
    let trial = Trial::new(Drawing::WIDE);
    for call in CALLS {
        trial.every(Some(0), Some(call), GpuFault::Other, true);
    }
}

#[test]
fn all_devices_may_be_lost() {
    Trial::new(Drawing::GREEDY).every(None, None, GpuFault::LostDevice, true);
}

/// Another thread's call may invalidate a capture: it is tried again. Without memory for its graph the step runs
/// without one. No device is given up.
#[test]
fn any_capture_may_be_invalidated_or_lack_memory() {
    for (drawing, fault) in [
        (Drawing::GREEDY, GpuFault::Capture),
        (Drawing::WIDE, GpuFault::Capture),
        (Drawing::GREEDY, GpuFault::OutOfMemory),
    ] {
        let trial = Trial::new(drawing);
        for call in [Call::BeginCapture, Call::EndCapture] {
            for nth in 1.. {
                let ran = trial.run(Some(Fault {
                    device: Some(0),
                    call: Some(call),
                    nth,
                    fault,
                    lasting: false,
                }));
                assert_eq!((ran.warm, ran.left), (DEVICES, DEVICES), "{call:?} {fault:?} {nth}");
                // The device's steps may all be of the one shape that there was no memory for.
                let launched = ran.graphs > 0 || fault == GpuFault::OutOfMemory;
                assert!(launched, "{call:?} {fault:?} {nth}");
                if ran.calls < nth {
                    break;
                }
            }
        }
    }
}

/// Where all captures are invalidated, or lack a kernel or memory, no graph is launched.
#[test]
fn captures_may_never_succeed() {
    for (call, fault) in [
        (Call::BeginCapture, GpuFault::Capture),
        (Call::EndCapture, GpuFault::Capture),
        (Call::EndCapture, GpuFault::OutOfMemory),
        (Call::Node, GpuFault::Other),
    ] {
        for drawing in [Drawing::GREEDY, Drawing::WIDE] {
            let ran = Trial::new(drawing).run(Some(Fault {
                device: Some(0),
                call: Some(call),
                nth: 1,
                fault,
                lasting: true,
            }));
            assert_eq!((ran.warm, ran.left), (DEVICES, DEVICES), "{call:?}");
            assert_eq!(ran.graphs, 0, "{call:?}");
            // A runtime that loses kernels is detected at the first graph.
            assert!(call != Call::Node || ran.calls < 100, "{} kernels captured", ran.calls);
        }
    }
}

#[test]
fn any_call_of_a_group_s_device_may_fail() {
    let trial = Trial::of_groups(Drawing::GREEDY, 1, 2);
    trial.every(Some(0), None, GpuFault::Other, false);
    trial.every(Some(1), None, GpuFault::LostDevice, false);
}

#[test]
fn any_work_of_a_group_s_device_may_fail() {
    for (group, device) in [(2, 1), (4, 2)] {
        let mut trial = Trial::of_groups(Drawing::WIDE, 1, group);
        trial.order = Order::Random(group as u64);
        trial.every(Some(device), Some(Call::Work), GpuFault::LostDevice, false);
    }
}

#[test]
fn any_kind_of_call_of_a_group_may_stop_working() {
    let mut trial = Trial::of_groups(Drawing::WIDE, 2, 2);
    trial.order = Order::Deferred;
    for call in [Call::Link, Call::CopyFromPeer, Call::Wait] {
        trial.every(Some(1), Some(call), GpuFault::Other, true);
    }
}

/// The host waits for no work that waits for a lost device: it would for ever.
#[test]
fn nobody_waits_for_a_lost_device() {
    for (group, device, order) in [
        (2, 0, Order::Deferred),
        (2, 1, Order::Deferred),
        (3, 0, Order::Random(7)),
        (3, 1, Order::Deferred),
        (3, 2, Order::Eager),
    ] {
        let mut trial = Trial::of_groups(Drawing::WIDE, 1, group);
        (trial.order, trial.losses_block) = (order, true);
        trial.every(Some(device), Some(Call::Work), GpuFault::LostDevice, false);
    }
}

/// Set for a process of its own that runs with a fault.
const CHILD: &str = "GETP_TEST_FAULT";

#[test]
fn a_device_that_fails_is_named() {
    let faults = [
        (
            Call::Alloc,
            GpuFault::OutOfMemory,
            false,
            ["simt:0: Alloc", "out of device memory", "it is left out"],
        ),
        (
            Call::LaunchGraph,
            GpuFault::LostDevice,
            false,
            ["simt:0", "is given up", "go back to the queue"],
        ),
        (
            Call::EndCapture,
            GpuFault::Capture,
            true,
            ["simt:0", "runs without a graph", "other threads' calls"],
        ),
        (
            Call::EndCapture,
            GpuFault::OutOfMemory,
            true,
            ["simt:0", "run without a graph", "no device memory"],
        ),
        (
            Call::Node,
            GpuFault::Other,
            false,
            ["simt:0", "run without graphs", "has captured"],
        ),
    ];
    if let Ok(which) = std::env::var(CHILD) {
        let (call, fault, lasting, _) = faults[which.parse::<usize>().unwrap()];
        Trial::new(Drawing::GREEDY).run(Some(Fault {
            device: Some(0),
            call: Some(call),
            nth: 2,
            fault,
            lasting,
        }));
        return;
    }
    for (which, (_, _, _, words)) in faults.iter().enumerate() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::a_device_that_fails_is_named", "--nocapture"])
            .env(CHILD, which.to_string())
            .output()
            .unwrap();
        let lines = String::from_utf8_lossy(&child.stderr).into_owned();
        assert!(child.status.success(), "{lines}");
        let named = lines
            .lines()
            .filter(|line| words.iter().all(|word| line.contains(word)));
        assert_eq!(named.count(), 1, "{lines}");
    }
}

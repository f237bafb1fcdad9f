//! Several devices behind one request queue: answers are the same for any number of devices, and in whatever order
//! their streams run.

use super::fake::{self, Program};
use super::model::{self, Drawing, Model, replicas};
use super::synthetic::{Dense, Experts, SyntheticCheckpoint, Temperament};
use getp::abi::lifecycle::{self, Backends};
use getp::backend;
use getp::backend::cpu;
use getp::backend::gpu::discover::{self, Usable};
use getp::backend::gpu::driver::simt::{Call, Live, Order, Setup, System};
use getp::backend::gpu::memory::SharedDriver;
use getp::checkpoint::{Checkpoint, Field, Tensor, TensorId};
use getp::config::ModelConfig;
use getp::engine::{Engine, OpenReplicas};
use getp::error::Result;
use getp::options::{DeviceChoice, Options, Precision};
use getp::replica::Replica;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Options for [`Model`]: all requests at once on one device, in more than one step.
pub fn options(options: &Options) -> Options {
    Options {
        device: DeviceChoice::Auto,
        precision: Some(Precision::Exact),
        max_batch: Some(4),
        step_tokens: Some(16),
        kv_mb: 1,
        ..options.clone()
    }
}

/// All devices of a system.
pub fn all(system: &Arc<System>) -> Vec<SharedDriver> {
    (0..system.devices())
        .map(|device| system.driver(device).unwrap())
        .collect()
}

/// Opens replicas on these devices, as the library does on those it finds.
pub fn open(drivers: Vec<SharedDriver>, checkpoint: &dyn Checkpoint, own: &Options) -> Result<Vec<Box<dyn Replica>>> {
    let usable = Usable {
        drivers,
        lines: Vec::new(),
    };
    backend::open_on(usable, checkpoint, &options(own))
}

/// A small system.
pub fn system(devices: usize, order: Order) -> Arc<System> {
    System::new(&Setup {
        devices,
        capacity_bytes: 256 << 20,
        order,
        threads: 1,
        ..Setup::default()
    })
}

/// A whole run on so many devices; all of them are there until the end.
fn run(model: &Model, drawing: Drawing, devices: usize, open: OpenReplicas<'_>) -> Program {
    let mut program = model.program(drawing);
    let backends = Backends {
        open,
        fallback: &cpu::open,
        join: &|| Ok(None),
    };
    model::warm_up(&mut program, &backends).unwrap();
    model::inference(&mut program, &backends).unwrap();
    assert_eq!(replicas(&program), devices);
    fake::finish(&mut program).unwrap();
    program
}

/// What a system's devices answer; nothing of it is left on them.
fn answers(model: &Model, drawing: Drawing, system: &Arc<System>) -> Vec<Vec<c_int>> {
    let open = |checkpoint: &dyn Checkpoint, options: &Options| open(all(system), checkpoint, options);
    let program = run(model, drawing, system.devices(), &open);
    for device in 0..system.devices() {
        assert_eq!(system.live(device), Live::default(), "device {device}");
    }
    program.rows()
}

#[test]
fn answers_do_not_depend_on_the_number_of_devices() {
    let model = Model::new();
    for drawing in [Drawing::GREEDY, Drawing::NUCLEUS, Drawing::WIDE, Drawing::ALL] {
        let expected = model.expected(drawing);
        for devices in [1, 2, 4] {
            let system = system(devices, Order::Eager);
            assert_eq!(
                answers(&model, drawing, &system),
                expected,
                "{drawing:?}, {devices} devices"
            );
        }
    }
}

#[test]
fn rows_that_the_device_cannot_sample_are_fetched() {
    let model = Model::new();
    let copies = |drawing| {
        let system = system(1, Order::Eager);
        answers(&model, drawing, &system);
        system.calls(None, Some(Call::CopyToHost))
    };
    let [none, few, many] = [Drawing::GREEDY, Drawing::NUCLEUS, Drawing::WIDE].map(copies);
    assert_eq!(few, none);
    assert!(many >= none + 10, "{many} copies, {none} in a greedy run");
}

#[test]
fn all_devices_have_a_part_in_the_work() {
    let system = system(3, Order::Eager);
    answers(&Model::new(), Drawing::GREEDY, &system);
    let steps = [0, 1, 2].map(|device| system.calls(Some(device), Some(Call::LaunchGraph)));
    // Two of six requests each: about as many steps.
    let (least, most) = (steps.iter().min().unwrap(), steps.iter().max().unwrap());
    assert!(2 * least >= *most, "{steps:?}");
}

/// Two tests, which run side by side.
fn no_order_of_the_queues_changes(drawing: Drawing) {
    let model = Model::new();
    let expected = model.expected(drawing);
    let random = (1..=4).map(Order::Random);
    for order in [Order::Deferred].into_iter().chain(random) {
        for devices in [1, 2] {
            let found = answers(&model, drawing, &system(devices, order));
            assert_eq!(found, expected, "{order:?}, {devices} devices");
        }
    }
}

#[test]
fn no_order_of_the_queues_changes_a_greedy_answer() {
    no_order_of_the_queues_changes(Drawing::GREEDY);
}

#[test]
fn no_order_of_the_queues_changes_a_drawn_answer() {
    no_order_of_the_queues_changes(Drawing::WIDE);
}

/// Tensors that do not fit the format expected of them are sent anew in a wider one, wherever the misfit is.
#[test]
fn weights_of_any_type_reach_all_devices() {
    let models = [
        Model::wide(Dense::F32, Experts::Mxfp4),
        Model::wide(Dense::Bf16, Experts::Bf16),
        Model::wide(Dense::Bf16, Experts::F32),
        Model::with_last(Field::WMlp1, 0.3125), // BF16
        Model::with_last(Field::WMlp2, 0.3),    // float32
        Model::with_last(Field::Out, 0.3),
        Model::with_last(Field::WQkv, 1e-30), // out of FP16's range
    ];
    for (i, model) in models.iter().enumerate() {
        for order in [Order::Eager, Order::Deferred] {
            let found = answers(model, Drawing::GREEDY, &system(2, order));
            assert_eq!(found, model.expected(Drawing::GREEDY), "model {i}, {order:?}");
        }
    }
}

/// Also where the tensor is sent anew in a wider format.
#[test]
fn values_that_are_not_finite_are_counted_once() {
    for bits in [0x7fc0_0000, 0x7fc0_0001] {
        let model = Model::with_last(Field::WMlp1, f32::from_bits(bits));
        let system = system(1, Order::Eager);
        let mut program = model.program(Drawing::GREEDY);
        let backends = Backends {
            open: &|checkpoint, options| open(all(&system), checkpoint, options),
            fallback: &cpu::open,
            join: &|| Ok(None),
        };
        model::warm_up(&mut program, &backends).unwrap();
        let report = |engine: &Engine| {
            engine
                .replicas()
                .next()
                .map(|first| first.pack_report().non_finite.clone())
        };
        let lines = lifecycle::with_engine(&raw const *program.transformer, report).unwrap();
        fake::finish(&mut program).unwrap();
        let line = "w_mlp1 of layer 1: 1 of its values not finite, the first NaN at row 127, column 31 of expert 3";
        assert_eq!(lines, Some(vec![line.into()]));
    }
}

#[test]
fn devices_are_named_by_number() {
    let model = Model::new();
    let open = |checkpoint: &dyn Checkpoint, own: &Options| {
        let named = Options {
            device: "simt:0,2".parse()?,
            ..options(own)
        };
        let usable = discover::usable(&named, None)?;
        let ordinals: Vec<_> = usable.drivers.iter().map(|driver| driver.device().ordinal).collect();
        assert_eq!(ordinals, [0, 2]);
        backend::open(checkpoint, &named)
    };
    let program = run(&model, Drawing::GREEDY, 2, &open);
    assert_eq!(program.rows(), model.expected(Drawing::GREEDY));
}

/// A checkpoint that notes how many threads the pool has that reads it.
struct Watched {
    model: SyntheticCheckpoint,
    threads: AtomicUsize,
}

impl Checkpoint for Watched {
    fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        if rayon::current_thread_index().is_some() {
            self.threads.fetch_max(rayon::current_num_threads(), Ordering::Relaxed);
        }
        self.model.tensor(id)
    }
}

#[test]
fn as_many_threads_pack_weights_as_are_asked_for() {
    let config = ModelConfig {
        n_layers: 1,
        ..ModelConfig::preset_7m()
    };
    for threads in [1, 5] {
        let watched = Watched {
            model: SyntheticCheckpoint::new(&config, 5, Temperament::Tame).unwrap(),
            threads: AtomicUsize::new(0),
        };
        let own = Options {
            threads,
            ..Options::default()
        };
        open(all(&system(1, Order::Eager)), &watched, &own).unwrap();
        assert_eq!(watched.threads.into_inner(), threads);
    }
}

//! The program's struct and the device's memory before, during and after warm_up, inference and finish.

use super::fake::{self, Program};
use super::model::{Drawing, Model};
use getp::abi::driver;
use getp::abi::lifecycle::with_engine;
use getp::abi::types::{RunState, TransformerWeights};
use getp::backend::gpu::discover;
use getp::options::Options;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The devices. Of the SIMT machine's devices, one that no other test uses, so that all memory in use is these tests'
/// own.
fn device_name() -> String {
    std::env::var("GETP_TEST_DEVICE").unwrap_or_else(|_| "simt:1".into())
}

/// Sets the user's environment variables. While the result lives, no other test of this file runs; on real devices
/// `--test-threads=1` keeps tests of other files from running meanwhile.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    static ONCE: Once = Once::new();
    let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    ONCE.call_once(|| {
        let settings = [
            ("GETP_DEVICE", &*device_name()),
            ("GETP_PRECISION", "exact"),
            ("GETP_MAX_BATCH", "4"),
            ("GETP_STEP_TOKENS", "16"),
            ("GETP_KV_MB", "1"),
        ];
        for (name, value) in settings {
            // SAFETY: nothing here reads the environment but through Rust's own functions, which lock it.
            unsafe { std::env::set_var(name, value) };
        }
    });
    fake::quiet();
    lock
}

fn warm_up(program: &mut Program) {
    // SAFETY: the program's own structs.
    unsafe { driver::warm_up(&raw mut *program.transformer, &raw mut *program.tokenizer) };
}

fn inference(program: &mut Program) -> i64 {
    let (transformer, tokenizer) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    // SAFETY: the program's own structs.
    unsafe {
        driver::inference(
            transformer,
            tokenizer,
            &raw mut program.sampler,
            &raw mut program.requests,
        )
    }
}

fn finish(program: &mut Program) {
    // SAFETY: the program's own structs.
    unsafe { driver::finish(&raw mut *program.transformer, &raw mut *program.tokenizer) };
}

#[test]
fn the_struct_holds_the_first_device_s_addresses_and_then_its_own() {
    let _alone = alone();
    let model = Model::new();
    let mut program = model.program(Drawing::GREEDY);
    let before = program.bytes();
    for _round in 0..2 {
        warm_up(&mut program);
        let current = &*program.transformer;
        let device = with_engine(current, |engine| engine.replicas().next().unwrap().pointers()).unwrap();
        assert_eq!(current.weights, TransformerWeights::from_arrays(device.weights));
        assert_eq!(current.state, RunState::from_arrays(device.state));
        let arrays = current.weights.arrays();
        assert!(
            arrays.iter().all(|at| !at.is_null()),
            "every kind of weight is on the device"
        );
        assert!(
            arrays
                .iter()
                .zip(&before[8..])
                .all(|(at, &original)| at.addr() as u64 != original)
        );
        for at in [
            current.state.x,
            current.state.t,
            current.state.qkv,
            current.state.key_cache,
        ] {
            assert!(!at.is_null());
        }
        assert!(inference(&mut program) > 0);
        assert_eq!(program.rows(), model.expected(Drawing::GREEDY));
        finish(&mut program);
        assert!(program.bytes() == before, "the struct's 384 bytes are as they were");
    }
}

/// A runtime keeps some memory of its own once it has run; then a run leaves as much as it found. Other tests come and
/// go on the device meanwhile: that may hide it in some rounds, but a leak would show in all.
#[test]
fn a_run_leaves_as_much_memory_free_as_the_one_before() {
    let _alone = alone();
    let model = Model::new();
    let expected: Vec<Vec<c_int>> = model.expected(Drawing::ALL);
    let free_after_run = || {
        let mut program = model.program(Drawing::ALL);
        warm_up(&mut program);
        assert!(inference(&mut program) > 0);
        assert_eq!(program.rows(), expected);
        finish(&mut program);
        free_bytes()
    };
    let mut free = vec![free_after_run()];
    while free.len() < 30 {
        free.push(free_after_run());
        if let [.., before, after] = &free[..]
            && before == after
        {
            return;
        }
    }
    panic!("free after each run: {free:?}");
}

fn free_bytes() -> Vec<u64> {
    let options = Options {
        device: device_name().parse().unwrap(),
        ..Options::default()
    };
    let devices = discover::usable(&options, None).unwrap().drivers;
    devices.iter().map(|driver| driver.memory().unwrap().free).collect()
}

//! The SIMT machine's driver: queues, events, graphs, memory, injected faults.

use super::compile;
use getp::backend::gpu::code_objects::simt_image;
use getp::backend::gpu::driver::limited::limited;
use getp::backend::gpu::driver::simt::{Call, Fault, Live, Order, Schedule, Setup, System};
use getp::backend::gpu::driver::{
    DeviceMemory, DevicePtr, Driver, EventHandle, FunctionHandle, GraphHandle, KernelLaunch, ModuleHandle, Pinned,
    StreamHandle,
};
use getp::error::{Error, GpuFault, Result};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

const N: usize = 1000;
const BYTES: usize = N * 4;
const ORDERS: [Order; 6] = [
    Order::Eager,
    Order::Deferred,
    Order::Random(1),
    Order::Random(2),
    Order::Random(3),
    Order::Random(4),
];

fn kernels() -> &'static [u8] {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let sources = ["kernels/gpu/simt.cpp", "tests/simt/kernels.hip"];
    let library = LIBRARY.get_or_init(|| compile("simt_driver_test.so", &["-O2", "-shared", "-fPIC"], &sources));
    library.as_os_str().as_encoded_bytes()
}

fn system(order: Order) -> Arc<System> {
    let schedule = if let Order::Random(seed) = order {
        Schedule::Random(seed)
    } else {
        Schedule::InOrder
    };
    System::new(&Setup {
        devices: 2,
        capacity_bytes: 1 << 20,
        order,
        schedule,
        threads: 2,
        ..Setup::default()
    })
}

/// A driver that frees everything that was allocated from it.
struct Rig {
    driver: Arc<dyn Driver>,
    buffers: Vec<DevicePtr>,
    pinned: Vec<Pinned>,
    streams: Vec<StreamHandle>,
    events: Vec<EventHandle>,
    modules: Vec<ModuleHandle>,
    graphs: Vec<GraphHandle>,
}

impl Rig {
    fn new(system: &Arc<System>, ordinal: usize) -> Self {
        Self {
            driver: system.driver(ordinal).unwrap(),
            buffers: Vec::new(),
            pinned: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            modules: Vec::new(),
            graphs: Vec::new(),
        }
    }

    fn buffer(&mut self) -> Result<DevicePtr> {
        self.buffers.push(self.driver.alloc(BYTES)?);
        Ok(self.buffers[self.buffers.len() - 1])
    }

    fn stream(&mut self) -> Result<StreamHandle> {
        self.streams.push(self.driver.stream()?);
        Ok(self.streams[self.streams.len() - 1])
    }

    fn event(&mut self, timing: bool) -> Result<EventHandle> {
        self.events.push(self.driver.event(timing)?);
        Ok(self.events[self.events.len() - 1])
    }

    fn kernel(&mut self, name: &str) -> Result<FunctionHandle> {
        let module = self.driver.load_module(kernels())?;
        self.modules.push(module);
        self.driver.function(module, name, 256)
    }

    fn graph(&mut self, stream: StreamHandle, work: impl FnOnce(&Self) -> Result<()>) -> Result<GraphHandle> {
        self.driver.begin_capture(stream)?;
        let queued = work(self);
        // A graph of the part that was queued must be freed, too.
        let graph = self.driver.end_capture(stream).map(|captured| captured.graph);
        self.graphs.extend(graph.as_ref().ok());
        queued.and(graph)
    }

    fn put(&self, to: DevicePtr, from: &[f32], stream: StreamHandle) -> Result<()> {
        // SAFETY: the tests keep `from` until they have waited for the stream.
        unsafe {
            self.driver
                .copy_to_device(to, from.as_ptr().cast(), from.len() * 4, stream)
        }
    }

    fn get(&self, from: DevicePtr, stream: StreamHandle) -> Result<Vec<f32>> {
        let mut to = vec![0f32; N];
        // SAFETY: as long as said, and waited for.
        unsafe { self.driver.copy_to_host(to.as_mut_ptr().cast(), from, BYTES, stream) }?;
        self.driver.synchronize(stream)?;
        Ok(to)
    }

    fn copy(&self, to: DevicePtr, from: DevicePtr, stream: StreamHandle) -> Result<()> {
        // SAFETY: both are buffers of the rig.
        unsafe { self.driver.copy(to, from, BYTES, stream) }
    }

    fn scale(&self, f: FunctionHandle, x: DevicePtr, n: usize, factor: f32, stream: StreamHandle) -> Result<()> {
        let args = [&x.0.to_ne_bytes()[..], &(n as i32).to_ne_bytes(), &factor.to_ne_bytes()].concat();
        let launch = KernelLaunch {
            function: f,
            grid: n.div_ceil(64) as u32,
            block: 64,
            shared_bytes: 0,
            args: &args,
            overlap: true,
        };
        // SAFETY: TestArgs, of a buffer of the rig.
        unsafe { self.driver.launch(&launch, stream) }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let driver = &self.driver;
        self.streams
            .iter()
            .for_each(|&stream| driver.free_stream(stream).unwrap());
        self.events.iter().for_each(|&event| driver.free_event(event).unwrap());
        self.graphs.iter().for_each(|&graph| driver.free_graph(graph).unwrap());
        self.modules
            .iter()
            .for_each(|&module| driver.free_module(module).unwrap());
        // SAFETY: the streams that used them are gone.
        self.buffers.iter().for_each(|&at| unsafe { driver.free(at) }.unwrap());
        // SAFETY: as above.
        self.pinned
            .iter()
            .for_each(|&pinned| unsafe { driver.free_pinned(pinned) }.unwrap());
    }
}

fn numbers() -> Vec<f32> {
    (0..N).map(|i| i as f32).collect()
}

fn times(factor: f32) -> Vec<f32> {
    numbers().iter().map(|v| v * factor).collect()
}

fn fault_of(error: &Error) -> GpuFault {
    match error {
        Error::Gpu { fault, .. } => *fault,
        other => panic!("{other}"),
    }
}

/// One of everything a driver does: copies, a kernel, a graph, events across streams, pinned memory, times.
fn small_run(rig: &mut Rig) -> Result<Vec<f32>> {
    rig.driver.memory()?;
    let (first, second) = (rig.stream()?, rig.stream()?);
    let (x, y) = (rig.buffer()?, rig.buffer()?);
    let pinned = rig.driver.alloc_pinned(BYTES)?;
    rig.pinned.push(pinned);
    let scale = rig.kernel("test_scale")?;
    let (start, end) = (rig.event(true)?, rig.event(true)?);
    let values = numbers();
    let queued = (|| {
        rig.put(x, &values, first)?;
        rig.driver.record(start, first)?;
        rig.scale(scale, x, N, 2., first)
    })();
    // The values are read when the copy runs, so it is waited for whatever happened.
    let waited = rig.driver.synchronize(first);
    queued?;
    waited?;
    let graph = rig.graph(first, |rig| {
        rig.scale(scale, x, N, 3., first)?;
        rig.copy(y, x, first)?;
        rig.driver.record(end, first)
    })?;
    // SAFETY: its buffers live as long as the rig.
    unsafe { rig.driver.launch_graph(graph, first) }?;
    rig.driver.wait(second, end)?;
    // SAFETY: pinned memory and buffers live as long as the rig.
    unsafe {
        rig.driver.fill(x, 0, BYTES, second)?;
        rig.driver.copy_to_host(pinned.host, y, BYTES, second)?;
    }
    rig.driver.synchronize(second)?;
    rig.driver.synchronize_event(end)?;
    assert!(rig.driver.elapsed_us(start, end)? >= 0.);
    // SAFETY: N floats, and the stream that wrote them was waited for.
    Ok(unsafe { std::slice::from_raw_parts(pinned.host.cast::<f32>(), N) }.to_vec())
}

#[test]
fn a_run_gives_the_same_in_any_order() {
    for order in ORDERS {
        let system = system(order);
        let mut rig = Rig::new(&system, 0);
        assert!(small_run(&mut rig).unwrap() == times(6.), "{order:?}");
        let live = system.live(0);
        assert_eq!((live.allocations, live.bytes, live.pinned), (2, 2 * BYTES, 1));
        assert_eq!((live.streams, live.events, live.modules, live.graphs), (2, 2, 1, 1));
        drop(rig);
        assert_eq!(system.live(0), Live::default());
    }
}

/// Whether a reader in another stream sees what the writer wrote; `ordered`: it waits for it.
fn reader_sees_writer(order: Order, ordered: bool) -> bool {
    let mut rig = Rig::new(&system(order), 0);
    let (writer, reader) = (rig.stream().unwrap(), rig.stream().unwrap());
    let x = rig.buffer().unwrap();
    let written = rig.event(false).unwrap();
    let values = numbers();
    rig.put(x, &values, writer).unwrap();
    rig.driver.record(written, writer).unwrap();
    if ordered {
        rig.driver.wait(reader, written).unwrap();
    }
    let seen = rig.get(x, reader).unwrap();
    rig.driver.synchronize(writer).unwrap();
    seen == values
}

/// Whether a reader sees the old values though a writer overwrites them; `ordered`: the writer waits for the reader.
fn reader_is_before_writer(order: Order, ordered: bool) -> bool {
    let mut rig = Rig::new(&system(order), 0);
    let (writer, reader) = (rig.stream().unwrap(), rig.stream().unwrap());
    let (x, copy) = (rig.buffer().unwrap(), rig.buffer().unwrap());
    let (written, read) = (rig.event(false).unwrap(), rig.event(false).unwrap());
    let (old, new) = (numbers(), times(2.));
    rig.put(x, &old, writer).unwrap();
    rig.driver.record(written, writer).unwrap();
    rig.driver.wait(reader, written).unwrap();
    rig.copy(copy, x, reader).unwrap();
    rig.driver.record(read, reader).unwrap();
    if ordered {
        rig.driver.wait(writer, read).unwrap();
    }
    rig.put(x, &new, writer).unwrap();
    rig.driver.synchronize(writer).unwrap();
    rig.get(copy, reader).unwrap() == old
}

#[test]
fn missing_waits_are_found() {
    for order in ORDERS {
        assert!(reader_sees_writer(order, true), "{order:?}");
        assert!(reader_is_before_writer(order, true), "{order:?}");
    }
    assert!(!reader_sees_writer(Order::Deferred, false));
    assert!(!reader_is_before_writer(Order::Deferred, false));
    let some_seed_fails = |right: fn(Order, bool) -> bool| (0..20).any(|seed| !right(Order::Random(seed), false));
    assert!(some_seed_fails(reader_sees_writer));
    assert!(some_seed_fails(reader_is_before_writer));
}

#[test]
fn a_graph_runs_when_launched_and_as_often() {
    for order in ORDERS {
        let system = system(order);
        let mut rig = Rig::new(&system, 0);
        let stream = rig.stream().unwrap();
        let x = rig.buffer().unwrap();
        let scale = rig.kernel("test_scale").unwrap();
        let values = numbers();
        rig.put(x, &values, stream).unwrap();
        let graph = rig
            .graph(stream, |rig| {
                rig.scale(scale, x, N, 2., stream)?;
                assert_eq!(fault_of(&rig.driver.synchronize(stream).unwrap_err()), GpuFault::Other);
                assert!(rig.driver.begin_capture(stream).is_err());
                Ok(())
            })
            .unwrap();
        assert!(rig.get(x, stream).unwrap() == values);
        for _ in 0..3 {
            // SAFETY: the buffer lives as long as the rig.
            unsafe { rig.driver.launch_graph(graph, stream) }.unwrap();
        }
        assert!(rig.get(x, stream).unwrap() == times(8.));
        assert!(rig.driver.end_capture(stream).is_err());
    }
}

#[test]
fn a_kernel_that_goes_wrong_loses_its_device() {
    for order in ORDERS {
        let system = system(order);
        let (mut rig, mut other) = (Rig::new(&system, 0), Rig::new(&system, 1));
        let stream = rig.stream().unwrap();
        let x = rig.buffer().unwrap();
        let diverge = rig.kernel("test_diverge").unwrap();
        rig.scale(diverge, x, 64, 1., stream).unwrap();
        let error = rig.driver.synchronize(stream).unwrap_err();
        assert_eq!(fault_of(&error), GpuFault::LostDevice);
        assert!(
            error
                .to_string()
                .contains("kernel test_diverge, block 0, thread 5: divergence"),
            "{error}"
        );
        assert_eq!(fault_of(&rig.driver.alloc(1).unwrap_err()), GpuFault::LostDevice);
        assert!(small_run(&mut other).unwrap() == times(6.));
        drop(rig);
        assert_eq!(system.live(0), Live::default());
    }
}

#[test]
fn writes_and_copies_outside_of_allocations_are_found() {
    let system = system(Order::Eager);
    let (mut rig, mut other) = (Rig::new(&system, 0), Rig::new(&system, 1));
    let stream = rig.stream().unwrap();
    let x = rig.buffer().unwrap();
    let values = vec![0f32; N + 1];
    rig.put(x.add(4), &values[..N], stream).unwrap();
    let error = rig.driver.synchronize(stream).unwrap_err();
    assert!(
        error.to_string().contains("not within an allocation of simt:0"),
        "{error}"
    );

    let stream = other.stream().unwrap();
    let bytes = 4 * (N + 1);
    let y = other.buffer().unwrap();
    let scale = other.kernel("test_scale").unwrap();
    other.scale(scale, y, N + 1, 1., stream).unwrap();
    // Times one leaves a float of guard bytes as it is.
    other.driver.synchronize(stream).unwrap();
    other.scale(scale, y, bytes / 4, 2., stream).unwrap();
    let error = other.driver.synchronize(stream).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("kernel test_scale: bytes beside the allocation of 4000 bytes"),
        "{error}"
    );
    let found = other.buffers.pop().unwrap();
    // SAFETY: nobody uses it.
    assert!(unsafe { other.driver.free(found) }.is_err());
}

#[test]
fn memory_is_as_large_as_said() {
    let system = system(Order::Deferred);
    let driver = system.driver(0).unwrap();
    let before = driver.memory().unwrap();
    assert_eq!((before.free, before.total), (1 << 20, 1 << 20));
    let half = driver.alloc(1 << 19).unwrap();
    assert_eq!(driver.memory().unwrap().free, 1 << 19);
    let error = driver.alloc((1 << 19) + 1).unwrap_err();
    assert_eq!(fault_of(&error), GpuFault::OutOfMemory);
    assert!(error.to_string().contains("524289 bytes"), "{error}");
    assert_eq!(fault_of(&driver.alloc(0).unwrap_err()), GpuFault::Other);
    // SAFETY: nobody uses it.
    unsafe { driver.free(half) }.unwrap();
    assert_eq!(driver.memory().unwrap(), before);
    // SAFETY: no such memory, which is found out.
    assert!(unsafe { driver.free(half) }.is_err());
}

#[test]
fn devices_copy_from_each_other() {
    for order in ORDERS {
        let system = system(order);
        let (mut a, mut b) = (Rig::new(&system, 0), Rig::new(&system, 1));
        let (from, to) = (a.buffer().unwrap(), b.buffer().unwrap());
        let (stream_a, stream_b) = (a.stream().unwrap(), b.stream().unwrap());
        let written = a.event(false).unwrap();
        let values = numbers();
        a.put(from, &values, stream_a).unwrap();
        a.driver.record(written, stream_a).unwrap();
        b.driver.wait(stream_b, written).unwrap();
        // SAFETY: both are live until the stream is waited for.
        unsafe { b.driver.copy_from_peer(to, &*a.driver, from, BYTES, stream_b) }.unwrap();
        assert!(b.get(to, stream_b).unwrap() == values, "{order:?}");
        assert!(a.driver.synchronize(stream_b).is_err(), "a stream of another device");
    }
}

#[test]
fn links_say_who_reaches_whom() {
    for peer_access in [true, false] {
        let system = System::new(&Setup {
            devices: 3,
            peer_access,
            ..Setup::default()
        });
        let (a, b, c) = (Rig::new(&system, 0), Rig::new(&system, 1), Rig::new(&system, 2));
        let [near, far] = [&b, &c].map(|peer| a.driver.link(&*peer.driver).unwrap());
        assert!(near.direct == peer_access && far.direct == peer_access);
        assert!(near.distance < far.distance);
        let stream = a.driver.stream().unwrap();
        let (from, to) = (b.driver.alloc(8).unwrap(), a.driver.alloc(8).unwrap());
        // SAFETY: both are live until the stream is waited for.
        let copied = unsafe { a.driver.copy_from_peer(to, &*b.driver, from, 8, stream) };
        assert_eq!(copied.is_ok(), peer_access);
        a.driver.synchronize(stream).unwrap();
    }
}

#[test]
fn a_limited_device_has_no_more_memory_than_that() {
    let system = system(Order::Eager);
    let driver = limited(system.driver(0).unwrap(), 1000, "GETP_DEVICE_MB");
    let memory = |free| DeviceMemory { free, total: 1000 };
    assert_eq!(driver.memory().unwrap(), memory(1000));
    let first = driver.alloc(600).unwrap();
    assert_eq!(driver.memory().unwrap(), memory(400));
    let error = driver.alloc(401).unwrap_err();
    assert_eq!(fault_of(&error), GpuFault::OutOfMemory);
    assert!(
        error
            .to_string()
            .starts_with("simt:0: 401 bytes, 400 of GETP_DEVICE_MB are free"),
        "{error}"
    );
    let second = driver.alloc(400).unwrap();
    // SAFETY: nobody uses them.
    unsafe { driver.free(first).and(driver.free(second)) }.unwrap();
    assert_eq!(driver.memory().unwrap(), memory(1000));
    // What the device does not have is not there whatever the limit.
    let driver = limited(system.driver(1).unwrap(), 2 << 20, "GETP_DEVICE_MB");
    let whole = system.driver(1).unwrap().memory().unwrap();
    assert_eq!(driver.memory().unwrap(), whole);
    assert_eq!(
        fault_of(&driver.alloc(whole.free as usize + 1).unwrap_err()),
        GpuFault::OutOfMemory
    );
    assert_eq!(driver.memory().unwrap(), whole);
}

#[test]
fn code_that_does_not_fit_is_refused() {
    let system = system(Order::Eager);
    let mut rig = Rig::new(&system, 0);
    for image in [&b"/no/such/library.so"[..], b"\xff\xfe", b"/etc/passwd"] {
        assert_eq!(
            fault_of(&rig.driver.load_module(image).unwrap_err()),
            GpuFault::InvalidImage
        );
    }
    assert_eq!(fault_of(&rig.kernel("no_such_kernel").unwrap_err()), GpuFault::NoKernel);
    let module = rig.modules[0];
    assert_eq!(
        fault_of(&rig.driver.function(module, "test_scale", 65537).unwrap_err()),
        GpuFault::Other
    );
    assert_eq!(fault_of(&system.driver(2).err().unwrap()), GpuFault::NoDevice);
    let stream = rig.stream().unwrap();
    let launch = KernelLaunch {
        function: rig.kernel("test_scale").unwrap(),
        grid: 1,
        block: 128,
        shared_bytes: 0,
        args: &[0; 16],
        overlap: false,
    };
    // SAFETY: it is found not to fit before it runs.
    unsafe {
        let too_much = KernelLaunch {
            shared_bytes: 257,
            ..launch
        };
        assert!(rig.driver.launch(&too_much, stream).is_err());
        assert!(rig.driver.launch(&KernelLaunch { grid: 0, ..launch }, stream).is_err());
        rig.driver.launch(&launch, stream).unwrap();
    }
    let error = rig.driver.synchronize(stream).unwrap_err();
    assert!(
        error.to_string().contains("launched with 128 threads, made for 64"),
        "{error}"
    );
}

#[test]
fn the_product_s_kernels_load() {
    let system = system(Order::Eager);
    let mut rig = Rig::new(&system, 0);
    rig.modules.push(rig.driver.load_module(simt_image()).unwrap());
}

fn fault(call: Call, nth: u64, fault: GpuFault) -> Fault {
    Fault {
        device: Some(0),
        call: Some(call),
        nth,
        fault,
        lasting: false,
    }
}

#[test]
fn a_graph_s_nodes_are_counted_and_one_can_be_left_out() {
    for (left_out, nodes, factor) in [(None, 3, 6.), (Some(1), 2, 3.), (Some(2), 2, 2.)] {
        let system = system(Order::Eager);
        let mut rig = Rig::new(&system, 0);
        let stream = rig.stream().unwrap();
        let (x, y) = (rig.buffer().unwrap(), rig.buffer().unwrap());
        let end = rig.event(false).unwrap();
        let scale = rig.kernel("test_scale").unwrap();
        let values = numbers();
        rig.put(x, &values, stream).unwrap();
        if let Some(nth) = left_out {
            system.inject(fault(Call::Node, nth, GpuFault::Other));
        }
        rig.driver.begin_capture(stream).unwrap();
        rig.scale(scale, x, N, 2., stream).unwrap();
        rig.scale(scale, x, N, 3., stream).unwrap();
        rig.driver.record(end, stream).unwrap();
        rig.copy(y, x, stream).unwrap();
        let captured = rig.driver.end_capture(stream).unwrap();
        rig.graphs.push(captured.graph);
        assert_eq!(captured.nodes, nodes);
        // SAFETY: the buffers live as long as the rig.
        unsafe { rig.driver.launch_graph(captured.graph, stream) }.unwrap();
        assert!(rig.get(y, stream).unwrap() == times(factor), "{left_out:?}");
    }
}

/// The stream then takes no more work, as HIP's; another one does.
#[test]
fn a_capture_can_be_invalidated() {
    for call in [Call::BeginCapture, Call::Launch, Call::EndCapture] {
        let system = system(Order::Eager);
        let mut rig = Rig::new(&system, 0);
        let (stream, other) = (rig.stream().unwrap(), rig.stream().unwrap());
        let x = rig.buffer().unwrap();
        let scale = rig.kernel("test_scale").unwrap();
        let values = numbers();
        rig.put(x, &values, other).unwrap();
        system.inject(fault(call, 1, GpuFault::Capture));
        let captured = rig.graph(stream, |rig| rig.scale(scale, x, N, 2., stream));
        assert_eq!(fault_of(&captured.unwrap_err()), GpuFault::Capture, "{call:?}");
        let _ = rig.driver.end_capture(stream);
        let launched = rig.scale(scale, x, N, 2., stream);
        assert_eq!(fault_of(&launched.unwrap_err()), GpuFault::Capture, "{call:?}");
        rig.scale(scale, x, N, 5., other).unwrap();
        assert!(rig.get(x, other).unwrap() == times(5.), "{call:?}");
    }
}

/// How many calls the small run makes.
fn calls_of_a_run(call: Option<Call>) -> u64 {
    let system = system(Order::Eager);
    small_run(&mut Rig::new(&system, 0)).unwrap();
    system.calls(Some(0), call)
}

#[test]
fn every_call_can_fail_and_all_is_given_back() {
    let calls = calls_of_a_run(None);
    assert!(calls > 25, "{calls}");
    for order in [Order::Eager, Order::Deferred, Order::Random(9)] {
        for (nth, fault) in (1..=calls).flat_map(|n| [(n, GpuFault::Other), (n, GpuFault::LostDevice)]) {
            let system = system(order);
            system.inject(Fault {
                device: Some(0),
                call: None,
                nth,
                fault,
                lasting: false,
            });
            let mut rig = Rig::new(&system, 0);
            assert_eq!(fault_of(&small_run(&mut rig).unwrap_err()), fault, "call {nth}");
            let after = rig.driver.memory().map_err(|error| fault_of(&error));
            assert_eq!(after.is_err(), fault == GpuFault::LostDevice, "call {nth}");
            drop(rig);
            assert_eq!(system.live(0), Live::default(), "call {nth}");
            assert!(
                small_run(&mut Rig::new(&system, 1)).unwrap() == times(6.),
                "the other device"
            );
        }
    }
}

#[test]
fn queued_work_can_fail() {
    for nth in 1..=calls_of_a_run(Some(Call::Work)) {
        let system = system(Order::Deferred);
        system.inject(Fault {
            device: None,
            call: Some(Call::Work),
            nth,
            fault: GpuFault::LostDevice,
            lasting: false,
        });
        let mut rig = Rig::new(&system, 0);
        assert_eq!(
            fault_of(&small_run(&mut rig).unwrap_err()),
            GpuFault::LostDevice,
            "work {nth}"
        );
    }
}

#[test]
fn a_lasting_fault_lasts_and_another_does_not() {
    for lasting in [false, true] {
        let system = system(Order::Eager);
        system.inject(Fault {
            device: None,
            call: Some(Call::Alloc),
            nth: 2,
            fault: GpuFault::OutOfMemory,
            lasting,
        });
        let mut rig = Rig::new(&system, 1);
        let failed = [(); 4].map(|()| rig.buffer().is_err());
        assert_eq!(failed, [false, true, lasting, lasting]);
    }
}

/// In a function of its own, and in a loop that is not unrolled, so that each caller has a place of its own.
#[inline(never)]
fn ask(driver: &Arc<dyn Driver>, times: usize) {
    for _ in 0..std::hint::black_box(times) {
        driver.memory().unwrap();
    }
}

#[test]
fn calls_in_a_loop_have_one_place_and_callers_have_their_own() {
    let system = system(Order::Eager);
    let [one, other] = [0, 1].map(|device| system.driver(device).unwrap());
    ask(&one, 1);
    system.keep_places();
    ask(&one, 3);
    ask(&one, 2);
    ask(&other, 2);
    let places = system.places(Some(0), None);
    let (first, last) = (places[0], places[3]);
    assert_eq!(places, [first, first, first, last, last]);
    assert_ne!(first, last);
    assert_eq!(system.places(Some(1), Some(Call::Memory)).len(), 2);
    assert!(system.places(None, Some(Call::Alloc)).is_empty());
}

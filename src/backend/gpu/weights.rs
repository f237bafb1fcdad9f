//! Loads the weights: packed once on the host, copied to every device, rearranged there.
//!
//! 16-bit matrices become FP16 if the loss is below float32's rounding, and stay BF16 otherwise. The matrix cores take
//! both operands in one format, so one matrix that does not fit FP16 makes the whole model BF16. A matrix that needs
//! float32, or for which the family has no kernels, stays in the wire format and is multiplied by the plain kernels.

use super::args::{PackArgs, RangeArgs, SLAB, WIRE_ROWS};
use super::catalogue::Elements;
use super::context::Context;
use super::driver::DevicePtr;
use super::layout::TypedPtr;
use super::memory::{DeviceBuffer, PinnedBuffer, to_host};
use super::shapes::{MatrixForm, Numbers};
use super::staging::{self, OfLayer, Parcel, Staging};
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::{Load, Weights};
use crate::report;
use crate::tensors::{Field, TensorId};
use crate::threads;
use crate::weights::{
    Findings, Layout, NonFinite, PackReport, RowMajor, Transfer, WeightFormat, fingerprint_of, not_expected,
};
use crate::workers::Workers;
use std::ops::Range;
use std::panic::resume_unwind;
use std::time::Instant;

/// A model's weights on one device.
pub type GpuWeights = Weights<Matrix, Vector>;

/// Float32 values: a norm, biases, sinks.
pub type Vector = DeviceBuffer<f32>;

/// One matrix, or the experts' matrices of a layer.
pub struct Matrix {
    /// Its bytes.
    pub bytes: DeviceBuffer,
    /// Their layout.
    pub form: MatrixForm,
    /// Matrices.
    pub members: usize,
    /// Rows of each (outputs).
    pub rows: usize,
    /// Columns of each (inputs).
    pub cols: usize,
    /// Row blocks of each, as the family's kernels cut it.
    pub row_blocks: usize,
    /// What products are multiplied by: the inverse of the power of two that scaled the weights.
    pub scale: f32,
}

impl Matrix {
    /// Whether it is in the wire format, for the plain kernels.
    pub fn is_wire(&self) -> bool {
        matches!(self.form, MatrixForm::Wire(_))
    }

    /// Blocks along K.
    pub fn k_blocks(&self) -> usize {
        self.cols.div_ceil(SLAB)
    }
}

/// A device, and the layers that it is to hold, with the embedding and the head if they are first and last. The devices
/// of one replica have all layers, each one.
pub struct Share<'a> {
    /// The device.
    pub context: &'a Context,
    /// Its layers.
    pub layers: Range<usize>,
}

/// The weights on every device, the format of activations that they need, and a report for the summary.
pub struct Loaded {
    /// One per share, in their order.
    pub weights: Vec<GpuWeights>,
    /// FP16, or BF16 if a matrix does not fit FP16.
    pub elements: Elements,
    /// For the summary.
    pub report: PackReport,
}

/// Loads on each device the weights it is to hold, for `exact` products or for those of `fast`. So many threads pack
/// them, or one a core if that is 0.
pub fn load(shares: &[Share<'_>], checkpoint: &dyn Checkpoint, exact: bool, threads: usize) -> Result<Loaded> {
    let start = Instant::now();
    let load_as = |elements| load_as(shares, checkpoint, elements, exact, threads);
    let loaded = load_as(Elements::F16).or_else(|stop| {
        let name = stop.too_wide()?;
        report::line(format_args!(
            "{name}: its range is too wide for FP16; activations and the KV cache are BF16"
        ));
        load_as(Elements::Bf16).or_else(|stop| {
            let name = stop.too_wide()?;
            Err(Error::Internal(format!("{name} fits neither FP16 nor BF16")))
        })
    });
    loaded.map(|mut loaded| {
        loaded.report.seconds = start.elapsed().as_secs_f64();
        loaded
    })
}

/// Why loading stopped.
enum Stop {
    /// The range of this tensor's values is too large for the format of activations.
    TooWide(&'static str),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Stop {
    fn too_wide(self) -> Result<&'static str> {
        match self {
            Self::TooWide(name) => Ok(name),
            Self::Failed(error) => Err(error),
        }
    }
}

fn load_as(
    shares: &[Share<'_>],
    checkpoint: &dyn Checkpoint,
    elements: Elements,
    exact: bool,
    threads: usize,
) -> Result<Loaded, Stop> {
    let config = checkpoint.config();
    let order = order(shares, config)?;
    let contexts = memory::collect(shares.iter().map(|share| share.context), Purpose::Checkpoint)?;
    let (packer, staging) = staging::pair(&contexts, checkpoint, &order)?;
    let loader = Loader {
        shares,
        config,
        elements,
        exact,
        report: PackReport::default(),
        wires: shares.iter().map(|_| None).collect(),
        staging,
        on_devices: OnDevices::default(),
    };
    // Not rayon's global pool: its threads would outlive the library, and be gone after a fork.
    let workers = Workers::start("getp pack", threads)?;
    threads::scope(|scope| {
        let pack = || workers.pool().install(|| packer.run());
        let packing = scope.spawn("getp pack", pack).map_err(no_thread)?;
        let loaded = loader.load(&order);
        // The loader is gone: the packer stops.
        let pack_seconds = packing.join().unwrap_or_else(|panic| resume_unwind(panic));
        loaded.map(|mut loaded| {
            if let Some(sent) = &mut loaded.report.sent {
                sent.pack_seconds = pack_seconds;
            }
            loaded
        })
    })
}

fn no_thread(error: std::io::Error) -> Error {
    Error::State(format!("cannot start the thread that packs weights: {error}"))
}

/// The layers, in turn one of each device of a replica, so that the devices are busy with them side by side.
fn order(shares: &[Share<'_>], config: &ModelConfig) -> Result<Vec<usize>> {
    let within = |layer: usize| {
        let holder = shares.iter().find(|share| share.layers.contains(&layer));
        holder.map_or(0, |share| layer - share.layers.start)
    };
    let mut order = memory::collect(0..config.n_layers, Purpose::Checkpoint)?;
    order.sort_unstable_by_key(|&layer| (within(layer), layer));
    Ok(order)
}

/// What a [`Packer`](staging::Packer) sends, on its way to the devices.
struct Loader<'a> {
    shares: &'a [Share<'a>],
    config: &'a ModelConfig,
    elements: Elements,
    exact: bool,
    report: PackReport,
    /// A buffer per device for a tensor in the wire format, as large as the largest of its tensors so far.
    wires: Vec<Option<DeviceBuffer>>,
    staging: Staging<'a>,
    on_devices: OnDevices,
}

/// What is on its devices: one of each for every device that holds it, in their order.
#[derive(Default)]
struct OnDevices {
    matrices: Vec<(OfLayer, Vec<Matrix>)>,
    vectors: Vec<(OfLayer, Vec<Vector>)>,
}

impl Load for OnDevices {
    type Matrix = Vec<Matrix>;
    type Vector = Vec<Vector>;
    type Error = Error;

    fn matrix(&mut self, array: Field, layer: usize) -> Result<Vec<Matrix>> {
        take(&mut self.matrices, OfLayer { array, layer })
    }

    fn vector(&mut self, array: Field, layer: usize) -> Result<Vec<Vector>> {
        take(&mut self.vectors, OfLayer { array, layer })
    }
}

fn take<T>(list: &mut Vec<(OfLayer, T)>, of: OfLayer) -> Result<T> {
    let at = list.iter().position(|(here, _)| *here == of);
    let missing = || Error::Internal(format!("{} of layer {} has not come", of.array.name(), of.layer));
    Ok(list.swap_remove(at.ok_or_else(missing)?).1)
}

/// Matrices whose tiles are coming.
struct PartialMatrices {
    of: OfLayer,
    ids: Vec<TensorId>,
    /// The devices that hold them.
    holders: Vec<usize>,
    wire: OnWire,
    /// Bytes that have come.
    bytes: usize,
}

/// A tensor in the wire format in a device's buffer.
#[derive(Clone, Copy)]
struct OnWire {
    at: DevicePtr,
    format: WeightFormat,
    members: usize,
    rows: usize,
    cols: usize,
}

impl OnWire {
    fn tiles(&self) -> usize {
        self.members * self.rows.div_ceil(WIRE_ROWS)
    }

    fn bytes(&self) -> usize {
        self.tiles() * RowMajor.tile_bytes(self.format, self.cols)
    }

    fn values(&self) -> usize {
        self.tiles() * WIRE_ROWS * self.cols
    }
}

impl Loader<'_> {
    /// Takes parcel after parcel, then groups what has come by device.
    fn load(mut self, order: &[usize]) -> Result<Loaded, Stop> {
        let mut coming = None;
        let out_of_turn = || Error::Internal("tiles of no tensor".into());
        while let Some(parcel) = self.staging.next() {
            match parcel {
                Parcel::Begin { of, format } => coming = Some(self.begin(of, format)?),
                Parcel::Tiles(buffer, bytes) => {
                    self.send(coming.as_mut().ok_or_else(out_of_turn)?, buffer, bytes)?;
                }
                Parcel::End { read_bytes, found } => {
                    self.report.read_bytes += read_bytes;
                    self.end(coming.take().ok_or_else(out_of_turn)?, found)?;
                }
                Parcel::Vectors { of, values, read_bytes } => {
                    self.report.read_bytes += read_bytes;
                    self.vectors(of, &values)?;
                }
                Parcel::Failed(error) => return Err(error.into()),
            }
        }
        let weights = self.by_device(order)?;
        let (bytes, seconds) = self.staging.sent();
        let replicas = self.shares.iter().filter(|share| share.layers.start == 0).count();
        self.report.sent = Some(Transfer {
            bytes,
            link_seconds: seconds / replicas.max(1) as f64,
            pack_seconds: 0.0,
        });
        Ok(Loaded {
            weights,
            elements: self.elements,
            report: self.report,
        })
    }

    fn by_device(&mut self, order: &[usize]) -> Result<Vec<GpuWeights>> {
        let mut weights = Weights::load(order.iter().copied(), &mut self.on_devices)?;
        // Popped from the end, so the last device comes first.
        let shares = self.shares.iter().rev();
        let devices = shares.map(|share| weights.try_map(share.layers.clone(), Vec::pop, Vec::pop));
        let mut devices: Vec<_> = devices
            .collect::<Option<_>>()
            .ok_or_else(|| Error::Internal("a device without weights".into()))?;
        devices.reverse();
        Ok(devices)
    }

    /// The devices that hold tensors.
    fn holders(&self, of: OfLayer) -> Result<Vec<usize>> {
        let layer = of.array.goes_with(of.layer, self.config);
        let holds = |&device: &usize| self.shares[device].layers.contains(&layer);
        memory::collect((0..self.shares.len()).filter(holds), Purpose::Checkpoint)
    }

    /// Matrices are to come in this format: their holders get room for them.
    fn begin(&mut self, of: OfLayer, format: WeightFormat) -> Result<PartialMatrices> {
        let (ids, holders) = (of.ids(self.config)?, self.holders(of)?);
        let [rows, cols] = ids[0].shape(self.config);
        let wire = OnWire {
            at: DevicePtr::NULL,
            format,
            members: ids.len(),
            rows,
            cols,
        };
        self.reserve(wire.bytes(), &holders)?;
        Ok(PartialMatrices {
            of,
            ids,
            holders,
            wire,
            bytes: 0,
        })
    }

    /// Queues the copies of a buffer of tiles to the holders' wire buffers.
    fn send(&mut self, coming: &mut PartialMatrices, buffer: PinnedBuffer, bytes: usize) -> Result<()> {
        let to = coming.holders.iter();
        let to = to.map(|&device| (device, self.wire(device).add(coming.bytes)));
        let to = memory::collect(to, Purpose::Checkpoint)?;
        self.staging.send(buffer, bytes, &to)?;
        coming.bytes += bytes;
        Ok(())
    }

    /// Rearranges matrices that have come on each device that holds them.
    fn end(&mut self, coming: PartialMatrices, found: Findings) -> Result<(), Stop> {
        self.staging.wait(0)?;
        let PartialMatrices {
            of,
            ids,
            holders,
            mut wire,
            ..
        } = coming;
        let mut out = Vec::with_capacity(holders.len());
        for device in holders {
            wire.at = self.wire(device);
            out.push(self.arrange(device, wire, ids[0])?);
        }
        let name = match out.first().map(|m| m.form) {
            Some(MatrixForm::W16 | MatrixForm::Heads) if self.elements == Elements::F16 => "F16",
            _ => wire.format.name(),
        };
        let bytes = out.first().map_or(0, |m| m.bytes.bytes());
        let expected = WeightFormat::expected(of.array.holds());
        let remark = found.misfit.map(|misfit| not_expected(expected, &misfit));
        self.report
            .note(&ids, name, bytes, remark, found.non_finite, found.fingerprint);
        Ok(memory::push(
            &mut self.on_devices.matrices,
            (of, out),
            Purpose::Checkpoint,
        )?)
    }

    /// Copies vectors to each device that holds them.
    fn vectors(&mut self, of: OfLayer, values: &[f32]) -> Result<()> {
        let ids = of.ids(self.config)?;
        let non_finite = NonFinite::of_vectors(of.array, values, ids.len());
        let (format, bytes, fingerprint) = (WeightFormat::F32.name(), size_of_val(values), fingerprint_of(values));
        self.report.note(&ids, format, bytes, None, non_finite, fingerprint);
        let holders = self.holders(of)?.into_iter();
        let out = holders.map(|device| DeviceBuffer::of(&self.shares[device].context.stream, values));
        let out = out.collect::<Result<_>>()?;
        memory::push(&mut self.on_devices.vectors, (of, out), Purpose::Checkpoint)
    }

    /// Makes the wire buffers of a tensor's holders large enough for it.
    fn reserve(&mut self, bytes: usize, holders: &[usize]) -> Result<()> {
        for &device in holders {
            let (wire, context) = (&mut self.wires[device], self.shares[device].context);
            if wire.as_ref().is_none_or(|wire| wire.bytes() < bytes) {
                // The old buffer is freed first, so that both never exist at once.
                *wire = None;
                *wire = Some(DeviceBuffer::new(&context.driver, bytes)?);
            }
        }
        Ok(())
    }

    /// The address of a device's wire buffer.
    fn wire(&self, device: usize) -> DevicePtr {
        self.wires[device].as_ref().map_or(DevicePtr::NULL, DeviceBuffer::at)
    }

    /// Rearranges a tensor from the wire format to the layout that the device's products read.
    fn arrange(&self, device: usize, wire: OnWire, id: TensorId) -> Result<Matrix, Stop> {
        let context = self.shares[device].context;
        let shape = |bytes, form, row_blocks, scale| Matrix {
            bytes,
            form,
            members: wire.members,
            rows: wire.rows,
            cols: wire.cols,
            row_blocks,
            scale,
        };
        let config = self.config;
        let numbers = Numbers::new(self.elements, self.exact);
        let form = context.target.form(id, wire.format, config, &numbers);
        let Some(weights) = form.packed() else {
            let bytes = DeviceBuffer::new(&context.driver, wire.bytes())?;
            // SAFETY: both buffers have these bytes; freeing either waits for the copy.
            unsafe {
                context
                    .driver
                    .copy(bytes.at(), wire.at, wire.bytes(), context.stream.handle)
            }?;
            return Ok(shape(bytes, form, 0, 1.0));
        };
        let Some(shift) = self.shift(context, wire)? else {
            return Err(Stop::TooWide(id.place().0.name()));
        };
        let packed = context.target.packed(weights, wire.rows, wire.cols);
        let bytes = DeviceBuffer::new(&context.driver, wire.members * packed.bytes)?;
        let pack = PackArgs {
            wire: TypedPtr::new(wire.at),
            out: bytes.values(),
            members: wire.members as i32,
            rows: wire.rows as i32,
            cols: wire.cols as i32,
            row_blocks: packed.row_blocks as i32,
            k_blocks: wire.cols.div_ceil(SLAB) as i32,
            shift,
            format: self.elements.into(),
            half: if form == MatrixForm::Heads {
                config.head_dim as i32 / 2
            } else {
                0
            },
        };
        let launch = context.target.pack(weights, &pack)?;
        // SAFETY: the wire buffer holds all tiles of the tensor, `bytes` is as large as its packed form.
        unsafe { context.launch(launch, &pack) }?;
        Ok(shape(bytes, form, packed.row_blocks, (-shift as f32).exp2()))
    }

    /// The power of two that brings a tensor's values into the format's range; `None` if none does.
    fn shift(&self, context: &Context, wire: OnWire) -> Result<Option<i32>> {
        if self.elements == Elements::Bf16 {
            return Ok(Some(0));
        }
        let result = DeviceBuffer::of(&context.stream, &[i32::MAX, i32::MIN, i32::MAX, 0])?;
        let args = RangeArgs {
            wire: TypedPtr::new(wire.at),
            result: result.values(),
            tiles: wire.tiles() as i64,
            rows: wire.rows as i32,
            cols: wire.cols as i32,
            format: wire.format.into(),
            reserved: 0,
        };
        // SAFETY: the wire buffer holds these tiles, `result` has room for four numbers.
        let range = unsafe {
            context.launch(context.target.range(wire.values()), &args)?;
            to_host(&context.stream, result.at(), 4)?
        };
        let (smallest, largest, weakest_row) = (range[0], range[1], range[2]);
        Ok(match wire.format {
            WeightFormat::Mxfp4 => context.target.mxfp4_shift(smallest, largest),
            _ => context.target.f16_shift(smallest, largest, weakest_row),
        })
    }
}

//! Loads the weights: packed once on the host, copied to every device, rearranged there.
//!
//! 16-bit matrices become FP16 if the loss is below float32's rounding, and stay BF16 otherwise. The matrix cores take
//! both operands in one format, so one matrix that does not fit FP16 makes the whole model BF16. A matrix that needs
//! float32, or for which the family has no kernels, stays in the wire format and is multiplied by the plain kernels.

use super::args::{PackArgs, RangeArgs, SLAB, SynthesizeArgs, WIRE_ROWS};
use super::catalogue::Elements;
use super::context::Context;
use super::driver::DevicePtr;
use super::layout::TypedPtr;
use super::memory::{DeviceBuffer, to_host};
use super::shapes::{Held, Numbers};
use super::staging::{self, Job, Parcel, Staging};
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::{Load, Weights};
use crate::report;
use crate::tensors::{Field, Holds, TensorId};
use crate::threads;
use crate::weights::{Findings, Layout, NonFinite, PackReport, RowMajor, Sent, WeightFormat, not_expected, print_of};
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
    pub held: Held,
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
        matches!(self.held, Held::Wire(_))
    }

    /// Blocks along K.
    pub fn k_blocks(&self) -> usize {
        self.cols.div_ceil(SLAB)
    }
}

/// Where the values come from.
pub enum WeightSource<'a> {
    /// A checkpoint.
    Checkpoint(&'a dyn Checkpoint),
    /// Random values made on the device, for benchmarks without a checkpoint.
    Synthetic {
        /// The model's dimensions.
        config: &'a ModelConfig,
        /// The seed of the values.
        seed: u32,
        /// How uneven the router's choice is: the n-th favoured expert's bias is `-skew * ln(n)`. 0 is even.
        skew: f32,
    },
}

impl WeightSource<'_> {
    /// The model's dimensions.
    pub fn config(&self) -> &ModelConfig {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.config(),
            Self::Synthetic { config, .. } => config,
        }
    }
}

/// A device, and the layers that it is to hold, with the embedding and the head if they are first and last. The devices of
/// one replica have all layers, each one.
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

/// Loads on each device the weights it is to hold, for `exact` products or for those of `fast`. So many threads pack them, or
/// one a core if that is 0.
pub fn load(shares: &[Share<'_>], source: &WeightSource<'_>, exact: bool, threads: usize) -> Result<Loaded> {
    let start = Instant::now();
    let load_as = |elements| load_as(shares, source, elements, exact, threads);
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
    source: &WeightSource<'_>,
    elements: Elements,
    exact: bool,
    threads: usize,
) -> Result<Loaded, Stop> {
    let order = order(shares, source.config())?;
    let contexts = memory::collect(shares.iter().map(|share| share.context), Purpose::Checkpoint)?;
    let loader = Loader {
        shares,
        order: &order,
        source,
        elements,
        exact,
        report: PackReport::default(),
        wires: shares.iter().map(|_| None).collect(),
        staging: None,
    };
    let WeightSource::Checkpoint(checkpoint) = source else {
        return loader.load();
    };
    let (packer, staging) = staging::pair(&contexts, *checkpoint, jobs(source.config(), &order)?)?;
    // Not rayon's global pool: its threads would outlive the library, and be gone after a fork.
    let workers = Workers::start("getp pack", threads)?;
    threads::scope(|scope| {
        let pack = || workers.pool().install(|| packer.run());
        let packing = scope.spawn("getp pack", pack).map_err(no_thread)?;
        let loaded = loader.with(staging).load();
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

/// All matrices in the order in which [`Loader`] takes them.
fn jobs(config: &ModelConfig, order: &[usize]) -> Result<Vec<Job>> {
    let mut jobs = Jobs {
        config,
        jobs: Vec::new(),
    };
    Weights::load(order.iter().copied(), &mut jobs)?;
    Ok(jobs.jobs)
}

/// Writes down what a [`Loader`] will ask for.
struct Jobs<'a> {
    config: &'a ModelConfig,
    jobs: Vec<Job>,
}

impl Load for Jobs<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = Error;

    fn matrix(&mut self, array: Field, layer: usize) -> Result<()> {
        let job = Job {
            ids: ids(array, layer, self.config)?,
            expected: WeightFormat::expected(array.holds()),
        };
        memory::push(&mut self.jobs, job, Purpose::Checkpoint)
    }

    /// Vectors are small: the loader reads them itself.
    fn vector(&mut self, _: Field, _: usize) -> Result<()> {
        Ok(())
    }
}

/// An array's tensors of a layer.
fn ids(array: Field, layer: usize, config: &ModelConfig) -> Result<Vec<TensorId>> {
    memory::collect(array.of_layer(layer, config), Purpose::Checkpoint)
}

struct Loader<'a> {
    shares: &'a [Share<'a>],
    /// The layers as they come.
    order: &'a [usize],
    source: &'a WeightSource<'a>,
    elements: Elements,
    exact: bool,
    report: PackReport,
    /// A buffer per device for a tensor in the wire format, as large as the largest of its tensors so far.
    wires: Vec<Option<DeviceBuffer>>,
    /// Receives a checkpoint's matrices from the packer.
    staging: Option<Staging<'a>>,
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

impl<'a> Loader<'a> {
    fn with(self, staging: Staging<'a>) -> Self {
        Self {
            staging: Some(staging),
            ..self
        }
    }

    fn load(mut self) -> Result<Loaded, Stop> {
        let weights = self.all()?;
        self.report.sent = self.staging.as_ref().map(|staging| {
            let (bytes, seconds) = staging.sent();
            let replicas = self.shares.iter().filter(|share| share.layers.start == 0).count();
            Sent {
                bytes,
                link_seconds: seconds / replicas.max(1) as f64,
                pack_seconds: 0.0,
            }
        });
        Ok(Loaded {
            weights,
            elements: self.elements,
            report: self.report,
        })
    }

    /// Loads tensor after tensor on the devices that hold it, then groups them by device.
    fn all(&mut self) -> Result<Vec<GpuWeights>, Stop> {
        let mut weights = Weights::load(self.order.iter().copied(), self)?;
        // Popped from the end, so the last device comes first.
        let shares = self.shares.iter().rev();
        let devices = shares.map(|share| weights.try_map(share.layers.clone(), Vec::pop, Vec::pop));
        let mut devices: Vec<_> = devices
            .collect::<Option<_>>()
            .ok_or_else(|| Error::Internal("a device without weights".into()))?;
        devices.reverse();
        Ok(devices)
    }

    /// The devices that hold an array's tensors of a layer.
    fn holders(&self, array: Field, layer: usize) -> Result<Vec<usize>> {
        let layer = array.goes_with(layer, self.source.config());
        let holds = |&device: &usize| self.shares[device].layers.contains(&layer);
        memory::collect((0..self.shares.len()).filter(holds), Purpose::Checkpoint)
    }

    /// Receives a tensor from the packer and copies it to its holders' wire buffers; returns its format, and what the
    /// packer has found in its values.
    fn receive(&mut self, wire: &mut OnWire, first: TensorId, holders: &[usize]) -> Result<Findings> {
        let no_staging = || Error::Internal("a checkpoint without staging".into());
        let mut staging = self.staging.take().ok_or_else(no_staging)?;
        let received = self.receive_from(&mut staging, wire, first, holders);
        self.staging = Some(staging);
        received
    }

    fn receive_from(
        &mut self,
        staging: &mut Staging<'_>,
        wire: &mut OnWire,
        first: TensorId,
        holders: &[usize],
    ) -> Result<Findings> {
        let mut sent = 0;
        loop {
            match staging.next()? {
                Parcel::Begin { id, .. } if id != first => {
                    return Err(Error::Internal(format!("{id:?} is packed where {first:?} is to come")));
                }
                Parcel::Begin { format, .. } => {
                    wire.format = format;
                    self.reserve(wire.bytes(), holders)?;
                    sent = 0;
                }
                Parcel::Tiles(buffer, bytes) => {
                    let to = holders.iter().map(|&device| (device, self.wire(device).add(sent)));
                    staging.send(buffer, bytes, &to.collect::<Vec<_>>())?;
                    sent += bytes;
                }
                Parcel::End { read_bytes, found } => {
                    self.report.read_bytes += read_bytes;
                    staging.wait(0)?;
                    return Ok(found);
                }
                Parcel::Failed(error) => return Err(error),
            }
        }
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

    /// Fills the wire buffers with random values; see [`spread`].
    fn synthesize(&self, device: usize, wire: OnWire, id: TensorId) -> Result<()> {
        let (deviation, exponent) = spread(id, wire.cols);
        let args = SynthesizeArgs {
            wire: TypedPtr::new(wire.at),
            tiles: wire.tiles() as i64,
            rows: wire.rows as i32,
            cols: wire.cols as i32,
            seed: self.seed_of(id),
            deviation,
            mean: 0.0,
            exponent,
            format: wire.format.into(),
            reserved: 0,
        };
        let context = self.shares[device].context;
        // SAFETY: the wire buffer has room for all the tensor's tiles.
        unsafe { context.launch(context.target.synthesize(wire.values()), &args) }
    }

    fn seed_of(&self, id: TensorId) -> u32 {
        let WeightSource::Synthetic { seed, .. } = self.source else {
            return 0;
        };
        let (field, layer, _) = id.place();
        seed.wrapping_mul(0x9e37_79b9) ^ (field as u32) << 16 ^ layer as u32
    }

    /// Rearranges a tensor from the wire format to the layout that the device's products read.
    fn arrange(&self, device: usize, wire: OnWire, id: TensorId) -> Result<Matrix, Stop> {
        let context = self.shares[device].context;
        let shape = |bytes, held, row_blocks, scale| Matrix {
            bytes,
            held,
            members: wire.members,
            rows: wire.rows,
            cols: wire.cols,
            row_blocks,
            scale,
        };
        let config = self.source.config();
        let numbers = Numbers::new(self.elements, self.exact);
        let held = context.target.held(id, wire.format, config, &numbers);
        let Some(weights) = held.packed() else {
            let bytes = DeviceBuffer::new(&context.driver, wire.bytes())?;
            // SAFETY: both buffers have these bytes; freeing either waits for the copy.
            unsafe {
                context
                    .driver
                    .copy(bytes.at(), wire.at, wire.bytes(), context.stream.handle)
            }?;
            return Ok(shape(bytes, held, 0, 1.0));
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
            half: if held == Held::Heads {
                config.head_dim as i32 / 2
            } else {
                0
            },
        };
        let launch = context.target.pack(weights, &pack)?;
        // SAFETY: the wire buffer holds all tiles of the tensor, `bytes` is as large as its packed form.
        unsafe { context.launch(launch, &pack) }?;
        Ok(shape(bytes, held, packed.row_blocks, (-shift as f32).exp2()))
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

impl Load for Loader<'_> {
    /// One a holder.
    type Matrix = Vec<Matrix>;
    type Vector = Vec<Vector>;
    type Error = Stop;

    /// The matrices on each device that holds them.
    fn matrix(&mut self, array: Field, layer: usize) -> Result<Vec<Matrix>, Stop> {
        let ids = ids(array, layer, self.source.config())?;
        let holders = self.holders(array, layer)?;
        let expected = WeightFormat::expected(array.holds());
        let [rows, cols] = ids[0].shape(self.source.config());
        let mut wire = OnWire {
            at: DevicePtr::NULL,
            format: expected,
            members: ids.len(),
            rows,
            cols,
        };
        let found = match self.source {
            WeightSource::Checkpoint(_) => self.receive(&mut wire, ids[0], &holders)?,
            WeightSource::Synthetic { .. } => {
                self.reserve(wire.bytes(), &holders)?;
                Findings::default()
            }
        };
        let mut out = Vec::with_capacity(holders.len());
        for device in holders {
            wire.at = self.wire(device);
            if let WeightSource::Synthetic { .. } = self.source {
                self.synthesize(device, wire, ids[0])?;
            }
            out.push(self.arrange(device, wire, ids[0])?);
        }
        let name = match out.first().map(|m| m.held) {
            Some(Held::W16 | Held::Heads) if self.elements == Elements::F16 => "F16",
            _ => wire.format.name(),
        };
        let bytes = out.first().map_or(0, |m| m.bytes.bytes());
        let remark = found.misfit.map(|misfit| not_expected(expected, &misfit));
        self.report
            .note(&ids, name, bytes, remark, found.non_finite, found.print);
        Ok(out)
    }

    /// Float32 values on each device that holds them.
    fn vector(&mut self, array: Field, layer: usize) -> Result<Vec<Vector>, Stop> {
        let ids = ids(array, layer, self.source.config())?;
        let values = match self.source {
            WeightSource::Checkpoint(checkpoint) => {
                let mut values = Vec::new();
                for &id in &ids {
                    let tensor = checkpoint.tensor(id)?;
                    self.report.read_bytes += tensor.len_bytes();
                    tensor.extend_f32(&mut values)?;
                }
                values
            }
            WeightSource::Synthetic { config, skew, .. } if array == Field::BRouter => {
                router_bias(config.n_experts, layer, *skew)?
            }
            // Other biases and sinks of zero, norms of one: their values do not change timings.
            WeightSource::Synthetic { config, .. } => {
                let n = ids.len() * ids[0].shape(config)[1];
                let made_up = if array.holds() == Holds::Norm { 1.0 } else { 0.0 };
                memory::filled(made_up, n, Purpose::Checkpoint)?
            }
        };
        let non_finite = NonFinite::of_vectors(array, &values, ids.len());
        let (format, bytes, print) = (WeightFormat::F32.name(), 4 * values.len(), print_of(&values));
        self.report.note(&ids, format, bytes, None, non_finite, print);
        self.holders(array, layer)?
            .into_iter()
            .map(|device| DeviceBuffer::of(&self.shares[device].context.stream, &values))
            .collect::<Result<_>>()
            .map_err(Stop::from)
    }
}

/// The bias of a layer's router by Zipf's law: `-skew * ln(n)` for the n-th favoured expert. Logits without it have a
/// deviation of about 1. Each layer favours another expert. Choosing 4 experts, the busiest has 4 times the mean of
/// 32 at a skew of 0.5 and 6.6 times at 0.95, and 13 times the mean of 128 at 0.5.
fn router_bias(n_experts: usize, layer: usize, skew: f32) -> Result<Vec<f32>> {
    let mut bias = memory::filled(0.0, n_experts, Purpose::Checkpoint)?;
    for place in 0..n_experts {
        bias[(place + layer) % n_experts] = -skew * ((place + 1) as f32).ln();
    }
    Ok(bias)
}

/// Standard deviation of 16-bit values, and exponent of MXFP4 scales, so that inputs of variance 1 give outputs near 1,
/// and near 1/4 where they are added to the residual stream, as in a trained model. Random E2M1 codes have a mean
/// square of 8.6.
fn spread(id: TensorId, cols: usize) -> (f32, i32) {
    let unit = 1.0 / (cols as f32).sqrt();
    match id {
        TensorId::Embedding => (1.0, 0),
        TensorId::AttnOut { .. } => (0.25 * unit, 0),
        TensorId::Mlp1 { .. } => (0.0, (unit / 3.0).log2().round() as i32),
        TensorId::Mlp2 { .. } => (0.0, (0.25 * unit / 3.0).log2().round() as i32),
        _ => (unit, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skewed_router_favours_another_expert_in_each_layer() {
        assert!(router_bias(32, 3, 0.0).unwrap().iter().all(|&bias| bias == 0.0));
        for layer in [0, 5, 33] {
            let bias = router_bias(32, layer, 0.5).unwrap();
            let nth = |n: usize| bias[(layer + n) % 32];
            assert_eq!(nth(0), 0.0);
            assert!((1..32).all(|n| nth(n) < nth(n - 1)), "{bias:?}");
        }
    }
}

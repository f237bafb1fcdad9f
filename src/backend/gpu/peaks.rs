//! What the device can do at most, measured: profiles give shares of it.

use super::args::{PEAK_FLOPS, PeakArgs};
use super::context::Context;
use super::launch::Launch;
use super::layout::TypedPtr;
use super::memory::{DeviceBuffer, Event, PinnedBuffer};
use crate::error::Result;
use std::fmt;

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peaks {
    /// A copy within device memory, bytes read and written, per second.
    pub copy_bytes_per_s: f64,
    /// A copy from pinned host memory.
    pub upload_bytes_per_s: f64,
    /// FP16 products on the matrix cores, operations per second, if the family has a kernel that measures it.
    pub matrix_flops_per_s: Option<f64>,
    /// Prefill attention's products in FP16 beside its exponentials, operations per second, likewise.
    pub attention_flops_per_s: Option<f64>,
}

/// Copied at most: several times any cache.
const COPY_BYTES: usize = 1 << 30;
const PINNED_BYTES: usize = 64 << 20;
/// Long enough that the start does not count, short enough that warming up does not feel it.
const PEAK_ITERATIONS: i32 = 400;
const REPEATS: usize = 5;

impl Peaks {
    /// Takes some tens of milliseconds.
    pub fn measure(context: &Context) -> Result<Self> {
        // Two buffers, each of a quarter of the free memory at most.
        let bytes = COPY_BYTES.min(context.driver.memory()?.free as usize / 4);
        let (from, to) = (
            DeviceBuffer::<u8>::zeroed(&context.stream, bytes)?,
            DeviceBuffer::<u8>::zeroed(&context.stream, bytes)?,
        );
        let pinned = PinnedBuffer::<u8>::zeroed(&context.driver, PINNED_BYTES.min(bytes))?;
        let pinned_bytes = PINNED_BYTES.min(bytes);
        let stream = context.stream.handle;
        // SAFETY: both buffers have these bytes and outlive the measurement, which waits.
        let copy_s = fastest(context, || unsafe {
            context.driver.copy(to.at(), from.at(), bytes, stream)
        })?;
        // SAFETY: as above.
        let upload_s = fastest(context, || unsafe {
            context
                .driver
                .copy_to_device(to.at(), pinned.host(), pinned_bytes, stream)
        })?;
        let peak = |launch: Option<Launch>| launch.map(|launch| Self::peak(context, launch)).transpose();
        Ok(Self {
            copy_bytes_per_s: 2.0 * bytes as f64 / copy_s,
            upload_bytes_per_s: pinned_bytes as f64 / upload_s,
            matrix_flops_per_s: peak(context.target.matrix_peak())?,
            attention_flops_per_s: peak(context.target.attention_peak())?,
        })
    }

    fn peak(context: &Context, launch: Launch) -> Result<f64> {
        let args = peak_args(PEAK_ITERATIONS);
        // SAFETY: the kernel writes nothing.
        let peak_s = fastest(context, || unsafe { context.launch(launch, &args) })?;
        Ok(peak_flops(launch, &args) / peak_s)
    }
}

/// Arguments of a kernel that measures a peak: it may write, and does not.
pub fn peak_args(iterations: i32) -> PeakArgs {
    PeakArgs {
        out: TypedPtr::NULL,
        iterations,
        never: 0,
    }
}

/// Operations of a launch with them.
pub fn peak_flops(launch: Launch, args: &PeakArgs) -> f64 {
    launch.blocks as f64 * f64::from(args.iterations) * PEAK_FLOPS as f64
}

/// Seconds of the fastest of several runs.
fn fastest(context: &Context, mut queue: impl FnMut() -> Result<()>) -> Result<f64> {
    let (start, end) = (Event::new(&context.driver, true)?, Event::new(&context.driver, true)?);
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        start.record(&context.stream)?;
        queue()?;
        end.record(&context.stream)?;
        end.synchronize()?;
        best = best.min(end.since_us(&start)? * 1e-6);
    }
    Ok(best.max(1e-9))
}

impl fmt::Display for Peaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "copies {:.0} GB/s, from the host {:.1} GB/s",
            self.copy_bytes_per_s * 1e-9,
            self.upload_bytes_per_s * 1e-9,
        )?;
        let peaks = [
            ("matrix products", self.matrix_flops_per_s),
            ("beside attention's exponentials", self.attention_flops_per_s),
        ];
        for (name, flops) in peaks {
            if let Some(flops) = flops {
                write!(f, ", {name} {:.0} TFLOP/s", flops * 1e-12)?;
            }
        }
        Ok(())
    }
}

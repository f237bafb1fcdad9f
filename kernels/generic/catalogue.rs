//! What runs on any GPU: the kernels that every family has, and no others. A device is of this family if it is of none
//! before it.

use super::{Kernel, Platform, SHARED, Table, Toolchain, shared};

/// The family.
pub static TABLE: Table = Table {
    name: "generic",
    platforms: &[
        Platform {
            toolchain: Toolchain::Cuda,
            // A text that the driver compiles for the device; nvcc knows none older.
            architectures: &["compute_75"],
            devices: &["sm_", "compute_"],
        },
        Platform {
            toolchain: Toolchain::Hip,
            // RDNA 2, 3, 3.5 and 4.
            architectures: &["gfx1030", "gfx1100", "gfx1151", "gfx1201"],
            devices: &["gfx1"],
        },
    ],
    cards: &[],
    wave: 32,
    // Before sm_90 kernels cannot wait by themselves.
    overlaps: false,
    term_shift: 0,
    cuts_experts: false,
    // In `fast` a lane adds every 32nd run of eight products, and the wave its sums.
    sum_error: [32.0, 16.0],
    exact_sums: None,
    kernels: &KERNELS,
};

static KERNELS: [Kernel; SHARED] = shared(32);

//! The cards that are modelled.

use getp::backend::gpu::driver::DeviceMemory;
use getp::backend::gpu::family;
use getp::backend::gpu::target::Target;

/// Of the memory's published rate so much is taken as reached: 1.3 of an MI250 device's 1.6 TB/s.
const MEMORY_REACHED: f64 = 1.3 / 1.6;
/// What the runtime has taken of a device that does nothing, in MiB.
const TAKEN_MIB: u64 = 536;

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Name {
    Mi250,
    Mi300x,
    Mi355x,
}

/// A device; published figures.
pub struct Card {
    pub name: &'static str,
    pub arch: &'static str,
    pub compute_units: usize,
    pub hertz: f64,
    memory_peak: f64,
    memory_mib: u64,
    /// With compute units and an L2 each. Blocks go to them in turn.
    pub dies: usize,
    /// Of the cache between the dies' L2s and memory.
    cache_peak: f64,
    /// Between two devices of a group, in each direction.
    pub link_bytes_a_second: f64,
    /// Groups whose steps are printed for the 120b: devices, and the most rows of a micro-batch.
    pub groups: &'static [(usize, usize)],
}

/// One of an MI250's two devices.
const MI250: Card = Card {
    name: "MI250, a device",
    arch: "gfx90a",
    compute_units: 104,
    hertz: 1.7e9,
    memory_peak: 1.6e12,
    memory_mib: 65_536,
    dies: 1,
    cache_peak: f64::INFINITY,
    link_bytes_a_second: 50e9,
    groups: &[(2, 512), (2, 1024), (4, 1024), (8, 1024)],
};
const MI300X: Card = Card {
    name: "MI300X",
    arch: "gfx942",
    compute_units: 304,
    hertz: 2.1e9,
    memory_peak: 5.3e12,
    memory_mib: 196_608,
    dies: 8,
    cache_peak: 17.2e12,
    link_bytes_a_second: 64e9,
    groups: &[(1, 1024), (1, 1536), (2, 1536), (8, 1536)],
};
const MI355X: Card = Card {
    name: "MI355X",
    arch: "gfx950",
    compute_units: 256,
    hertz: 2.4e9,
    memory_peak: 8e12,
    memory_mib: 294_912,
    dies: MI300X.dies,
    cache_peak: MI300X.cache_peak,
    link_bytes_a_second: 76.8e9,
    groups: MI300X.groups,
};

impl Name {
    pub fn card(self) -> &'static Card {
        match self {
            Self::Mi250 => &MI250,
            Self::Mi300x => &MI300X,
            Self::Mi355x => &MI355X,
        }
    }
}

impl Card {
    pub fn bytes_a_second(&self) -> f64 {
        self.memory_peak * MEMORY_REACHED
    }

    /// The cache's, with the share that is taken of the memory's.
    pub fn cache_bytes_a_second(&self) -> f64 {
        self.cache_peak * MEMORY_REACHED
    }

    pub fn memory(&self) -> DeviceMemory {
        DeviceMemory {
            free: (self.memory_mib - TAKEN_MIB) << 20,
            total: self.memory_mib << 20,
        }
    }

    pub fn target(&self) -> Target {
        Target {
            family: family::of(self.arch, |_| true).expect("a family has it"),
            multiprocessors: self.compute_units,
        }
    }
}

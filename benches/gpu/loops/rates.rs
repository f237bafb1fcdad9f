//! What a device's memory, attention to prompts and launches allow a layer.

use crate::chosen::Chosen;
use getp::backend::gpu::shapes::Numbers;
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;

/// Of a model on a device.
pub struct DeviceRates<'a> {
    pub config: &'a ModelConfig,
    pub target: &'a Target,
    pub numbers: Numbers,
    pub bytes_per_s: f64,
    pub attention_flops_per_s: f64,
    pub launch_s: f64,
}

impl DeviceRates<'_> {
    /// Bytes of a position's keys and values in a layer.
    pub fn kv_bytes(&self) -> f64 {
        let bytes = if self.numbers.exact { 8 } else { 4 };
        (bytes * self.config.kv_dim()) as f64
    }

    /// Seconds in which rows that decode read the keys and values of a layer, so many in all.
    pub fn reading(&self, keys: f64) -> f64 {
        keys * self.kv_bytes() / self.bytes_per_s
    }

    /// Seconds of a layer's attention of prompts, whose rows attend to so many keys in all.
    pub fn prompts_attention(&self, keys: f64) -> f64 {
        keys * 4.0 * self.config.q_dim() as f64 / self.attention_flops_per_s
    }

    /// Seconds of a layer's other kernels' rows. Norms read the stream, four 16-bit outputs and write both; queries,
    /// keys and values are read in float32 and written in 16 bits; a row is copied for four experts. In `exact`
    /// outputs, keys and values are float32, rows have two terms, and the router reads float32 rows.
    pub fn other_rows(&self, rows: usize) -> f64 {
        let (stream_bytes, qkv_bytes) = if self.numbers.exact { (64, 8) } else { (34, 6) };
        let row_bytes = stream_bytes * self.config.hidden_dim + qkv_bytes * self.config.qkv_dim();
        (rows * row_bytes) as f64 / self.bytes_per_s
    }

    /// Seconds of a layer's launches.
    pub fn launches(&self, rows: usize) -> f64 {
        let chosen = Chosen {
            target: self.target,
            config: self.config,
            numbers: self.numbers,
        };
        chosen.launches(rows) as f64 * self.launch_s
    }
}

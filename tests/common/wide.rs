//! A model whose values do not fit FP16.

use super::synthetic::SyntheticCheckpoint;
use getp::checkpoint::{Checkpoint, Part, Tensor, TensorId, Values};
use getp::config::ModelConfig;
use getp::error::Result;

/// A model in which one row of a matrix is too small for FP16 beside the others, and every other head has no sink.
pub struct Wide {
    model: SyntheticCheckpoint,
    id: TensorId,
    matrix: Vec<u8>,
    /// By layer.
    sinks: Vec<Vec<u8>>,
}

impl Wide {
    /// The row is the first one of this matrix.
    pub fn new(model: SyntheticCheckpoint, id: TensorId) -> Self {
        let mut values = model.tensor(id).unwrap().to_f32().unwrap();
        let [_, row] = id.shape(model.config());
        values[..row].iter_mut().for_each(|v| *v *= (-60_f32).exp2());
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let sinks = |layer| {
            let mut sinks = model.tensor(TensorId::Sinks { layer }).unwrap().to_f32().unwrap();
            sinks.iter_mut().step_by(2).for_each(|sink| *sink = f32::NEG_INFINITY);
            bytes(sinks)
        };
        let sinks = (0..model.config().n_layers).map(sinks).collect();
        let matrix = bytes(values);
        Self {
            model,
            id,
            matrix,
            sinks,
        }
    }
}

impl Checkpoint for Wide {
    fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        let tensor = self.model.tensor(id)?;
        let values = match id {
            id if id == self.id => &self.matrix,
            TensorId::Sinks { layer } => &self.sinks[layer],
            _ => return Ok(tensor),
        };
        let (rows, values) = (tensor.rows, Values::F32(values));
        let parts = vec![Part { rows, values }];
        Ok(Tensor { parts, ..tensor })
    }
}

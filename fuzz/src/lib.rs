//! What fuzz targets share.

use getp::backend::cpu;
use getp::checkpoint::{Checkpoint, TensorId};

/// Reads every tensor of a checkpoint that has been accepted, and packs them all.
pub fn read_all(checkpoint: &dyn Checkpoint) {
    let config = checkpoint.config();
    for id in TensorId::all(config) {
        let tensor = checkpoint.tensor(id).expect("an accepted checkpoint has every tensor");
        assert_eq!([tensor.rows, tensor.cols], id.shape(config), "{id:?}");
        assert_eq!(
            tensor.to_f32().expect("there is memory").len(),
            tensor.rows * tensor.cols,
            "{id:?}"
        );
    }
    cpu::load(checkpoint).expect("an accepted checkpoint can be packed");
}

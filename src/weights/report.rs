//! What packing made of the tensors.

use super::NonFinite;
use crate::checkpoint::{Field, TensorId};

/// What the tensors of one kind became.
#[derive(Clone, Debug)]
pub struct PackedKind {
    /// The kind as the C struct names it, for example `w_mlp1`.
    pub name: &'static str,
    /// The format of its values, for example `MXFP4`; several joined by `+` if its layers differ.
    pub format: String,
    /// Bytes in the replica's memory.
    pub bytes: u64,
    /// Why it is not in the format expected of its kind; `None` if it is.
    pub remark: Option<String>,
}

/// What warming up made.
#[derive(Clone, Debug, Default)]
pub struct PackReport {
    /// By kind, in the order of the `.bin` file.
    pub kinds: Vec<PackedKind>,
    /// A line for each tensor with values that are infinite or not a number: which, how many, where the first one is.
    pub non_finite: Vec<String>,
    /// Bytes of the checkpoint read.
    pub read_bytes: u64,
    /// Seconds the packing took, and the sending.
    pub seconds: f64,
    /// How the weights came to their device; `None` if they are where they were packed.
    pub sent: Option<Sent>,
}

/// How fast packed weights came to the devices. Packing and sending go on side by side.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Bytes sent to each device.
    pub bytes: u64,
    /// Seconds the bus was busy with them.
    pub link_seconds: f64,
    /// Seconds the host was busy packing them.
    pub pack_seconds: f64,
}

impl PackReport {
    /// Adds a tensor to its kind's line; the first remark of a kind stands for all.
    pub fn note(&mut self, name: &'static str, format: &str, bytes: usize, remark: Option<String>) {
        let kinds = &mut self.kinds;
        let at = kinds.iter().position(|k| k.name == name).unwrap_or_else(|| {
            kinds.push(PackedKind {
                name,
                format: format.to_owned(),
                bytes: 0,
                remark: None,
            });
            kinds.len() - 1
        });
        let kind = &mut kinds[at];
        kind.bytes += bytes as u64;
        if !kind.format.split('+').any(|f| f == format) {
            kind.format = format!("{}+{format}", kind.format);
        }
        if kind.remark.is_none() {
            kind.remark = remark;
        }
    }

    /// Adds a line for values of the matrices `ids` that are not finite.
    pub fn note_non_finite(&mut self, ids: &[TensorId], found: NonFinite) {
        let Some(id) = ids.get(found.matrix) else { return };
        let (field, layer, expert) = id.place();
        let tensor = match field {
            Field::TokenEmbeddingTable | Field::Out | Field::RmsOutW => field.name().to_owned(),
            _ => format!("{} of layer {layer}", field.name()),
        };
        let expert = match ids.len() {
            1 => String::new(),
            _ => format!(" of expert {expert}"),
        };
        let (count, value) = (found.count, found.value);
        self.non_finite.push(format!(
            "{tensor}: {count} of its values not finite, the first {value:e} at row {}, column {}{expert}",
            found.row, found.col
        ));
    }
}

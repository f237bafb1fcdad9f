//! The formats and sizes of packed weights, and the time of packing, for the lines that `warm_up` prints.

use super::NonFinite;
use crate::checkpoint::{Field, TensorId};

/// The packed tensors of one kind, in all layers.
#[derive(Clone, Debug)]
pub struct PackedKind {
    /// The kind's name in the C struct, for example `w_mlp1`.
    pub name: &'static str,
    /// The format, for example `MXFP4`; several joined by `+` if layers differ.
    pub format: String,
    /// Size in the replica's memory in bytes.
    pub bytes: u64,
    /// Why the format is not the one expected of the kind; `None` if it is.
    pub remark: Option<String>,
}

/// The packed weights of a model.
#[derive(Clone, Debug, Default)]
pub struct PackReport {
    /// The kinds of tensors, in the order of the `.bin` file.
    pub kinds: Vec<PackedKind>,
    /// A line for each tensor with values that are infinite or NaN: its name, how many, and the place of the first one.
    pub non_finite: Vec<String>,
    /// Bytes read from the checkpoint.
    pub read_bytes: u64,
    /// Seconds of packing and copying to the device.
    pub seconds: f64,
    /// How the weights were copied to their device; `None` on the CPU.
    pub sent: Option<Sent>,
}

/// Times of copying packed weights to the devices. Copying overlaps with packing.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Bytes copied to each device.
    pub bytes: u64,
    /// Seconds in which the bus was busy copying.
    pub link_seconds: f64,
    /// Seconds in which the host was busy packing.
    pub pack_seconds: f64,
}

impl PackReport {
    /// Adds a tensor to its kind. Of several remarks the first is kept.
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

    /// Adds a line for values that are not finite, found in the matrices `ids`.
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

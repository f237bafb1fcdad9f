//! The formats and sizes of packed weights, and the time of packing, for the lines that `warm_up` prints.

use super::NonFinite;
use super::fingerprint::Fingerprint;
use crate::tensors::{Field, TensorId};

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
    /// A fingerprint of all weights' values, the same for any backend and any number of threads.
    pub fingerprint: u64,
    /// Bytes read from the checkpoint.
    pub read_bytes: u64,
    /// Seconds of packing and copying to the device.
    pub seconds: f64,
    /// How the weights were copied to their device; `None` on the CPU.
    pub sent: Option<Transfer>,
}

/// Times of copying packed weights to the devices. Copying overlaps with packing.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Bytes copied to the device, or to all devices of a replica that has several.
    pub bytes: u64,
    /// Seconds in which the bus was busy copying.
    pub link_seconds: f64,
    /// Seconds in which the host was busy packing.
    pub pack_seconds: f64,
}

impl PackReport {
    /// Adds a layer's tensors of one kind to the kind's line, where the first remark stands for all, a line for values
    /// that are not finite, and the tensors' fingerprint.
    pub fn note(
        &mut self,
        ids: &[TensorId],
        format: &str,
        bytes: usize,
        remark: Option<String>,
        non_finite: Option<NonFinite>,
        fingerprint: u64,
    ) {
        let Some(first) = ids.first() else { return };
        let (field, layer, _) = first.place();
        let mut with_fingerprint = Fingerprint::new();
        with_fingerprint.add(&fingerprint.to_le_bytes());
        self.fingerprint = self
            .fingerprint
            .wrapping_add(with_fingerprint.at((layer * Field::COUNT + field as usize) as u64));
        let kind = self.kind(field);
        kind.bytes += bytes as u64;
        if kind.format.is_empty() {
            kind.format = format.to_owned();
        } else if !kind.format.split('+').any(|f| f == format) {
            kind.format = format!("{}+{format}", kind.format);
        }
        if kind.remark.is_none() {
            kind.remark = remark;
        }
        if let Some(found) = non_finite {
            self.note_non_finite(ids, found);
        }
    }

    /// The line of a kind.
    fn kind(&mut self, field: Field) -> &mut PackedKind {
        let place = |name| Field::IN_FILE_ORDER.iter().position(|field| field.name() == name);
        let name = field.name();
        let at = self.kinds.partition_point(|kind| place(kind.name) < place(name));
        if self.kinds.get(at).is_none_or(|kind| kind.name != name) {
            let kind = PackedKind {
                name,
                format: String::new(),
                bytes: 0,
                remark: None,
            };
            self.kinds.insert(at, kind);
        }
        &mut self.kinds[at]
    }

    fn note_non_finite(&mut self, ids: &[TensorId], found: NonFinite) {
        let Some(id) = ids.get(found.matrix) else { return };
        let (field, layer, expert) = id.place();
        let tensor = match id {
            TensorId::Embedding | TensorId::Unembedding | TensorId::OutNorm => field.name().to_owned(),
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

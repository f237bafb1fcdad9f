//! The model's tensors: one table, from which all lists of them follow.

use crate::config::ModelConfig;
use crate::error::{Error, Result};

/// A layer and an expert, or how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The layer, from 0.
    pub layer: usize,
    /// The expert, from 0.
    pub expert: usize,
}

/// What a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// A norm's weights.
    Norm,
    /// A bias, or attention's sinks.
    Bias,
    /// A matrix whose rows are looked up one by one.
    Lookup,
    /// The router's matrix.
    Router,
    /// A matrix that all rows are multiplied by.
    Dense,
    /// An expert's matrix.
    Expert {
        /// Whether its rows alternate gate and up.
        gated: bool,
    },
}

/// Makes of each row: a variant of [`TensorId`], with what counts its tensors; its array, and the array's place in the
/// C struct; what it holds; its shape.
macro_rules! tensors {
    ($config:ident; $(
        $(#[$doc:meta])*
        $id:ident $({ $($of:ident),+ })? = $field:ident $name:literal $place:literal, $holds:expr, $shape:expr;
    )*) => {
        /// A tensor of the model. `layer` and `expert` count from 0.
        #[allow(missing_docs)] // the fields are the layer and the expert, nothing else
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum TensorId {
            $($(#[$doc])* $id $({ $($of: usize),+ })?,)*
        }

        /// The arrays of `TransformerWeights`, numbered in its order. Each holds one kind of tensor, for all layers and
        /// experts.
        #[allow(missing_docs)] // the variants are the C struct's fields, `Field::name`
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Field {
            $($field = $place,)*
        }

        impl Field {
            /// All, in the order of a `.bin` file.
            pub const IN_FILE_ORDER: [Self; Self::COUNT] = [$(Self::$field),*];

            /// The field's name in C.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$field => $name,)*
                }
            }

            /// What its tensors hold.
            pub fn holds(self) -> Holds {
                match self {
                    $(Self::$field => $holds,)*
                }
            }

            /// The field's tensor of a layer and an expert, each of which it ignores where it does not count by it.
            #[allow(unused_variables, reason = "some count by neither")]
            pub fn id(self, layer: usize, expert: usize) -> TensorId {
                let at = At { layer, expert };
                match self {
                    $(Self::$field => TensorId::$id $({ $($of: at.$of),+ })?,)*
                }
            }

            /// How many layers the array has, and how many tensors each of them.
            #[allow(clippy::needless_update, reason = "some count by both")]
            pub fn counts(self, config: &ModelConfig) -> [usize; 2] {
                let all = At { layer: config.n_layers, expert: config.n_experts };
                let one = At { layer: 1, expert: 1 };
                let counts = match self {
                    $(Self::$field => At { $($($of: all.$of,)+)? ..one },)*
                };
                [counts.layer, counts.expert]
            }
        }

        impl TensorId {
            /// The array that holds the tensor, with the tensor's layer and expert (0 where it has none).
            #[allow(clippy::needless_update, reason = "some have both")]
            pub fn place(self) -> (Field, usize, usize) {
                let none = At { layer: 0, expert: 0 };
                let (field, at) = match self {
                    $(Self::$id $({ $($of),+ })? => (Field::$field, At { $($($of,)+)? ..none }),)*
                };
                (field, at.layer, at.expert)
            }

            /// `[rows, cols]` in a model of these dimensions.
            pub fn shape(self, $config: &ModelConfig) -> [usize; 2] {
                match self {
                    $(Self::$id $({ $($of: _),+ })? => $shape,)*
                }
            }
        }
    };
}

// In the order of a `.bin` file.
tensors! { c;
    /// Token embedding `[vocab, hidden]`.
    Embedding = TokenEmbeddingTable "token_embedding_table" 0, Holds::Lookup, [c.vocab_size, c.hidden_dim];
    /// Unembedding `[vocab, hidden]`.
    Unembedding = Out "out" 15, Holds::Dense, [c.vocab_size, c.hidden_dim];
    /// RMSNorm before attention `[1, hidden]`.
    AttnNorm { layer } = RmsAttnW "rms_attn_w" 1, Holds::Norm, [1, c.hidden_dim];
    /// RMSNorm before the experts `[1, hidden]`.
    FfnNorm { layer } = RmsFfnW "rms_ffn_w" 2, Holds::Norm, [1, c.hidden_dim];
    /// RMSNorm before the unembedding `[1, hidden]`.
    OutNorm = RmsOutW "rms_out_w" 14, Holds::Norm, [1, c.hidden_dim];
    /// Query, key and value projection `[head_dim * (heads + 2 * kv_heads), hidden]`.
    Qkv { layer } = WQkv "w_qkv" 3, Holds::Dense, [c.qkv_dim(), c.hidden_dim];
    /// Bias of the query, key and value projection `[1, head_dim * (heads + 2 * kv_heads)]`.
    QkvBias { layer } = BQkv "b_qkv" 5, Holds::Bias, [1, c.qkv_dim()];
    /// Attention's output projection `[hidden, head_dim * heads]`.
    AttnOut { layer } = WO "w_o" 4, Holds::Dense, [c.hidden_dim, c.q_dim()];
    /// Bias of attention's output projection `[1, hidden]`.
    AttnOutBias { layer } = BO "b_o" 6, Holds::Bias, [1, c.hidden_dim];
    /// Attention sinks `[1, heads]`.
    Sinks { layer } = AttnSinks "attn_sinks" 7, Holds::Bias, [1, c.n_attn_heads];
    /// Router `[experts, hidden]`.
    Router { layer } = WRouter "w_router" 8, Holds::Router, [c.n_experts, c.hidden_dim];
    /// Bias of the router `[1, experts]`.
    RouterBias { layer } = BRouter "b_router" 9, Holds::Bias, [1, c.n_experts];
    /// An expert's first matrix `[2 * intermediate, hidden]`, rows alternating gate and up.
    Mlp1 { layer, expert } = WMlp1 "w_mlp1" 10, Holds::Expert { gated: true }, [2 * c.intermediate_dim, c.hidden_dim];
    /// Bias of an expert's first matrix `[1, 2 * intermediate]`.
    Mlp1Bias { layer, expert } = BMlp1 "b_mlp1" 12, Holds::Bias, [1, 2 * c.intermediate_dim];
    /// An expert's second matrix `[hidden, intermediate]`.
    Mlp2 { layer, expert } = WMlp2 "w_mlp2" 11, Holds::Expert { gated: false }, [c.hidden_dim, c.intermediate_dim];
    /// Bias of an expert's second matrix `[1, hidden]`.
    Mlp2Bias { layer, expert } = BMlp2 "b_mlp2" 13, Holds::Bias, [1, c.hidden_dim];
}

impl Field {
    /// How many there are.
    pub const COUNT: usize = 16;

    /// The layer that the array's tensors of `layer` go with, where devices have some layers each: the embedding goes
    /// with the first, what stands behind the last layer with that.
    pub fn goes_with(self, layer: usize, config: &ModelConfig) -> usize {
        match self {
            Self::TokenEmbeddingTable => 0,
            Self::RmsOutW | Self::Out => config.n_layers - 1,
            _ => layer,
        }
    }

    /// The array's tensors in `layer`, as far as it counts by layers: one, or one an expert.
    pub fn of_layer(self, layer: usize, config: &ModelConfig) -> impl Iterator<Item = TensorId> + use<> {
        let [_, experts] = self.counts(config);
        (0..experts).map(move |expert| self.id(layer, expert))
    }
}

impl TensorId {
    /// Every tensor of the model, in the order of a `.bin` file.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Self> {
        Field::IN_FILE_ORDER.into_iter().flat_map(move |field| {
            let [layers, _] = field.counts(config);
            (0..layers).flat_map(move |layer| field.of_layer(layer, config))
        })
    }

    /// Refuses a layer or an expert that the model does not have.
    pub fn check(self, config: &ModelConfig) -> Result<()> {
        let (field, layer, expert) = self.place();
        let [layers, experts] = field.counts(config);
        if layer < layers && expert < experts {
            return Ok(());
        }
        let why = format!("the model has no layer {layer} with expert {expert}; it has {layers} with {experts}");
        Err(Error::format(field.name(), why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table's places, which the C struct gives, and its two ways between tensors and arrays.
    #[test]
    fn every_tensor_has_one_place() {
        let config = ModelConfig::preset_7m();
        let mut places: Vec<_> = Field::IN_FILE_ORDER.iter().map(|&field| field as usize).collect();
        places.sort_unstable();
        assert!(places.into_iter().eq(0..Field::COUNT));
        let all: Vec<_> = TensorId::all(&config).collect();
        assert_eq!(all.len(), 3 + config.n_layers * (9 + 4 * config.n_experts));
        for id in all {
            let (field, layer, expert) = id.place();
            assert_eq!(field.id(layer, expert), id);
            assert!(id.check(&config).is_ok());
        }
        assert!(TensorId::Qkv { layer: 2 }.check(&config).is_err());
        assert!(TensorId::Mlp1 { layer: 0, expert: 32 }.check(&config).is_err());
    }
}

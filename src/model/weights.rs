//! The model's weights by what the mathematics calls them.

use crate::error::Error;
use crate::memory::{self, Purpose};
use crate::tensors::Field;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Makes weights of the model's tensors.
pub trait Load {
    /// What becomes of a matrix, or of the experts' matrices of a layer.
    type Matrix;
    /// What becomes of a vector, or of the experts' vectors of a layer.
    type Vector;
    /// Why it may fail.
    type Error: From<Error>;
    /// The matrices that an array has of a layer.
    fn matrix(&mut self, array: Field, layer: usize) -> Result<Self::Matrix, Self::Error>;
    /// The vectors that an array has of a layer.
    fn vector(&mut self, array: Field, layer: usize) -> Result<Self::Vector, Self::Error>;
}

/// A function for matrices and one for vectors.
struct Each<F, G> {
    matrix: F,
    vector: G,
}

/// Makes the struct of the weights that each layer has, and all that goes through them in turn.
macro_rules! layer_weights {
    (@matrix) => { M };
    (@vector) => { V };
    ($($(#[$doc:meta])* $name:ident: $form:ident $array:ident,)*) => {
        /// One layer's weights.
        pub struct LayerWeights<M, V> {
            $($(#[$doc])* pub $name: layer_weights!(@$form),)*
        }

        impl<M, V> LayerWeights<M, V> {
            /// Makes the weights of `layer`.
            pub fn load<L: Load<Matrix = M, Vector = V>>(layer: usize, loader: &mut L) -> Result<Self, L::Error> {
                Ok(Self {
                    $($name: loader.$form(Field::$array, layer)?,)*
                })
            }

            fn try_map<A, B>(
                &mut self,
                each: &mut Each<impl FnMut(&mut M) -> Option<A>, impl FnMut(&mut V) -> Option<B>>,
            ) -> Option<LayerWeights<A, B>> {
                Some(LayerWeights {
                    $($name: (each.$form)(&mut self.$name)?,)*
                })
            }

            fn pointers(
                &self,
                each: &Each<impl Fn(&M) -> *mut c_void, impl Fn(&V) -> *mut c_void>,
                to: &mut [*mut c_void; Field::COUNT],
            ) {
                $(to[Field::$array as usize] = (each.$form)(&self.$name);)*
            }
        }
    };
}

// In the order in which they are loaded.
layer_weights! {
    /// `[H]`
    attn_norm: vector RmsAttnW,
    /// `[D * (Nq + 2 Nkv), H]`
    qkv: matrix WQkv,
    /// `[D * (Nq + 2 Nkv)]`
    qkv_bias: vector BQkv,
    /// `[Nq]`
    sinks: vector AttnSinks,
    /// `[H, D * Nq]`
    attn_out: matrix WO,
    /// `[H]`
    attn_out_bias: vector BO,
    /// `[H]`
    ffn_norm: vector RmsFfnW,
    /// `[E, H]`
    router: matrix WRouter,
    /// `[E]`
    router_bias: vector BRouter,
    /// `[E][2 I, H]`, rows alternating gate and up
    mlp1: matrix WMlp1,
    /// `[E, 2 I]`
    mlp1_bias: vector BMlp1,
    /// `[E][H, I]`
    mlp2: matrix WMlp2,
    /// `[E, H]`
    mlp2_bias: vector BMlp2,
}

/// The model's weights.
pub struct Weights<M, V> {
    /// `[V, H]`
    pub embedding: M,
    /// One a layer.
    pub layers: Vec<LayerWeights<M, V>>,
    /// `[H]`
    pub out_norm: V,
    /// `[V, H]`
    pub unembedding: M,
}

impl<M, V> Weights<M, V> {
    /// Makes all weights of a model of so many layers.
    pub fn load<L: Load<Matrix = M, Vector = V>>(n_layers: usize, loader: &mut L) -> Result<Self, L::Error> {
        let embedding = loader.matrix(Field::TokenEmbeddingTable, 0)?;
        let unembedding = loader.matrix(Field::Out, 0)?;
        let out_norm = loader.vector(Field::RmsOutW, 0)?;
        let mut layers = memory::room(n_layers, Purpose::Weights)?;
        for layer in 0..n_layers {
            layers.push(LayerWeights::load(layer, loader)?);
        }
        Ok(Self {
            embedding,
            layers,
            out_norm,
            unembedding,
        })
    }

    /// Maps each matrix by `matrix` and each vector by `vector`. `None` if any of them gives `None`.
    pub fn try_map<A, B>(
        &mut self,
        matrix: impl FnMut(&mut M) -> Option<A>,
        vector: impl FnMut(&mut V) -> Option<B>,
    ) -> Option<Weights<A, B>> {
        let mut each = Each { matrix, vector };
        Some(Weights {
            embedding: (each.matrix)(&mut self.embedding)?,
            layers: self
                .layers
                .iter_mut()
                .map(|layer| layer.try_map(&mut each))
                .collect::<Option<_>>()?,
            out_norm: (each.vector)(&mut self.out_norm)?,
            unembedding: (each.matrix)(&mut self.unembedding)?,
        })
    }

    /// Addresses of each kind of tensor in its first layer, in the order of the C struct's fields; NULL without layers.
    pub fn pointers(
        &self,
        matrix: impl Fn(&M) -> *mut c_void,
        vector: impl Fn(&V) -> *mut c_void,
    ) -> [*mut c_void; Field::COUNT] {
        let each = Each { matrix, vector };
        let mut pointers = [null_mut(); Field::COUNT];
        pointers[Field::TokenEmbeddingTable as usize] = (each.matrix)(&self.embedding);
        pointers[Field::RmsOutW as usize] = (each.vector)(&self.out_norm);
        pointers[Field::Out as usize] = (each.matrix)(&self.unembedding);
        if let Some(first) = self.layers.first() {
            first.pointers(&each, &mut pointers);
        }
        pointers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;
    use crate::tensors::{Holds, TensorId};

    /// Writes down what it is asked for.
    struct Names {
        config: ModelConfig,
        ids: Vec<TensorId>,
    }

    impl Names {
        fn note(&mut self, array: Field, layer: usize, is_vector: bool) -> Field {
            assert_eq!(
                matches!(array.holds(), Holds::Norm | Holds::Bias),
                is_vector,
                "{array:?}"
            );
            self.ids.extend(array.of_layer(layer, &self.config));
            array
        }
    }

    impl Load for Names {
        type Matrix = Field;
        type Vector = Field;
        type Error = Error;

        fn matrix(&mut self, array: Field, layer: usize) -> Result<Field, Error> {
            Ok(self.note(array, layer, false))
        }

        fn vector(&mut self, array: Field, layer: usize) -> Result<Field, Error> {
            Ok(self.note(array, layer, true))
        }
    }

    #[test]
    fn every_tensor_is_loaded_once_and_pointed_to() {
        let config = ModelConfig::preset_7m();
        let mut names = Names {
            config: config.clone(),
            ids: Vec::new(),
        };
        let weights = Weights::load(config.n_layers, &mut names).unwrap();
        let place = |id: &TensorId| {
            let (field, layer, expert) = id.place();
            (field as usize, layer, expert)
        };
        names.ids.sort_by_key(place);
        let mut all: Vec<_> = TensorId::all(&config).collect();
        all.sort_by_key(place);
        assert_eq!(names.ids, all);
        let number = |field: &Field| std::ptr::without_provenance_mut(*field as usize);
        let pointers = weights.pointers(number, number);
        assert!(pointers.iter().map(|pointer| pointer.addr()).eq(0..Field::COUNT));
    }
}

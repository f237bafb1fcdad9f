//! The model's weights by what the mathematics calls them.

use crate::error::Error;
use crate::memory::{self, Purpose};
use crate::tensors::Field;
use std::ffi::c_void;
use std::ops::Range;
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

            fn sum(&self, each: &Each<impl Fn(&M) -> u64, impl Fn(&V) -> u64>) -> u64 {
                [$((each.$form)(&self.$name)),*].into_iter().sum()
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

/// The weights of a contiguous range of a model's layers, mostly of all.
pub struct Weights<M, V> {
    /// `[V, H]`; only with the first layer.
    pub embedding: Option<M>,
    /// The first layer's index in the model.
    pub first_layer: usize,
    /// One a layer.
    pub layers: Vec<LayerWeights<M, V>>,
    /// Only with the last layer.
    pub head: Option<Head<M, V>>,
}

/// What stands behind a model's last layer.
pub struct Head<M, V> {
    /// `[H]`
    pub norm: V,
    /// `[V, H]`
    pub unembedding: M,
}

impl<M, V> Weights<M, V> {
    /// Makes all weights of a model, its layers in this order.
    pub fn load<L: Load<Matrix = M, Vector = V>>(
        order: impl ExactSizeIterator<Item = usize>,
        loader: &mut L,
    ) -> Result<Self, L::Error> {
        let embedding = loader.matrix(Field::TokenEmbeddingTable, 0)?;
        let unembedding = loader.matrix(Field::Out, 0)?;
        let norm = loader.vector(Field::RmsOutW, 0)?;
        let mut loaded = memory::room(order.len(), Purpose::Weights)?;
        for layer in order {
            loaded.push((layer, LayerWeights::load(layer, loader)?));
        }
        loaded.sort_unstable_by_key(|&(layer, _)| layer);
        Ok(Self {
            embedding: Some(embedding),
            first_layer: 0,
            layers: memory::collect(loaded.into_iter().map(|(_, layer)| layer), Purpose::Weights)?,
            head: Some(Head { norm, unembedding }),
        })
    }

    /// Its layers.
    pub fn range(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.layers.len()
    }

    /// Maps the weights of some of its layers, with what stands before its first and behind its last one: each matrix
    /// by `matrix` and each vector by `vector`. `None` if any of them gives `None`.
    pub fn try_map<A, B>(
        &mut self,
        layers: Range<usize>,
        matrix: impl FnMut(&mut M) -> Option<A>,
        vector: impl FnMut(&mut V) -> Option<B>,
    ) -> Option<Weights<A, B>> {
        let mut each = Each { matrix, vector };
        let all = self.range();
        let embedding = self.embedding.as_mut().filter(|_| layers.start == all.start);
        let head = self.head.as_mut().filter(|_| layers.end == all.end);
        Some(Weights {
            embedding: match embedding {
                Some(embedding) => Some((each.matrix)(embedding)?),
                None => None,
            },
            first_layer: layers.start,
            layers: self.layers[layers.start - all.start..layers.end - all.start]
                .iter_mut()
                .map(|layer| layer.try_map(&mut each))
                .collect::<Option<_>>()?,
            head: match head {
                Some(head) => Some(Head {
                    norm: (each.vector)(&mut head.norm)?,
                    unembedding: (each.matrix)(&mut head.unembedding)?,
                }),
                None => None,
            },
        })
    }

    /// The sum of what `matrix` and `vector` give of each.
    pub fn sum(&self, matrix: impl Fn(&M) -> u64, vector: impl Fn(&V) -> u64) -> u64 {
        let each = Each { matrix, vector };
        let embedding = self.embedding.as_ref().map_or(0, &each.matrix);
        let head = |head: &Head<M, V>| (each.vector)(&head.norm) + (each.matrix)(&head.unembedding);
        let layers: u64 = self.layers.iter().map(|layer| layer.sum(&each)).sum();
        embedding + layers + self.head.as_ref().map_or(0, head)
    }

    /// Addresses of each kind of tensor in its first layer, in the order of the C struct's fields; NULL where it has
    /// none.
    pub fn pointers(
        &self,
        matrix: impl Fn(&M) -> *mut c_void,
        vector: impl Fn(&V) -> *mut c_void,
    ) -> [*mut c_void; Field::COUNT] {
        let each = Each { matrix, vector };
        let mut pointers = [null_mut(); Field::COUNT];
        if let Some(embedding) = &self.embedding {
            pointers[Field::TokenEmbeddingTable as usize] = (each.matrix)(embedding);
        }
        if let Some(head) = &self.head {
            pointers[Field::RmsOutW as usize] = (each.vector)(&head.norm);
            pointers[Field::Out as usize] = (each.matrix)(&head.unembedding);
        }
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
        fn note(&mut self, array: Field, layer: usize, is_vector: bool) -> (Field, usize) {
            assert_eq!(
                matches!(array.holds(), Holds::Norm | Holds::Bias),
                is_vector,
                "{array:?}"
            );
            self.ids.extend(array.of_layer(layer, &self.config));
            (array, layer)
        }
    }

    impl Load for Names {
        type Matrix = (Field, usize);
        type Vector = (Field, usize);
        type Error = Error;

        fn matrix(&mut self, array: Field, layer: usize) -> Result<(Field, usize), Error> {
            Ok(self.note(array, layer, false))
        }

        fn vector(&mut self, array: Field, layer: usize) -> Result<(Field, usize), Error> {
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
        let weights = Weights::load(0..config.n_layers, &mut names).unwrap();
        let place = |id: &TensorId| {
            let (field, layer, expert) = id.place();
            (field as usize, layer, expert)
        };
        names.ids.sort_by_key(place);
        let mut all: Vec<_> = TensorId::all(&config).collect();
        all.sort_by_key(place);
        assert_eq!(names.ids, all);
        let number = |&(field, _): &(Field, usize)| std::ptr::without_provenance_mut(field as usize);
        let pointers = weights.pointers(number, number);
        assert!(pointers.iter().map(|pointer| pointer.addr()).eq(0..Field::COUNT));
    }

    /// Some layers, whatever the order in which all were loaded.
    #[test]
    fn a_part_has_its_own_layers_and_what_is_at_its_ends() {
        let mut names = Names {
            config: ModelConfig::preset_20b(),
            ids: Vec::new(),
        };
        let mut all = Weights::load((0..24).rev(), &mut names).unwrap();
        for layers in [0..24, 0..10, 10..11, 11..24] {
            let keep = |&mut tensor: &mut (Field, usize)| Some(tensor);
            let part = all.try_map(layers.clone(), keep, keep).unwrap();
            assert_eq!(part.range(), layers);
            let own = part.layers.iter().map(|layer| [layer.qkv, layer.mlp2_bias]);
            let expected = layers
                .clone()
                .map(|layer| [(Field::WQkv, layer), (Field::BMlp2, layer)]);
            assert!(own.eq(expected));
            assert_eq!(part.embedding.is_some(), layers.start == 0);
            assert_eq!(part.head.is_some(), layers.end == 24);
            let ends = u64::from(layers.start == 0) + 101 * u64::from(layers.end == 24);
            assert_eq!(part.sum(|_| 1, |_| 100), ends + 805 * layers.len() as u64);
        }
    }
}

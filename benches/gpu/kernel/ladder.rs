//! The ladders, and the kernels that are their rungs.

#![allow(dead_code)] // tests/ladders.rs uses a part of it

use getp::backend::gpu::catalogue::{Elements, Kernel, Op, PackedFormat, SHARED, Table};
use getp::backend::gpu::shapes::Numbers;
use getp::profile::Operation;

/// The ladder of an operation of the model: the kernels that can do it are its rungs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ladder {
    Norm,
    Qkv,
    AttentionDecode,
    AttentionPrefill,
    AttnOut,
    Router,
    Mlp1,
    Mlp2,
    Unembed,
}

impl Ladder {
    pub const ALL: [Self; 9] = [
        Self::Norm,
        Self::Qkv,
        Self::AttentionDecode,
        Self::AttentionPrefill,
        Self::AttnOut,
        Self::Router,
        Self::Mlp1,
        Self::Mlp2,
        Self::Unembed,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Qkv => "qkv",
            Self::AttentionDecode => "attention_decode",
            Self::AttentionPrefill => "attention_prefill",
            Self::AttnOut => "attn_out",
            Self::Router => "router",
            Self::Mlp1 => "mlp1",
            Self::Mlp2 => "mlp2",
            Self::Unembed => "unembed",
        }
    }

    /// What it is.
    pub fn says(self) -> &'static str {
        match self {
            Self::Norm => "the experts' outputs added to the stream, and RMSNorm",
            Self::Qkv => "queries, keys and values; beside it the norm before it, their rotation and storing",
            Self::AttentionDecode => "attention of sequences that decode",
            Self::AttentionPrefill => "attention of prompts",
            Self::AttnOut => "attention's output projection, added to the stream",
            Self::Router => "the choice of experts; beside it the norm before it",
            Self::Mlp1 => "the experts' first matrix with the gated unit; beside it the sorting of rows by expert",
            Self::Mlp2 => "the experts' second matrix",
            Self::Unembed => "the unembedding: all logits, or (unembed_greedy) a few candidates for each row's largest",
        }
    }

    /// What its kernels do, the plain ones first.
    pub fn ops(self) -> &'static [Op] {
        match self {
            Self::Norm => &[Op::Norm],
            Self::Qkv => &[Op::PlainQkv, Op::Qkv, Op::QkvStore, Op::NormQkv],
            Self::AttentionDecode => &[Op::AttentionPlain, Op::AttentionExact, Op::AttentionDecode],
            Self::AttentionPrefill => &[Op::AttentionPlain, Op::AttentionExact, Op::AttentionPrefill],
            Self::AttnOut => &[Op::PlainAttnOut, Op::AttnOut],
            Self::Router => &[Op::Route, Op::NormRoute],
            Self::Mlp1 => &[Op::PlainMlp1, Op::Mlp1, Op::SortMlp1],
            Self::Mlp2 => &[Op::PlainMlp2, Op::Mlp2],
            Self::Unembed => &[Op::PlainLogits, Op::Logits, Op::GreedyLogits],
        }
    }

    /// What a profile calls it.
    pub fn timed(self) -> Operation {
        match self {
            Self::Norm => Operation::Norm,
            Self::Qkv => Operation::Qkv,
            Self::AttentionDecode | Self::AttentionPrefill => Operation::Attention,
            Self::AttnOut => Operation::AttnOut,
            Self::Router => Operation::Router,
            Self::Mlp1 => Operation::Mlp1,
            Self::Mlp2 => Operation::Mlp2,
            Self::Unembed => Operation::Unembed,
        }
    }

    /// Operations that some rungs do, too, and others leave to kernels of their own.
    pub fn beside(self) -> &'static [Operation] {
        match self {
            Self::Qkv => &[Operation::Norm, Operation::RopeStore],
            Self::Router => &[Operation::Norm],
            Self::Mlp1 => &[Operation::Sort, Operation::Gather],
            _ => &[],
        }
    }

    pub fn is_attention(self) -> bool {
        matches!(self, Self::AttentionDecode | Self::AttentionPrefill)
    }

    pub fn is_of_experts(self) -> bool {
        matches!(self, Self::Mlp1 | Self::Mlp2)
    }

    /// A family's kernels that can do it, from the plain one on.
    pub fn kernels(self, family: &'static Table) -> Vec<&'static Kernel> {
        let mine = |kernel: &&Kernel| self.ops().contains(&kernel.op);
        let mut kernels: Vec<_> = family.kernels.iter().filter(mine).collect();
        let place = |kernel: &Kernel| self.ops().iter().position(|&op| op == kernel.op);
        kernels.sort_by_key(|kernel| (!is_plain(kernel), kernel.tokens, place(kernel), kernel.index));
        kernels
    }
}

/// Whether a kernel is the one of its operation that every family has.
pub fn is_plain(kernel: &Kernel) -> bool {
    kernel.index < SHARED && kernel.variant.is_empty() && kernel.op != Op::NormRoute
}

/// What a ladder computes in: the rungs of one are alike in it.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub numbers: Numbers,
    /// Whether experts have weights of 16 bits instead of MXFP4.
    pub w16_experts: bool,
}

impl Setup {
    /// That of released models.
    pub fn new(exact: bool) -> Self {
        Self {
            numbers: Numbers::new(Elements::F16, exact),
            w16_experts: false,
        }
    }

    /// What this kernel is made for; where it takes both precisions, this one.
    pub fn of(kernel: &Kernel, ladder: Ladder, exact: bool) -> Self {
        let elements = match kernel.elements {
            Some(Elements::Bf16) => Elements::Bf16,
            _ => Elements::F16,
        };
        let exact = match kernel.elements {
            _ if kernel.terms > 0 => kernel.terms > 1,
            Some(elements) => elements == Elements::F32,
            None => exact || kernel.op == Op::AttentionExact,
        };
        Self {
            numbers: Numbers::new(elements, exact),
            w16_experts: ladder.is_of_experts() && kernel.weights == Some(PackedFormat::W16),
        }
    }

    /// Whether a kernel of this operation computes so.
    pub fn has(&self, ladder: Ladder, kernel: &Kernel) -> bool {
        let Numbers {
            elements,
            kv,
            terms,
            exact,
        } = self.numbers;
        let elements = if ladder.is_attention() { kv } else { elements };
        let weights = match ladder.is_of_experts() && !self.w16_experts {
            true => PackedFormat::Mxfp4,
            false => PackedFormat::W16,
        };
        kernel.elements.is_none_or(|of| of == elements)
            && (kernel.terms == 0 || kernel.terms == terms)
            && kernel.weights.is_none_or(|of| of == weights)
            && (kernel.op != Op::AttentionExact || exact)
    }
}

//! Who holds the KV cache's blocks, and which of them hold the beginning of a prompt that others may share.
//!
//! The keys and values at a position of a prompt depend on the tokens up to it and on nothing else, to the bit: not on
//! what is computed beside them, and not on how the prompt is cut into chunks. So sequences whose first tokens are
//! equal can share the blocks of these, and answer as they would alone. Where a replica decodes with a kernel of its
//! own, an answer's keys and values are not those of the same tokens in a prompt: its blocks are not shared there.
//!
//! *Beginnings* are a tree. A node is a full block of the full layers, known by its tokens and by its parent, the block
//! before it; so a way from the root is the beginning of a sequence. Its children are found by a hash of both, and
//! compared. A sequence adds the blocks of its prompt when it starts, before they are computed: who comes next waits
//! for them instead of computing them, too. When it ends, it adds the blocks of its answer, if these may be shared. A
//! node stays when nobody holds it, until its block is lent to another sequence (`blocks.rs` says to which).
//!
//! *Windowed layers.* Who goes on behind a beginning attends to the last positions of it there. A node therefore knows
//! the block of the windowed layers that has the same positions, as long as there is one. Rings would be written over:
//! a sequence whose ring comes round to a block that is known, or that others hold, takes another one into its ring
//! instead. There always is one, since a block that several sequences hold is counted in the ring of each. Where all
//! others are taken, a block that only the tree knows is forgotten.
//!
//! *One memory.* Each kind of layers has a pool of blocks. One that has none without a known content takes a block from
//! the other pool, which may lose a beginning, or the windows of one.
//!
//! So a beginning may be there whose last windows are gone. Who goes on behind it *computes those nodes once more*,
//! into their own blocks: to the same bits, which others may read meanwhile. What it gains is their windows, and
//! whoever comes next waits for these as for a beginning that is new.

use super::blocks::{BlockPool, NONE};
use super::limits::Limits;
use super::sequence::Sequence;
use crate::error::Result;
use crate::memory::{self, Purpose};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::Hasher;
use std::ops::Range;

/// What the cache is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    block_tokens: usize,
    blocks: usize,
    sliding_window: usize,
    shares: bool,
    shares_answers: bool,
}

impl Shape {
    fn of(limits: &Limits) -> Self {
        Self {
            block_tokens: limits.block_tokens,
            blocks: limits.blocks,
            sliding_window: limits.sliding_window,
            shares: limits.shares(),
            shares_answers: limits.share_answers,
        }
    }
}

/// Who holds the blocks of a replica's KV cache, and what is known of them. It goes from one scheduler to the next.
#[derive(Debug)]
pub struct Holdings {
    shape: Shape,
    /// The full layers' blocks; at first all.
    pub(super) full: BlockPool,
    /// The windowed layers' blocks.
    pub(super) window: BlockPool,
    beginnings: Beginnings,
    /// The nodes that [`Self::find`] has found, and how many of them, the first ones, need not be computed.
    found: Vec<u32>,
    computed: usize,
}

/// A beginning that is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CachedBeginning {
    /// How many of its blocks, the first ones, are held by sequences.
    pub(super) held: usize,
}

impl Holdings {
    /// A cache that holds nothing, for at most `limits.max_batch` sequences at once.
    pub fn new(limits: &Limits) -> Result<Self> {
        let shape = Shape::of(limits);
        let nodes = if shape.shares { shape.blocks } else { 0 };
        Ok(Self {
            full: BlockPool::new(shape.blocks, shape.blocks, limits.max_batch)?,
            window: BlockPool::new(0, shape.blocks, limits.max_batch)?,
            beginnings: Beginnings::new(nodes, shape.blocks, shape.block_tokens)?,
            found: memory::room(nodes, Purpose::Schedule)?,
            computed: 0,
            shape,
        })
    }

    /// This cache for a scheduler with these limits, or one that holds nothing if they are for another one.
    pub(super) fn fit(mut self, limits: &Limits) -> Result<Self> {
        if self.shape != Shape::of(limits) {
            return Self::new(limits);
        }
        self.full.make_room(limits.max_batch)?;
        self.window.make_room(limits.max_batch)?;
        Ok(self)
    }

    /// Looks for the longest beginning of these tokens that is there, of at most `most` blocks.
    pub(super) fn find(&mut self, tokens: &[u32], most: usize) -> CachedBeginning {
        self.found.clear();
        let mut parent = NONE;
        for tokens in tokens.chunks_exact(self.shape.block_tokens).take(most) {
            let Some(node) = self.beginnings.child(parent, tokens) else {
                break;
            };
            self.found.push(node);
            parent = node;
        }
        // Who waits for a beginning is given the blocks of its window when it has been computed.
        self.computed = self.found.len();
        while self.computed > 0 && self.is_written(self.computed) && !self.has_window(self.computed) {
            self.computed -= 1;
        }
        let held = self.found.partition_point(|&node| self.full.holders(node) > 0);
        CachedBeginning { held }
    }

    /// Whether the last of the first so many nodes found is there.
    fn is_written(&self, nodes: usize) -> bool {
        self.beginnings.is_written(self.found[nodes - 1])
    }

    /// Whether the blocks of the windowed layers are there to which the first row behind so many of the nodes found
    /// attends.
    fn has_window(&self, nodes: usize) -> bool {
        self.attended(nodes)
            .all(|block| self.beginnings.window(self.found[block]) != NONE)
    }

    /// The nodes found last.
    pub(super) fn found(&self) -> &[u32] {
        &self.found
    }

    /// Of a beginning of so many blocks those to which a windowed layer's first row behind it attends.
    fn attended(&self, blocks: usize) -> Range<usize> {
        if self.shape.sliding_window == 0 {
            return 0..0;
        }
        let next = blocks * self.shape.block_tokens;
        (next + 1).saturating_sub(self.shape.sliding_window) / self.shape.block_tokens..blocks
    }

    /// Gives a sequence its first `blocks` blocks, behind the beginning found last, and a ring of the windowed layers.
    /// Adds the rest of its prompt to the tree.
    pub(super) fn start(&mut self, sequence: &mut Sequence, blocks: usize, ring: usize) {
        let (nodes, shared) = (self.found.len(), self.computed);
        for i in 0..nodes {
            sequence.full.push(self.full.hold(self.found[i]));
        }
        sequence.awaits_beginning = shared > 0 && !self.is_written(shared);
        for &node in &self.found[shared..] {
            self.beginnings.unwrite(node);
        }
        sequence.window.resize(ring, NONE);
        if !sequence.awaits_beginning {
            for block in self.attended(shared) {
                let held = self.window.hold(self.beginnings.window(self.found[block]));
                sequence.window[block % ring] = held;
            }
        }
        for place in 0..ring {
            if sequence.window[place] == NONE {
                sequence.window[place] = self.lend_window();
            }
        }
        while sequence.full.len() < blocks {
            let block = self.lend_full();
            sequence.full.push(block);
        }
        (sequence.nodes, sequence.shared, sequence.elsewhere) = (nodes, shared, 0);
        sequence.found = nodes;
        sequence.position = shared * self.shape.block_tokens;
        sequence.planned = sequence.position;
        while sequence.nodes < sequence.n_prompt() / self.shape.block_tokens && self.add_next(sequence) {}
    }

    /// Adds the block behind a sequence's nodes to the tree. Not if there is a node with the same tokens already, or
    /// one that cannot be told from it, or if memory is lacking.
    fn add_next(&mut self, sequence: &mut Sequence) -> bool {
        let (place, block_tokens) = (sequence.nodes, self.shape.block_tokens);
        let parent = place.checked_sub(1).map_or(NONE, |before| sequence.full[before]);
        let tokens = &sequence.tokens[place * block_tokens..][..block_tokens];
        let is_new = self.shape.shares && self.beginnings.add(sequence.full[place], parent, tokens);
        if is_new {
            self.full.know(sequence.full[place]);
            sequence.nodes += 1;
        }
        is_new
    }

    /// What a sequence has been planned to compute of its prompt is there for whoever comes next.
    pub(super) fn write_prompt(&mut self, sequence: &Sequence, first_position: usize) {
        let block_tokens = self.shape.block_tokens;
        let behind = (sequence.planned / block_tokens).min(sequence.nodes);
        for place in first_position / block_tokens..behind {
            self.write(sequence, place, true);
        }
    }

    /// A sequence's node is there, and if `is_in_ring` its block of the windowed layers, unless the node has one.
    fn write(&mut self, sequence: &Sequence, place: usize, is_in_ring: bool) {
        let (node, ring) = (sequence.full[place], sequence.window.len());
        self.beginnings.write(node);
        if is_in_ring && ring > 0 && self.beginnings.window(node) == NONE {
            let window = sequence.window[place % ring];
            self.beginnings.set_window(node, window);
            self.window.know(window);
        }
    }

    /// Adds what a sequence that ends has been fed of its answer. Steps in flight may write up to `ahead` positions
    /// behind what is planned.
    pub(super) fn add_answer(&mut self, sequence: &mut Sequence, ahead: usize) {
        if !self.shape.shares_answers {
            return;
        }
        let block_tokens = self.shape.block_tokens;
        let last = (sequence.planned.max(sequence.position) + ahead) / block_tokens;
        while sequence.nodes < sequence.position / block_tokens && self.add_next(sequence) {
            let place = sequence.nodes - 1;
            self.write(sequence, place, place + sequence.window.len() > last);
        }
    }

    /// Whether the beginning is there that a sequence waits for.
    pub(super) fn is_computed(&self, sequence: &Sequence) -> bool {
        self.beginnings.is_written(sequence.full[sequence.shared - 1])
    }

    /// The place of the first of a sequence's nodes that it has not computed, but was to; `None` if there is none.
    pub(super) fn first_not_computed(&self, sequence: &Sequence) -> Option<usize> {
        let computed = sequence.shared.max(sequence.planned / self.shape.block_tokens);
        (computed < sequence.nodes).then_some(computed)
    }

    /// Forgets a sequence's nodes from a place on, which nobody else holds: they will not be computed. Those that it
    /// has found, and would have computed once more, stay as they were.
    pub(super) fn forget(&mut self, sequence: &mut Sequence, from: usize) {
        let new = sequence.found.max(from);
        for &node in sequence.full[new..sequence.nodes].iter().rev() {
            self.beginnings.remove(node, &mut self.window);
            self.full.forget(node);
        }
        for &node in &sequence.full[from..new] {
            self.beginnings.write(node);
        }
        sequence.nodes = from;
    }

    /// Takes a sequence's blocks back. Its tables keep their memory.
    pub(super) fn end(&mut self, sequence: &mut Sequence) {
        self.full.empty(&mut sequence.full);
        self.window.empty(&mut sequence.window);
    }

    /// Puts the blocks of the windowed layers into a sequence's ring to which its first row behind its beginning
    /// attends; not if one is lacking.
    pub(super) fn hand_over(&mut self, sequence: &mut Sequence) -> bool {
        let (nodes, ring) = (&sequence.full[..sequence.shared], &mut sequence.window);
        let attended = self.attended(nodes.len());
        if attended
            .clone()
            .any(|block| self.beginnings.window(nodes[block]) == NONE)
        {
            return false;
        }
        for block in attended {
            let shared = self.window.hold(self.beginnings.window(nodes[block]));
            let place = block % ring.len();
            let own = std::mem::replace(&mut ring[place], shared);
            self.window.let_go(own);
        }
        sequence.awaits_beginning = false;
        true
    }

    /// Blocks that the full layers may have, where so many are for rings.
    pub(super) fn free(&self, rings: usize) -> usize {
        self.full.free() + self.window.blocks() - rings
    }

    /// A block for the full layers; the caller has checked that one is free.
    pub(super) fn lend_full(&mut self) -> u32 {
        let Self {
            full,
            window,
            beginnings,
            ..
        } = self;
        if full.should_take_from(window) {
            full.add(window.give(|block| beginnings.forget_window(block)));
        }
        full.lend(|node| beginnings.remove(node, window))
    }

    /// A block for the windowed layers; the caller has checked that one is free.
    pub(super) fn lend_window(&mut self) -> u32 {
        let Self {
            full,
            window,
            beginnings,
            ..
        } = self;
        if window.should_take_from(full) {
            let block = full.give(|node| beginnings.remove(node, window));
            window.add(block);
        }
        window.lend(|block| beginnings.forget_window(block))
    }

    /// Whether a sequence needs another block in its ring before it writes to a block of these positions.
    pub(super) fn renews(&self, sequence: &Sequence, block: usize) -> bool {
        let ring = &sequence.window;
        !ring.is_empty() && self.is_needed(ring[block % ring.len()])
    }

    /// Whether others than the one that holds it may need a block of the windowed layers.
    fn is_needed(&self, block: u32) -> bool {
        self.window.holders(block) > 1 || self.window.is_known(block)
    }

    /// The block that a sequence may write to in place of one of its ring, which it does not need any more.
    pub(super) fn renew(&mut self, block: u32) -> u32 {
        if !self.is_needed(block) {
            return block;
        }
        if self.window.free() + self.full.free() == 0 {
            debug_assert!(
                self.window.holders(block) == 1,
                "a block that several hold is counted in the ring of each"
            );
            self.beginnings.forget_window(block);
            self.window.forget(block);
            return block;
        }
        let renewed = self.lend_window();
        self.window.let_go(block);
        renewed
    }

    /// Forgets all beginnings; nobody holds a block.
    pub(super) fn forget_all(&mut self) {
        for node in 0..self.beginnings.nodes.len() as u32 {
            if self.full.is_known(node) {
                self.beginnings.remove(node, &mut self.window);
                self.full.forget(node);
            }
        }
    }
}

/// See the module.
#[derive(Debug)]
struct Beginnings {
    block_tokens: usize,
    /// By block of the full layers.
    nodes: Vec<Node>,
    /// The tokens of each node.
    tokens: Vec<u32>,
    /// Nodes by their hash.
    places: FxHashMap<u64, u32>,
    /// By block of the windowed layers: the node that knows it.
    of_window: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    hash: u64,
    /// The block of the windowed layers that has the same positions.
    window: u32,
    is_written: bool,
}

impl Beginnings {
    fn new(nodes: usize, window_blocks: usize, block_tokens: usize) -> Result<Self> {
        let node = Node {
            parent: NONE,
            hash: 0,
            window: NONE,
            is_written: false,
        };
        // Twice as many, so that what removed ones leave behind is cleared without more memory.
        let mut places = FxHashMap::default();
        let room = places.try_reserve(2 * nodes);
        room.map_err(|_| memory::lacking::<(u64, u32)>(2 * nodes, Purpose::Schedule))?;
        Ok(Self {
            block_tokens,
            nodes: memory::filled(node, nodes, Purpose::Schedule)?,
            tokens: memory::filled(0, nodes.saturating_mul(block_tokens), Purpose::Schedule)?,
            places,
            of_window: memory::filled(NONE, window_blocks, Purpose::Schedule)?,
        })
    }

    fn hash(parent: u32, tokens: &[u32]) -> u64 {
        let mut hasher = FxHasher::default();
        hasher.write_u32(parent);
        hasher.write(bytemuck::cast_slice(tokens));
        hasher.finish()
    }

    fn tokens(&self, node: u32) -> &[u32] {
        &self.tokens[node as usize * self.block_tokens..][..self.block_tokens]
    }

    fn child(&self, parent: u32, tokens: &[u32]) -> Option<u32> {
        let node = *self.places.get(&Self::hash(parent, tokens))?;
        (self.nodes[node as usize].parent == parent && self.tokens(node) == tokens).then_some(node)
    }

    fn add(&mut self, node: u32, parent: u32, tokens: &[u32]) -> bool {
        let hash = Self::hash(parent, tokens);
        if self.places.contains_key(&hash) || self.places.try_reserve(1).is_err() {
            return false;
        }
        self.places.insert(hash, node);
        self.nodes[node as usize] = Node {
            parent,
            hash,
            window: NONE,
            is_written: false,
        };
        self.tokens[node as usize * self.block_tokens..][..self.block_tokens].copy_from_slice(tokens);
        true
    }

    fn write(&mut self, node: u32) {
        self.nodes[node as usize].is_written = true;
    }

    fn unwrite(&mut self, node: u32) {
        self.nodes[node as usize].is_written = false;
    }

    fn set_window(&mut self, node: u32, window: u32) {
        self.nodes[node as usize].window = window;
        self.of_window[window as usize] = node;
    }

    fn is_written(&self, node: u32) -> bool {
        self.nodes[node as usize].is_written
    }

    fn window(&self, node: u32) -> u32 {
        self.nodes[node as usize].window
    }

    /// Forgets a node, and in `pool` its block of the windowed layers.
    fn remove(&mut self, node: u32, pool: &mut BlockPool) {
        let Node { hash, window, .. } = self.nodes[node as usize];
        self.places.remove(&hash);
        if window != NONE {
            self.forget_window(window);
            pool.forget(window);
        }
    }

    fn forget_window(&mut self, block: u32) {
        let node = std::mem::replace(&mut self.of_window[block as usize], NONE);
        self.nodes[node as usize].window = NONE;
    }
}

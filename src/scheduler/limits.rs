//! The limits of a step and of the KV cache.

use crate::error::{Error, Result};
use crate::kv_blocks::BlockCounts;
use crate::request::{Outlet, Request};

/// The most rows of a step: far more than saturates a device, while the activations still fit its memory.
const MAX_STEP_TOKENS: usize = 1 << 20;

/// The entries of all block tables are at most so many times as many as there are blocks, where sequences share them.
pub const FULL_TABLES: usize = 4;

/// Steps that a replica of this depth computes at once: the last one under way waits behind them.
pub fn steps_at_once(depth: usize) -> usize {
    depth.saturating_sub(1).max(1)
}

/// The scheduler's limits; they come from the replica, the options and the model.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The most sequences that run at once.
    pub max_batch: usize,
    /// The most rows in a step. At least as many as sequences that take their turn together, so that every decoding one
    /// moves in every round: `max_batch`, or where `depth` is more than two its share of them.
    pub step_tokens: usize,
    /// The most rows of one sequence in a step. Rings of windowed layers grow with it, so that a value below
    /// `step_tokens` leaves room for more sequences with long prompts.
    pub chunk_tokens: usize,
    /// The most rows in a step whose logits are wanted. At least as many, for the same reason.
    pub max_logits_rows: usize,
    /// The most positions of a sequence.
    pub max_positions: usize,
    /// Positions in a block of the KV cache.
    pub block_tokens: usize,
    /// Blocks in the KV cache, for full layers or for windowed ones.
    pub blocks: usize,
    /// Width of the windowed layers' attention; 0 if no layer is windowed.
    pub sliding_window: usize,
    /// Whether any layer attends to all positions.
    pub has_full_layers: bool,
    /// Whether the logits of every row are wanted, for recording.
    pub record_all: bool,
    /// Whether sequences share the blocks of beginnings that are equal, where they can.
    pub share_beginnings: bool,
    /// Whether answers may be such beginnings, too: only where decoding gives the keys and values, to the bit, that the
    /// same tokens have in a prompt.
    pub share_answers: bool,
    /// Steps that may be under way at once, at least 1. Where they are more than two, the device computes all but one
    /// of them at once, and each has sequences of its own.
    pub depth: usize,
    /// Whether a sequence goes on while only the device knows its last token. If not (the host samples), the
    /// sequences take turns, so that each of `depth` steps has its share. [`super::Scheduler::plan_ahead`] changes it.
    pub plans_ahead: bool,
}

impl Limits {
    /// Refuses limits with which a sequence could wait for ever.
    pub fn check(self) -> Result<Self> {
        let wrong = |why: String| Err(Error::format("limits of a step", why));
        if self.max_batch == 0 || self.chunk_tokens == 0 {
            return wrong("a step without sequences or rows does nothing; raise GETP_MAX_BATCH".into());
        }
        if self.depth == 0 {
            return wrong("at least one step is under way at a time".into());
        }
        if self.block_tokens == 0 {
            return wrong("a block of the KV cache holds at least one position".into());
        }
        if self.depth > self.block_tokens + 1 {
            return wrong(format!(
                "{} steps under way are too many for blocks of {} positions: what they wrote after a wrong token \
                 could be where the next row still reads",
                self.depth, self.block_tokens
            ));
        }
        let together = self.max_batch.div_ceil(steps_at_once(self.depth));
        if self.step_tokens < together || self.max_logits_rows < together {
            return wrong(format!(
                "{together} sequences in a step need as many rows, but it has {} and {} of them with logits; \
                 lower GETP_MAX_BATCH or raise GETP_STEP_TOKENS",
                self.step_tokens, self.max_logits_rows
            ));
        }
        if self.step_tokens > MAX_STEP_TOKENS {
            return wrong(format!(
                "a step of {} rows is more than any device fills; lower GETP_STEP_TOKENS to {MAX_STEP_TOKENS} or less",
                self.step_tokens
            ));
        }
        if self.blocks > u32::MAX as usize {
            return wrong("block numbers have 32 bits; lower GETP_KV_MB".into());
        }
        if !self.has_full_layers && self.sliding_window == 0 {
            return wrong("a model has full layers, or windowed ones, or both".into());
        }
        Ok(self)
    }

    /// The most rows a chunk can have.
    fn max_chunk_rows(&self) -> usize {
        let logits_rows = if self.record_all {
            self.max_logits_rows
        } else {
            usize::MAX
        };
        self.chunk_tokens.min(self.step_tokens).min(logits_rows)
    }

    /// The most blocks a sequence can ever use.
    pub fn need(&self, n_prompt: usize, max_positions: usize) -> BlockCounts {
        BlockCounts::of_layers(
            self.has_full_layers,
            self.sliding_window,
            self.block_tokens,
            self.max_chunk_rows(),
            n_prompt,
            max_positions,
        )
    }

    /// Whether beginnings are shared. Not where all rows are to be computed, and not without full layers, whose blocks
    /// they are known by.
    pub(super) fn shares(&self) -> bool {
        self.share_beginnings && self.has_full_layers && !self.record_all
    }

    /// The most blocks of a beginning behind which such a prompt may go on: its last row is computed, and all are if
    /// they are scored.
    pub(super) fn beginning(&self, n_prompt: usize, scores_prompt: bool) -> usize {
        if scores_prompt {
            0
        } else {
            (n_prompt - 1) / self.block_tokens
        }
    }

    /// The most entries of all sequences' block tables.
    pub fn most_table_blocks(&self) -> usize {
        let times = if self.shares() { FULL_TABLES } else { 1 };
        times * self.blocks
    }

    /// Steps among which the sequences are divided.
    pub(super) fn turns(&self) -> usize {
        if self.plans_ahead {
            steps_at_once(self.depth)
        } else {
            self.depth
        }
    }

    /// Of `sequences` those that one step may take, so that the steps under way have equal shares.
    pub(super) fn share(&self, sequences: usize) -> usize {
        sequences.div_ceil(self.turns())
    }

    /// The most positions of a request with so many prompt tokens that could run here; 0 if there is none.
    pub fn most_positions(&self, n_prompt: usize) -> usize {
        // Fewer positions than a ring is long have as many blocks in it as in the full layers.
        let ring = self.need(n_prompt, usize::MAX).window;
        let full = self.blocks.saturating_sub(ring).max(self.blocks / 2);
        let most = match self.has_full_layers {
            true => full.saturating_mul(self.block_tokens).min(self.max_positions),
            false => self.max_positions,
        };
        let fits = (1..=most).contains(&n_prompt) && self.need(n_prompt, most).all() <= self.blocks;
        if fits { most } else { 0 }
    }

    /// The most positions of a request that could run here, whatever part of them is the prompt.
    pub fn most_positions_of_any(&self) -> usize {
        // One of more positions needs no fewer blocks.
        let (mut most, mut beyond) = (0, self.max_positions.saturating_add(1));
        while beyond - most > 1 {
            let middle = most.midpoint(beyond);
            if self.at_once(middle) > 0 {
                most = middle;
            } else {
                beyond = middle;
            }
        }
        most
    }

    /// How many requests of so many positions could run at once, whatever part of them is the prompt.
    pub fn at_once(&self, positions: usize) -> usize {
        if positions > self.max_positions {
            return 0;
        }
        let most = self.blocks.checked_div(self.need(positions, positions).all());
        most.unwrap_or(usize::MAX).min(self.max_batch)
    }

    /// Whether a request could run here, alone at least.
    pub fn take(&self, request: &Request) -> bool {
        self.obstacle(request).is_none()
    }

    /// Refuses a request that could not run even alone, in words that name the option to change.
    pub fn check_request(&self, request: &Request) -> Result<()> {
        let (n_prompt, max_positions) = (request.prompt.len(), request.max_positions);
        // What whoever asks counts.
        let fewer = match request.outlet {
            Outlet::Whole => "ask for fewer steps",
            Outlet::Tokens => "ask for fewer tokens",
        };
        let why = match self.obstacle(request) {
            None => return Ok(()),
            Some(Obstacle::NoPrompt) => "it has no prompt tokens; give it at least one".into(),
            Some(Obstacle::LongPrompt) => format!(
                "its {n_prompt} prompt tokens do not fit the {max_positions} positions of a request; \
                 shorten it or ask for more steps"
            ),
            Some(Obstacle::Positions) => format!(
                "its {max_positions} positions are more than the {} that the device takes; {fewer}",
                self.max_positions
            ),
            Some(Obstacle::Blocks(need)) => format!(
                "its {max_positions} positions need {} blocks of the KV cache in full layers, and a ring of {} in \
                 windowed ones, and there are {}; raise GETP_KV_MB, lower GETP_STEP_TOKENS or {fewer}",
                need.full, need.window, self.blocks
            ),
        };
        Err(Error::format(format!("request {}", request.number), why))
    }

    /// What keeps a request from running here even alone.
    fn obstacle(&self, request: &Request) -> Option<Obstacle> {
        let (n_prompt, max_positions) = (request.prompt.len(), request.max_positions);
        if n_prompt == 0 {
            return Some(Obstacle::NoPrompt);
        }
        if n_prompt > max_positions {
            return Some(Obstacle::LongPrompt);
        }
        if max_positions > self.max_positions {
            return Some(Obstacle::Positions);
        }
        let need = self.need(n_prompt, max_positions);
        (need.all() > self.blocks).then_some(Obstacle::Blocks(need))
    }
}

/// See [`Limits::check_request`].
enum Obstacle {
    NoPrompt,
    LongPrompt,
    Positions,
    /// It needs so many.
    Blocks(BlockCounts),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            max_batch: 4,
            step_tokens: 32,
            chunk_tokens: 32,
            max_logits_rows: 4,
            max_positions: u32::MAX as usize,
            block_tokens: 16,
            blocks: 20,
            sliding_window: 16,
            has_full_layers: true,
            record_all: false,
            share_beginnings: true,
            share_answers: true,
            depth: 1,
            plans_ahead: false,
        }
    }

    #[test]
    fn limits_that_could_starve_are_refused() {
        type Change = fn(&mut Limits);
        let wrong: [(Change, &str); 10] = [
            (|l| l.max_batch = 0, "GETP_MAX_BATCH"),
            (|l| l.chunk_tokens = 0, "GETP_MAX_BATCH"),
            (|l| l.step_tokens = 3, "GETP_STEP_TOKENS"),
            (|l| l.max_logits_rows = 3, "GETP_MAX_BATCH"),
            (|l| l.step_tokens = usize::MAX, "GETP_STEP_TOKENS"),
            (|l| l.depth = 0, "one step"),
            (|l| l.depth = 18, "wrong token"),
            (|l| l.block_tokens = 0, "position"),
            (|l| l.blocks = 1 << 33, "GETP_KV_MB"),
            (|l| (l.has_full_layers, l.sliding_window) = (false, 0), "layers"),
        ];
        assert!(limits().check().is_ok());
        for (change, word) in wrong {
            let mut limits = limits();
            change(&mut limits);
            let message = limits.check().unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn as_many_run_at_once_as_have_blocks_and_rows() {
        let limits = limits();
        // Of 16 positions each has one block of full layers, and one of a ring; of 17 two and two.
        assert_eq!(
            [16, 17, 256, 257].map(|positions| limits.at_once(positions)),
            [4, 4, 1, 0]
        );
        let many = Limits {
            max_batch: 100,
            ..limits
        };
        assert_eq!([16, 17, 96, 97].map(|positions| many.at_once(positions)), [10, 5, 2, 1]);
        let short = Limits {
            max_positions: 16,
            ..many
        };
        assert_eq!([16, 17].map(|positions| short.at_once(positions)), [10, 0]);
    }

    #[test]
    fn requests_up_to_what_is_said_fit_whatever_their_prompt() {
        for (step_tokens, said) in [(32, 256), (104, 176), (400, 160)] {
            let limits = Limits {
                step_tokens,
                chunk_tokens: step_tokens,
                ..limits()
            };
            assert_eq!(limits.most_positions_of_any(), said, "{step_tokens} rows a step");
            assert!((1..=said).all(|n_prompt| limits.most_positions(n_prompt) >= said));
            assert!(limits.most_positions(1) > said && limits.most_positions(said + 1) == 0);
        }
        let no_window = Limits {
            sliding_window: 0,
            ..limits()
        };
        assert_eq!(no_window.most_positions_of_any(), 320);
    }

    #[test]
    fn sequences_that_cannot_fit_alone_are_refused() {
        let limits = limits();
        let request = |number, n_prompt, max_positions| Request::greedy(number, vec![1; n_prompt], max_positions);
        assert!(limits.check_request(&request(0, 160, 160)).is_ok());
        for (n_prompt, max_positions, word) in [
            (0, 8, "no prompt"),
            (9, 8, "9 prompt tokens"),
            (1, 289, "GETP_KV_MB"),
            (1, 1 << 33, "4294967295 that the device takes"),
        ] {
            let request = request(7, n_prompt, max_positions);
            assert!(!limits.take(&request));
            let message = limits.check_request(&request).unwrap_err().to_string();
            assert!(
                message.starts_with("request 7: ") && message.contains(word),
                "{message}"
            );
        }
        // With a short prompt its ring has a block less.
        let small = Limits { blocks: 13, ..limits };
        assert!(small.take(&request(0, 1, 160)));
        let message = small.check_request(&request(0, 100, 160)).unwrap_err().to_string();
        assert!(
            message.contains("a ring of 4") && message.contains("GETP_STEP_TOKENS"),
            "{message}"
        );
    }

    #[test]
    fn need_counts_only_the_layers_there_are() {
        let both = limits().need(40, 100);
        assert_eq!(both, BlockCounts { full: 7, window: 3 });
        let full_only = Limits {
            sliding_window: 0,
            ..limits()
        };
        assert_eq!(full_only.need(40, 100), BlockCounts { full: 7, window: 0 });
        let windowed_only = Limits {
            has_full_layers: false,
            ..limits()
        };
        assert_eq!(windowed_only.need(40, 100), BlockCounts { full: 0, window: 3 });
    }

    #[test]
    fn rings_grow_with_the_chunks_there_can_be() {
        let ring = |limits: Limits| limits.need(90, 100).window;
        assert_eq!(ring(limits()), 4);
        assert_eq!(
            ring(Limits {
                chunk_tokens: 1000,
                ..limits()
            }),
            4,
            "a step has 32 rows"
        );
        assert_eq!(
            ring(Limits {
                chunk_tokens: 4,
                ..limits()
            }),
            3
        );
        assert_eq!(
            ring(Limits {
                record_all: true,
                ..limits()
            }),
            3,
            "4 logits rows make chunks of 4"
        );
    }
}

//! A grammar for tests: what can come next follows from the tokens so far, by chance.

use getp::error::Result;
use getp::grammar::{Grammar, Matcher};

/// Answers in a vocabulary of this size.
#[derive(Clone, Copy, Debug)]
pub struct ByChance {
    pub vocab: u32,
    pub seed: u64,
}

#[derive(Debug)]
struct Place {
    grammar: ByChance,
    state: u64,
}

fn mixed(state: u64, value: u64) -> u64 {
    let mut x = (state ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ x >> 32
}

impl ByChance {
    /// Whether the answer has only tokens that can come where they stand.
    pub fn has(self, answer: &[u32]) -> bool {
        let mut place = Place {
            grammar: self,
            state: self.seed,
        };
        answer.iter().all(|&token| {
            let allowed = place.allowed(token);
            place.take(token);
            allowed
        })
    }
}

impl Grammar for ByChance {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(Place {
            grammar: *self,
            state: self.seed,
        })
    }
}

impl Place {
    /// All tokens, a third of them can come, or one, or two that are next to each other.
    fn allowed(&self, token: u32) -> bool {
        let only = (mixed(self.state, 1) % u64::from(self.grammar.vocab)) as u32;
        match self.state % 4 {
            0 => true,
            1 => token == only,
            2 => token == only || token == (only + 1) % self.grammar.vocab,
            _ => mixed(self.state, 2 + u64::from(token)).is_multiple_of(3) || token == only,
        }
    }
}

impl Matcher for Place {
    fn take(&mut self, token: u32) {
        self.state = mixed(self.state, u64::from(token) << 20);
    }

    fn allows(&mut self, token: u32) -> Result<bool> {
        Ok(self.allowed(token))
    }

    fn mask(&mut self, mask: &mut Vec<u32>) -> Result<()> {
        mask.clear();
        mask.resize(self.grammar.vocab.div_ceil(32) as usize, 0);
        for token in (0..self.grammar.vocab).filter(|&token| self.allowed(token)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }
}

//! Grammars that answers follow: which tokens may come next.
//!
//! A [`Grammar`] belongs to a request. A [`Matcher`] follows one answer: it is told each token, and says which may come
//! next. A token is sampled as if there were no grammar, on the device where that samples. If the grammar forbids it,
//! it is sampled again by the host, from those that may come, as if there were no others, and with a random number of
//! its own (`engine/step_sampler.rs`). So a model that writes what it is asked for costs no mask. At a temperature of 0
//! this is the most probable token that may come. Without top-p each token has the share that it has among those that
//! may come: what the first number gives to the forbidden ones, the second one spreads over the others as they stand.
//! With top-p the first nucleus is that of all tokens, and the second that of the tokens that may come.

use crate::error::Result;
use std::fmt::Debug;

/// What an answer's tokens must be like.
pub trait Grammar: Debug + Send + Sync {
    /// A matcher before the first token.
    fn matcher(&self) -> Box<dyn Matcher>;
}

/// One is equal to itself alone.
impl PartialEq for dyn Grammar {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }
}

/// How far an answer has come in its grammar.
pub trait Matcher: Debug + Send {
    /// Takes the answer's next token, which may come.
    fn take(&mut self, token: u32);

    /// Whether this token may come next. Fails if the grammar is too complex.
    fn allows(&mut self, token: u32) -> Result<bool>;

    /// Writes the tokens that may come next: bit `id % 32` of word `id / 32` is the token `id`; what lies beyond the
    /// words may not. Fails if the grammar is too complex, and if no token may come.
    fn mask(&mut self, mask: &mut Vec<u32>) -> Result<()>;
}

/// The tokens of a mask, ascending.
pub fn tokens(mask: &[u32]) -> impl Iterator<Item = u32> {
    (0..).zip(mask).flat_map(|(place, &word)| {
        let mut left = word;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros())?;
            left &= left - 1;
            Some(32 * place + bit)
        })
    })
}

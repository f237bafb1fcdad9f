//! Log-probabilities of tokens, from a step's logits.

use crate::batch::{LogitsRow, StepPlan};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::request::Score;
use crate::scheduler::Scheduler;
use rayon::ThreadPool;
use rayon::prelude::*;

/// A score of a step.
#[derive(Debug)]
pub struct Scored {
    /// The request's number.
    pub number: usize,
    /// The position of the token in the prompt; `None` if it is the answer's next.
    pub in_prompt: Option<usize>,
    /// The score.
    pub score: Score,
}

/// Scores the rows of a step that ask for it, from its `logits` `[rows, vocab]`; `tokens` are those sampled. To be called
/// before these are committed.
pub fn score(
    pool: &ThreadPool,
    scheduler: &Scheduler,
    plan: &StepPlan,
    tokens: &[u32],
    logits: &[f32],
    vocab: usize,
) -> Result<Vec<Scored>> {
    let mut wanted = Vec::new();
    let mut sampled = tokens.iter();
    for (at, row) in plan.logits.iter().enumerate() {
        let token = if row.sample { sampled.next() } else { None };
        let next = row.score.map(|score| score.next.or(token.copied()));
        // Rows that are discarded have no request.
        if let (Some(Some(next)), Some(number)) = (next, scheduler.drawing(row.sequence)) {
            memory::push(&mut wanted, (at, row, next, number), Purpose::Draws)?;
        }
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    if logits.len() != plan.logits.len() * vocab {
        let why = format!(
            "a step with {} rows to score gave {} logits",
            plan.logits.len(),
            logits.len()
        );
        return Err(Error::Internal(why));
    }
    let of_row = |&(at, row, next, number): &(usize, &LogitsRow, u32, usize)| {
        let top = row.score.map_or(0, |score| score.top);
        Ok(Scored {
            number,
            in_prompt: row.score.and_then(|score| score.next).map(|_| row.position + 1),
            score: score_of(&logits[at * vocab..][..vocab], next, top)?,
        })
    };
    pool.install(|| wanted.par_iter().map(of_row).collect())
}

/// The log-probability of `token`, and the `top` most probable tokens with theirs. In float64, so that only the result is
/// rounded.
fn score_of(logits: &[f32], token: u32, top: usize) -> Result<Score> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| (f64::from(logit) - f64::from(largest)).exp())
        .sum();
    let of_sum = sum.ln();
    let logit = |token: u32| f64::from(logits.get(token as usize).copied().unwrap_or(f32::NAN));
    let logprob = |token: u32| (logit(token) - f64::from(largest) - of_sum) as f32;
    let mut best: Vec<u32> = memory::room(top + 1, Purpose::Draws)?;
    let before = |a: u32, b: u32| logits[a as usize] > logits[b as usize];
    for id in 0..logits.len() as u32 {
        if best.len() == top && best.last().is_none_or(|&last| !before(id, last)) {
            continue;
        }
        let place = best.partition_point(|&other| !before(id, other));
        best.insert(place, id);
        best.truncate(top);
    }
    Ok(Score {
        token,
        logprob: logprob(token),
        top: memory::collect(best.into_iter().map(|id| (id, logprob(id))), Purpose::Draws)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_the_log_softmax_and_equal_ones_go_by_id() {
        let logits = [1.0, 3.0, -2.0, 3.0, 0.5];
        let sum: f64 = logits.iter().map(|&logit: &f32| f64::from(logit).exp()).sum();
        let expected = |id: usize| (f64::from(logits[id]) - sum.ln()) as f32;
        let score = score_of(&logits, 2, 3).unwrap();
        assert_eq!((score.token, score.logprob), (2, expected(2)));
        assert_eq!(score.top, [1, 3, 0].map(|id| (id as u32, expected(id))));
        assert_eq!(score_of(&logits, 1, 0).unwrap().top, []);
        assert_eq!(score_of(&logits, 1, 9).unwrap().top.len(), 5);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let score = score_of(&[1e30, -1e30, 1e30], 0, 1).unwrap();
        assert_eq!(score.logprob, -std::f32::consts::LN_2);
        let score = score_of(&[f32::NEG_INFINITY, 0.0], 0, 2).unwrap();
        assert_eq!(score.top, [(1, 0.0), (0, f32::NEG_INFINITY)]);
        assert!(score_of(&[f32::NAN, 0.0], 1, 1).unwrap().logprob.is_nan());
    }
}

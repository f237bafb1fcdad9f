//! Log-probabilities of tokens, from a step's logits or from what a device has found in them.

use super::in_flight::InFlight;
use crate::batch::{FoundScore, StepOutput, StepPlan};
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

/// A row to be scored.
struct RowToScore {
    /// Its place among the plan's logits rows.
    at: usize,
    /// The token behind it.
    next: u32,
    top: usize,
    number: usize,
    in_prompt: Option<usize>,
    /// Whether the device has found its score: not of a token that the host has sampled, nor of values that are not
    /// finite.
    is_found: bool,
}

impl RowToScore {
    /// With its score.
    fn scored(&self, score: Score) -> Scored {
        Scored {
            number: self.number,
            in_prompt: self.in_prompt,
            score,
        }
    }
}

/// Scores the rows of the step collected last that ask for it; `tokens` are those sampled. To be called before these
/// are committed.
pub fn score(
    pool: &ThreadPool,
    scheduler: &Scheduler,
    plan: &StepPlan,
    tokens: &[u32],
    in_flight: &mut InFlight,
    vocab: usize,
) -> Result<Vec<Scored>> {
    let mut wanted = Vec::new();
    let mut sampled = tokens.iter();
    for (at, row) in plan.logits.iter().enumerate() {
        let token = if row.sample { sampled.next() } else { None };
        let Some(score) = row.score else { continue };
        // Rows that are discarded have no request.
        if let (Some(next), Some(number)) = (score.next.or(token.copied()), scheduler.drawing(row.slot)) {
            let in_prompt = score.next.map(|_| row.position + 1);
            let found = in_flight.output.scores.get(at);
            let row = RowToScore {
                at,
                next,
                top: score.top,
                number,
                in_prompt,
                is_found: found.is_some_and(|found| found.token == next && !found.sum.is_nan()),
            };
            memory::push(&mut wanted, row, Purpose::Draws)?;
        }
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let rows = plan.logits.len();
    let has_all = in_flight.output.logits.len() == rows * vocab;
    let mut left = memory::room(wanted.len(), Purpose::Draws)?;
    left.extend(wanted.iter().filter(|row| !row.is_found));
    if !has_all && in_flight.output.scores.len() != rows {
        return Err(too_few(rows, in_flight.output.logits.len()));
    }
    if !has_all && !left.is_empty() {
        let rows = memory::collect(left.iter().map(|row| row.at), Purpose::Draws)?;
        in_flight.fetch(&rows)?;
        if in_flight.output.logits.len() != rows.len() * vocab {
            return Err(too_few(rows.len(), in_flight.output.logits.len()));
        }
    }
    let StepOutput { logits, scores, .. } = &in_flight.output;
    let of_row = |(place, row): (usize, &&RowToScore)| {
        // What is fetched lies in the order of what is left.
        let at = if has_all { row.at } else { place };
        score_of(&logits[at * vocab..][..vocab], row.next, row.top)
    };
    let by_host: Vec<Score> = pool.install(|| left.par_iter().enumerate().map(of_row).collect::<Result<_>>())?;
    let mut by_host = by_host.into_iter();
    let scored = wanted.iter().map(|row| {
        let score = match row.is_found {
            true => score_found(&scores[row.at], row.top.min(vocab))?,
            false => by_host.next().ok_or_else(|| too_few(rows, logits.len()))?,
        };
        Ok(row.scored(score))
    });
    memory::try_collect(scored, Purpose::Draws)
}

fn too_few(rows: usize, logits: usize) -> Error {
    Error::Internal(format!("a step with {rows} rows to score gave {logits} logits"))
}

/// The score of a row from what a device has found in it, with `top` of its most probable tokens. In float64, but for
/// the device's exponentials.
fn score_found(found: &FoundScore, top: usize) -> Result<Score> {
    let of_sum = found.sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - f64::from(found.largest) - of_sum) as f32;
    Ok(Score {
        token: found.token,
        logprob: logprob(found.logit),
        top: memory::collect(
            found.top[..top].iter().map(|&(id, logit)| (id, logprob(logit))),
            Purpose::Draws,
        )?,
    })
}

/// The log-probability of `token`, and the `top` most probable tokens with theirs. In float64, so that only the result
/// is rounded.
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

//! Values that are infinite or NaN.

use crate::tensors::Field;

/// Values that are infinite or NaN, and mean nothing.
#[derive(Clone, Copy, Debug)]
pub struct NonFinite {
    /// Number of such values.
    pub count: usize,
    /// The matrix of the first one.
    pub matrix: usize,
    /// The row of the first one.
    pub row: usize,
    /// The column of the first one.
    pub col: usize,
    /// The first one.
    pub value: f32,
}

impl NonFinite {
    /// Finds them in rows of `cols` values. Rows are counted from 0, in matrix 0.
    #[inline(always)]
    pub fn find(values: &[f32], cols: usize) -> Option<Self> {
        // Nearly always there are none, and this is faster than a search.
        let bad = values.iter().fold(false, |bad, v| bad | !v.is_finite());
        bad.then(|| Self::search(values, cols, |value| !value.is_finite()))
            .flatten()
    }

    /// Finds them in `count` vectors of equal length, stored one after the other in an array. Each vector counts as a
    /// matrix. A sink of -inf does not count: it weighs nothing, so that its head attends as if there were none.
    pub fn of_vectors(array: Field, values: &[f32], count: usize) -> Option<Self> {
        let no_sink = |value: f32| array == Field::AttnSinks && value == f32::NEG_INFINITY;
        let cols = values.len() / count.max(1);
        let found = Self::search(values, cols, |value| !value.is_finite() && !no_sink(value))?;
        Some(Self {
            matrix: found.row,
            row: 0,
            ..found
        })
    }

    #[inline(always)]
    fn search(values: &[f32], cols: usize, is_bad: impl Fn(f32) -> bool) -> Option<Self> {
        let first = values.iter().position(|&value| is_bad(value))?;
        Some(Self {
            count: values.iter().filter(|&&value| is_bad(value)).count(),
            matrix: 0,
            row: first / cols,
            col: first % cols,
            value: values[first],
        })
    }

    /// Combines the findings of two parts of a tensor.
    pub fn merge(a: Option<Self>, b: Option<Self>) -> Option<Self> {
        let (Some(a), Some(b)) = (a, b) else { return a.or(b) };
        let first = if b.place() < a.place() { b } else { a };
        Some(Self {
            count: a.count + b.count,
            ..first
        })
    }

    fn place(&self) -> [usize; 3] {
        [self.matrix, self.row, self.col]
    }
}

// The order in which decode attention adds a row's keys, whichever block has which of them: units of 128 keys are
// folded into groups of 4, groups into spans of 4, and spans into the row's result, each one into those before it, by
// absolute position (ATTENTION_UNIT, ATTENTION_GROUP and ATTENTION_SPAN in args.h). The first group and span may lack
// their first units, the last ones their last.
//
// A family says what a sum is and how two are folded:
//   fold(a, b)           a becomes the fold of a and b, b's keys behind a's
//   fold_kept(a, from)   the same with a sum before a, which keep() has left there
//   keep(to, a)          leaves a sum where the wave finds it again
#pragma once
#include "gpu/gpu.h"

// Whether `unit`'s run of `run` units is the first of the larger run, of `whole` units, that it is folded into. The row
// begins at unit `first`.
DEV bool begins(int unit, int first, int run, int whole) {
  return unit / run == first / run || unit / run % (whole / run) == 0;
}
// Whether it ends with `unit`; `last`: whether that is the last one there is.
DEV bool ends(int unit, int run, bool last) { return last || (unit + 1) % run == 0; }

// Folds sums of runs of `run` units, a unit, group or span each, in their order.
template <class Sums> struct Tree {
  Sums group, span, total;
  int first;                             // the first unit

  // `unit`: the run's last one; `last`: whether that is the last one there is.
  DEV void add(const Sums& sum, int unit, int run, bool last) {
    if (run > 1 || begins(unit, first, 1, ATTENTION_GROUP)) group = sum;
    else fold(group, sum);
    if (!ends(unit, ATTENTION_GROUP, last)) return;
    if (run > ATTENTION_GROUP || begins(unit, first, ATTENTION_GROUP, ATTENTION_SPAN)) span = group;
    else fold(span, group);
    if (ends(unit, ATTENTION_SPAN, last)) add_span(span, unit);
  }

  // The same for the sums of four runs one behind the other: four spans, the four groups of a span, or the four units
  // of a group. Their folds have no branch between them, so that one's exponentials do not wait for the one before.
  // `unit`, `last`: of the fourth.
  DEV void add_four(const Sums (&sums)[4], int unit, int run, bool last) {
    if (run == ATTENTION_SPAN) {
      add_span(sums[0], unit - 3 * ATTENTION_SPAN);
      fold(total, sums[1]), fold(total, sums[2]), fold(total, sums[3]);
      return;
    }
    Sums whole = sums[0];
    fold(whole, sums[1]), fold(whole, sums[2]), fold(whole, sums[3]);
    if (run == ATTENTION_GROUP) add_span(whole, unit);
    else add(whole, unit, ATTENTION_GROUP, last);
  }

  // The sum of all that the row has of a span; `unit` is one of its units.
  DEV void add_span(const Sums& sum, int unit) {
    if (unit / ATTENTION_SPAN == first / ATTENTION_SPAN) total = sum;
    else fold(total, sum);
  }
};

// The same for a wave that adds units one by one and has registers for one sum beside the unit's. That of a span's
// groups, and that of the spans before it, are kept at `span` and `total`. With the last unit `sum` is the sum of all.
template <class Sums>
DEV void add_unit(Sums& sum, const Sums& of_unit, int unit, int first, bool last, float* span, float* total) {
  if (begins(unit, first, 1, ATTENTION_GROUP)) sum = of_unit;
  else fold(sum, of_unit);
  if (!ends(unit, ATTENTION_GROUP, last)) return;
  if (!begins(unit, first, ATTENTION_GROUP, ATTENTION_SPAN)) fold_kept(sum, span);
  const bool span_ends = ends(unit, ATTENTION_SPAN, last);
  if (span_ends && unit / ATTENTION_SPAN != first / ATTENTION_SPAN) fold_kept(sum, total);
  if (!last) keep(span_ends ? total : span, sum);
}

// A row whose units several blocks have: each adds a part, a run of `run` units, and the last one to finish folds the
// parts' sums. The number of the part that has `unit`, and the last unit of part `part`.
DEV int part_of(int unit, int first, int run) { return unit / run - first / run; }
DEV int last_of_part(int part, int first, int last, int run) {
  const int end = (first / run + part + 1) * run - 1;
  return end < last ? end : last;
}

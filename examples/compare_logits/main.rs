//! Compares two files of logits, each written by GETP_LOGITS or lines of text as the evaluation program's checkers
//! print.
//!
//! Two runs may answer in any order, so records are matched by request and position, and read one at a time: the
//! files may be larger than memory. Lines of text hold some logits of some positions and do not say which; see
//! `--positions` and `--tokens`. Exit status: 0 if every record of either file is in the other and all logits agree, 1
//! if not, 2 if the files cannot be compared.

mod source;

use clap::Parser;
use getp::error::{Error, Result};
use source::{Pairs, Place, Source};
use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compares the logits of two runs; B is the reference. Each is a file that GETP_LOGITS wrote or lines of text.
#[derive(Parser)]
struct Arguments {
    /// The logits to judge.
    a: PathBuf,
    /// The reference.
    b: PathBuf,
    /// Absolute tolerance: logits agree if |a - b| <= atol + rtol * |b|.
    #[arg(long, default_value_t = 1e-5)]
    atol: f64,
    /// Relative tolerance.
    #[arg(long, default_value_t = 1e-4)]
    rtol: f64,
    /// A text has a line for every so many positions of each request, from 0.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    positions: u32,
    /// A line of text has the logits of every so many tokens, from 0.
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match compare(&arguments) {
        Ok(report) => {
            let printed = std::io::stdout().write_all(report.text(&arguments).as_bytes());
            ExitCode::from(if printed.is_err() {
                2
            } else {
                u8::from(!report.agrees())
            })
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "compare_logits: {error}");
            ExitCode::from(2)
        }
    }
}

/// A logit, and its values in the two files.
struct Mismatch {
    place: Place,
    index: usize,
    a: f32,
    b: f32,
}

/// Sums over all records compared.
#[derive(Default)]
struct Report {
    records: usize,
    only_a: usize,
    only_b: usize,
    other_token: usize,
    mismatches: usize,
    first: Option<Mismatch>,
    max_abs: f64,
    max_rel: f64,
    max_ratio: f64,
    same_top: usize,
    /// Each record's divergence.
    kl: Vec<(f64, Place)>,
    /// The logits compared are those of every so many tokens.
    tokens: usize,
}

fn compare(arguments: &Arguments) -> Result<Report> {
    let (mut a, mut b) = (Source::open(&arguments.a)?, Source::open(&arguments.b)?);
    let text = a.is_text() || b.is_text();
    let tokens = if text { arguments.tokens as usize } else { 1 };
    if a.width(tokens) != b.width(tokens) {
        let of = |source: &Source| source.width(tokens);
        let why = format!("it has {} logits a record, the other {}", of(&a), of(&b));
        return Err(Error::format(arguments.a.display().to_string(), why));
    }
    let pairs = Pairs::new(&a, &b, arguments.positions);
    let mut report = Report {
        only_a: pairs.only_a,
        only_b: pairs.only_b,
        other_token: pairs.other_token,
        tokens,
        ..Report::default()
    };
    let (mut row_a, mut row_b) = (Vec::new(), Vec::new());
    for (place, at_a, at_b) in pairs.rows {
        a.read(at_a, tokens, &mut row_a)?;
        b.read(at_b, tokens, &mut row_b)?;
        report.add(arguments, place, &row_a, &row_b);
    }
    Ok(report)
}

impl Report {
    fn add(&mut self, arguments: &Arguments, place: Place, row_a: &[f32], row_b: &[f32]) {
        self.records += 1;
        for (at, (&a, &b)) in row_a.iter().zip(row_b).enumerate() {
            let index = at * self.tokens;
            self.add_logit(arguments, Mismatch { place, index, a, b });
        }
        self.same_top += usize::from(getp::sampler::argmax(row_a) == getp::sampler::argmax(row_b));
        self.kl.push((kl_divergence(row_b, row_a), place));
    }

    fn add_logit(&mut self, arguments: &Arguments, logit: Mismatch) {
        let (a, b) = (f64::from(logit.a), f64::from(logit.b));
        // Equal infinities agree; their difference would be NaN. NaN agrees with nothing.
        let abs = if a == b { 0.0 } else { (a - b).abs() };
        let allowed = arguments.atol + arguments.rtol * b.abs();
        let agrees = a == b || abs <= allowed && allowed.is_finite();
        self.max_abs = largest(self.max_abs, abs);
        self.max_rel = largest(self.max_rel, if abs == 0.0 { 0.0 } else { abs / b.abs() });
        self.max_ratio = largest(self.max_ratio, if abs == 0.0 { 0.0 } else { abs / allowed });
        if !agrees {
            self.mismatches += 1;
            self.first.get_or_insert(logit);
        }
    }

    fn agrees(&self) -> bool {
        self.mismatches == 0 && self.only_a == 0 && self.only_b == 0 && self.other_token == 0
    }

    /// Mean, median and largest divergence of a record. The mean is often that of a few records, in which a token was
    /// routed to another expert.
    fn divergence(&self) -> Vec<String> {
        let mut kl = self.kl.clone();
        kl.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(&(largest, place)) = kl.last() else {
            return Vec::new();
        };
        let mean = kl.iter().map(|(kl, _)| kl).sum::<f64>() / kl.len() as f64;
        let found = format!("{largest:.6e} nats: {place}");
        vec![
            line("mean KL(B||A)", format_args!("{mean:.6e} nats")),
            line("median KL(B||A)", format_args!("{:.6e} nats", kl[kl.len() / 2].0)),
            line("largest KL(B||A)", found),
        ]
    }

    fn text(&self, arguments: &Arguments) -> String {
        let per_record = |sum: f64| sum / self.records.max(1) as f64;
        let mut lines = vec![
            line("records compared", self.records),
            line("records only in A", self.only_a),
            line("records only in B", self.only_b),
            line("records of other tokens", self.other_token),
            line("max |a-b|", format_args!("{:.6e}", self.max_abs)),
            line("max |a-b|/|b|", format_args!("{:.6e}", self.max_rel)),
            line("max |a-b|/(atol+rtol|b|)", format_args!("{:.6e}", self.max_ratio)),
            line(
                "top-1 agreement",
                format_args!("{:.4} %", 100.0 * per_record(self.same_top as f64)),
            ),
        ];
        lines.extend(self.divergence());
        lines.push(line(
            "tolerance",
            format_args!("atol {:e}, rtol {:e}", arguments.atol, arguments.rtol),
        ));
        lines.push(line("logits outside it", self.mismatches));
        if let Some(Mismatch { place, index, a, b }) = &self.first {
            let found = format!("{place}, index {index}: a {a:e}, b {b:e}");
            lines.push(line("first of them", found));
        }
        if self.tokens > 1 {
            lines.push(line(
                "compared",
                format_args!("the logits of every {}th token", self.tokens),
            ));
        }
        lines.push(if self.agrees() { "agree" } else { "DIFFER" }.into());
        lines.join("\n") + "\n"
    }
}

fn line(name: &str, value: impl Display) -> String {
    format!("{name:<26}{value}")
}

/// The larger one; NaN is larger than all, so that it is seen.
fn largest(so_far: f64, value: f64) -> f64 {
    if so_far.is_nan() || value.is_nan() {
        f64::NAN
    } else {
        so_far.max(value)
    }
}

/// The divergence of the distribution behind `q` from that behind `p`, in nats.
fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let (norm_p, norm_q) = (log_sum_exp(p), log_sum_exp(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (log_p, log_q) = (f64::from(p) - norm_p, f64::from(q) - norm_q);
        // A token of probability 0 in p adds nothing, whatever its probability in q.
        if log_p == f64::NEG_INFINITY {
            0.0
        } else {
            log_p.exp() * (log_p - log_q)
        }
    });
    terms.sum()
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum();
    f64::from(max) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use getp::logits::{LogitsWriter, RecordKey};
    use tempfile::NamedTempFile;

    type Record<'a> = (u32, u32, u32, &'a [f32]);

    fn file(records: &[Record<'_>]) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        let mut writer = LogitsWriter::create(file.path(), 3).unwrap();
        for &(request, position, token, logits) in records {
            writer.write(RecordKey { request, position }, token, logits).unwrap();
        }
        writer.finish().unwrap();
        file
    }

    fn text(lines: &str) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines).unwrap();
        file
    }

    /// Compares two files; a text has every second token of every third position.
    fn compared(a: &NamedTempFile, b: &NamedTempFile) -> Result<Report> {
        compare(&Arguments {
            a: a.path().into(),
            b: b.path().into(),
            atol: 1e-5,
            rtol: 1e-4,
            positions: 3,
            tokens: 2,
        })
    }

    fn report(a: &[Record<'_>], b: &[Record<'_>]) -> Report {
        compared(&file(a), &file(b)).unwrap()
    }

    const X: &[f32] = &[1.0, 3.0, 2.0];

    #[test]
    fn the_order_of_records_does_not_matter() {
        let report = report(
            &[(0, 0, 5, X), (1, 0, 6, &[0.0; 3])],
            &[(1, 0, 6, &[0.0; 3]), (0, 0, 5, X)],
        );
        assert!(report.agrees());
        assert_eq!((report.records, report.max_abs, report.same_top), (2, 0.0, 2));
        assert!(report.kl.iter().all(|(kl, _)| kl.abs() < 1e-12));
    }

    #[test]
    fn the_first_mismatch_is_named() {
        let near = &[1.0, 3.0001, 2.0];
        let far = &[1.0, 3.0, 4.0];
        let report = report(&[(1, 1, 5, far), (1, 0, 5, near)], &[(1, 0, 5, X), (1, 1, 5, X)]);
        assert!(!report.agrees());
        assert_eq!((report.mismatches, report.same_top, report.max_abs), (1, 1, 2.0));
        let first = report.first.unwrap();
        assert_eq!((first.index, first.a, first.b), (2, 4.0, 2.0));
        assert_eq!(first.place.to_string(), "request 1, position 1");
        assert!((report.max_ratio - 2.0 / (1e-5 + 2e-4)).abs() < 1e-3);
        assert!(report.kl.iter().map(|(kl, _)| kl).sum::<f64>() > 0.1);
    }

    #[test]
    fn records_of_one_file_only_are_counted() {
        let report = report(
            &[(0, 0, 5, X), (0, 1, 5, X)],
            &[(0, 0, 6, X), (2, 0, 5, X), (3, 0, 5, X)],
        );
        assert_eq!(
            (report.only_a, report.only_b, report.other_token, report.mismatches),
            (1, 2, 1, 0)
        );
        assert!(!report.agrees());
    }

    #[test]
    fn nan_agrees_with_nothing_and_equal_infinities_do() {
        const INF: f32 = f32::INFINITY;
        assert!(report(&[(0, 0, 5, &[-INF, 1.0, 2.0])], &[(0, 0, 5, &[-INF, 1.0, 2.0])]).agrees());
        let wrong = report(&[(0, 0, 5, &[f32::NAN, 1.0, 2.0])], &[(0, 0, 5, &[-INF, 1.0, 2.0])]);
        assert!(!wrong.agrees() && wrong.max_abs.is_nan());
        assert!(!report(&[(0, 0, 5, &[1.0, 1.0, 2.0])], &[(0, 0, 5, &[-INF, 1.0, 2.0])]).agrees());
    }
    /// Two requests, out of order, with positions that a text leaves out.
    fn recorded() -> NamedTempFile {
        file(&[
            (1, 0, 5, &[5.0, 0.0, 6.5]),
            (0, 3, 5, &[3.0, 0.0, -4.0]),
            (0, 2, 5, &[0.0; 3]),
            (0, 0, 5, &[1.0, 0.0, 2.0]),
        ])
    }

    #[test]
    fn lines_are_the_records_at_their_strides() {
        let lines = text("1 2 \n3 -4 \n5 6.5 \n");
        for report in [
            compared(&recorded(), &lines),
            compared(&lines, &recorded()),
            compared(&lines, &text("1e0 2\r\n\n3 -4\n5 6.5")),
        ] {
            let report = report.unwrap();
            assert!(report.agrees() && report.records == 3 && report.same_top == 3);
        }
    }

    #[test]
    fn a_wrong_number_in_a_line_is_named() {
        let report = compared(&recorded(), &text("1 2\n3 -4.1\n5 6.5\n")).unwrap();
        let first = report.first.unwrap();
        assert_eq!(
            (first.place.to_string(), first.index),
            ("request 0, position 3".into(), 2)
        );
        let report = compared(&text("1 2\n3 4\n"), &text("1 2\n3 5\n")).unwrap();
        assert_eq!(report.first.unwrap().place.to_string(), "line 2");
    }

    #[test]
    fn lines_too_few_and_too_many_are_counted() {
        let few = compared(&recorded(), &text("1 2\n3 -4\n")).unwrap();
        let many = compared(&recorded(), &text("1 2\n3 -4\n5 6.5\n7 8\n")).unwrap();
        assert_eq!((few.only_a, few.only_b, few.agrees()), (1, 0, false));
        assert_eq!((many.only_a, many.only_b, many.agrees()), (0, 1, false));
    }

    #[test]
    fn texts_that_cannot_be_compared_are_refused() {
        for (lines, why) in [
            ("", "it is an empty file"),
            ("GETPLOG2 1 2", "line 1 is not made of numbers"),
            ("1 2\n3\n", "line 2 has 1 logits, those before it 2"),
            ("1 2 3\n", "it has 2 logits a record, the other 3"),
        ] {
            let error = compared(&recorded(), &text(lines)).err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}

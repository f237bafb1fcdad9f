//! kernels/args.h: the tables of `backend::gpu::args` as C++.

#[path = "../../build_support/fingerprint.rs"]
mod fingerprint;

use getp::backend::gpu::args::{CONSTANTS, FORMATS, FORMATS_DOCS, STRUCTS};
use getp::backend::gpu::layout::{CType, Number, Struct, StructField};
use std::fmt::Write;

/// The longest line.
const WIDTH: usize = 120;

/// The header that `source`, the text of args.rs, gives.
pub fn header(source: &str) -> String {
    let mut out = String::new();
    for line in introduction(source) {
        line_of(&mut out, format!("// {line}").trim_end());
    }
    line_of(&mut out, "//");
    line_of(
        &mut out,
        &format!(
            "// Made from src/backend/gpu/args.rs (fingerprint {:016x}) by the test `kernels_header_is_current`;\n\
             // do not edit. GETP_BLESS=1 cargo test --test header",
            fingerprint::of(source)
        ),
    );
    line_of(&mut out, "#pragma once\n");
    constants(&mut out);
    formats(&mut out);
    for of in STRUCTS {
        structure(&mut out, of);
    }
    layouts(&mut out);
    out
}

fn line_of(out: &mut String, line: &str) {
    out.push_str(line);
    out.push('\n');
}

/// The comment at the top of the file, without the fences around what is not to be wrapped.
fn introduction(source: &str) -> impl Iterator<Item = &str> {
    source
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .filter(|line| !line.starts_with("```"))
}

/// The words of a comment in lines of at most `width`.
fn wrapped(docs: &[&str], width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in plain(&docs.join(" ")).split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

/// Without the backticks that keep rustdoc from reading `[rows][k]` as a link; those around names stay.
fn plain(text: &str) -> String {
    let is_name = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let parts = text.split('`').enumerate();
    let part = |(at, part): (usize, &str)| match at % 2 {
        1 if is_name(part) => format!("`{part}`"),
        _ => part.into(),
    };
    parts.map(part).collect()
}

/// Lines with their comments behind them, all in one column.
fn commented(out: &mut String, lines: &[(String, &[&str])]) {
    let with_comments = lines.iter().filter(|(_, docs)| !docs.is_empty());
    let column = 2 + with_comments.map(|(line, _)| line.len()).max().unwrap_or(0) + 2;
    for (line, docs) in lines {
        let mut comment = wrapped(docs, WIDTH - column - 3).into_iter();
        let first = comment.next().map_or_else(String::new, |first| format!("// {first}"));
        line_of(out, format!("  {line:<at$}{first}", at = column - 2).trim_end());
        for more in comment {
            line_of(out, &format!("{:column$}// {more}", ""));
        }
    }
}

fn numbers(numbers: &'static [Number], name: impl Fn(&str) -> String) -> Vec<(String, &'static [&'static str])> {
    let line = |n: &'static Number| (format!("{} = {},", name(n.name), n.value), n.docs);
    numbers.iter().map(line).collect()
}

fn constants(out: &mut String) {
    line_of(out, "enum : int {");
    commented(out, &numbers(CONSTANTS, str::to_owned));
    line_of(out, "};\n");
}

fn formats(out: &mut String) {
    comment(out, FORMATS_DOCS);
    line_of(out, "enum : int {");
    commented(out, &numbers(FORMATS, |name| format!("FORMAT_{}", name.to_uppercase())));
    line_of(out, "};\n");
}

fn comment(out: &mut String, docs: &[&str]) {
    for line in wrapped(docs, WIDTH - 3) {
        line_of(out, &format!("// {line}"));
    }
}

fn structure(out: &mut String, of: &Struct) {
    comment(out, of.docs);
    line_of(out, &format!("struct {} {{", of.name));
    let field = |field: &StructField| (format!("{};", declaration(&field.c, field.name)), field.docs);
    commented(out, &of.fields.iter().map(field).collect::<Vec<_>>());
    line_of(out, "};\n");
}

/// `const float* name`, `unsigned name[3]`.
fn declaration(c: &CType, name: &str) -> String {
    match c {
        CType::Array { of, length } => format!("{}[{length}]", declaration(of, name)),
        c => format!("{} {name}", type_name(c)),
    }
}

fn type_name(c: &CType) -> String {
    match c {
        CType::Named(name) => (*name).into(),
        CType::Pointer { to, mutable: true } => format!("{}*", type_name(to)),
        CType::Pointer { to, mutable: false } => format!("const {}*", type_name(to)),
        CType::Array { .. } => panic!("C++ has no array in this place"),
    }
}

/// Sizes and offsets as the host has them.
fn layouts(out: &mut String) {
    out.push_str(
        "// Where the host has all of it.\n\
         #define SIZE(Struct, bytes) static_assert(sizeof(Struct) == bytes, \"the host has another size\");\n\
         #define AT(Struct, field, bytes) \\\n  \
           static_assert(__builtin_offsetof(Struct, field) == bytes, \"the host has it elsewhere\");\n",
    );
    for of in STRUCTS {
        let mut line = format!("SIZE({}, {})", of.name, of.bytes);
        for field in of.fields {
            let assertion = format!("AT({}, {}, {})", of.name, field.name, field.offset);
            if line.len() + 1 + assertion.len() > WIDTH {
                line_of(out, &line);
                line = format!("  {assertion}");
            } else {
                write!(line, " {assertion}").unwrap();
            }
        }
        line_of(out, &line);
    }
    out.push_str("#undef SIZE\n#undef AT\n");
}

#[test]
fn words_are_wrapped_and_only_names_keep_backticks() {
    assert_eq!(wrapped(&[" one `two`", " `[k]` four"], 9), ["one `two`", "[k] four"]);
    assert!(wrapped(&[], 9).is_empty());
}

#[test]
fn types_read_as_in_cpp() {
    const FLOAT: CType = CType::Named("float");
    const POINTER: CType = CType::Pointer {
        to: &FLOAT,
        mutable: false,
    };
    let array = CType::Array {
        of: &POINTER,
        length: 2,
    };
    assert_eq!(declaration(&array, "host"), "const float* host[2]");
}

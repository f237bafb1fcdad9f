//! What the build makes of a family's catalogue, for the compilers: the products' kernels, and `catalogue.h` for those
//! that are written out.

use super::catalogue::{Elements, Kernel, Limit, PackedFormat, Parameters, Source, Table};
use super::files;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// A family's sources.
pub struct Sources {
    /// The folder of its `catalogue.h`, for `-I`.
    pub include: PathBuf,
    /// All files with kernels, made ones among them.
    pub files: Vec<PathBuf>,
}

/// Writes what is made into cargo's folder.
pub fn sources(family: &Table) -> Sources {
    let include = files::out_dir().join("kernels").join(family.name);
    fs::create_dir_all(&include).expect("OUT_DIR can be written");
    write(&include.join("catalogue.h"), &header(family));
    let mut made = BTreeMap::<&str, String>::new();
    for kernel in family.kernels {
        if let Source::Made { maker, parameters } = kernel.source {
            let text = made.entry(kernel.file).or_insert_with(|| first_lines(family));
            check_macro(family, maker, &parameters);
            *text += &line(kernel, maker, &parameters);
        }
    }
    let mut files = files::sources(&["kernels", &format!("kernels/{}", family.name)]);
    for (file, text) in &made {
        let path = files::out_dir().join("kernels").join(file);
        write(&path, text);
        files.push(path);
    }
    Sources { include, files }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("OUT_DIR can be written");
}

fn first_lines(family: &Table) -> String {
    let name = family.name;
    format!("// Made from kernels/{name}/catalogue.rs by the build.\n#include \"{name}/gemm.h\"\n\n")
}

/// The macro's own parameters, behind what all makers take, are those that the catalogue names.
fn check_macro(family: &Table, maker: &str, parameters: &Parameters) {
    let path = format!("kernels/{}/gemm.h", family.name);
    let text = fs::read_to_string(&path).expect("a family has gemm.h");
    let (_, behind) = text
        .split_once(&format!("#define {maker}("))
        .unwrap_or_else(|| panic!("{path} has no macro {maker}"));
    let (all, _) = behind.split_once(')').expect("a macro's parameters end");
    let (_, own) = all.split_once("MOST_ROWS").expect("all makers take MOST_ROWS");
    let own = own.split([',', '\\', ' ', '\n']).filter(|name| !name.is_empty());
    let named = parameters.list().map(|(name, _)| name);
    assert!(
        own.eq(named),
        "{path}: {maker} takes other parameters than the catalogue names"
    );
}

fn line(kernel: &Kernel, maker: &str, parameters: &Parameters) -> String {
    let weights = match kernel.weights.expect("a product has weights") {
        PackedFormat::W16 => "W16",
        PackedFormat::Mxfp4 => "Mxfp4",
    };
    let elements = match kernel.elements.expect("a product has activations") {
        Elements::F16 => "FORMAT_F16",
        Elements::Bf16 => "FORMAT_BF16",
        Elements::F32 => "FORMAT_F32",
    };
    let Kernel {
        op,
        threads,
        shared_bytes,
        terms,
        tokens,
        most_rows,
        ..
    } = kernel;
    let name = kernel.name();
    let mut line = format!(
        "{maker}({name}, {threads}, {shared_bytes}, {op:?}, {weights}, {elements}, {terms}, {tokens}, {}",
        most_rows.unwrap_or(0)
    );
    for (_, value) in parameters.list() {
        line += &format!(", {value}");
    }
    line + ")\n"
}

/// Threads, shared memory, rows and limits, by the kernels' file where all of it have the same, else by operation and
/// variant.
fn header(family: &Table) -> String {
    let mut files = BTreeMap::<&str, Vec<&Kernel>>::new();
    for kernel in family.kernels {
        // What products can take stands in the header that makes them.
        let file = match kernel.source {
            Source::Written => kernel.file,
            Source::Made { .. } => "gemm",
        };
        files.entry(file).or_default().push(kernel);
    }
    let mut text = format!(
        "// Made from kernels/catalogue.rs and kernels/{}/catalogue.rs by the build.\n#pragma once\n\
         #include \"gpu/gpu.h\"\n\nstatic_assert(WAVE == {} && TERM_SHIFT == {}, \"as the table says\");\n\n\
         enum : int {{\n  CUTS_EXPERTS = {},\n",
        family.name,
        family.wave,
        family.term_shift,
        u8::from(family.cuts_experts)
    );
    if let Some(sums) = family.exact_sums {
        constant(&mut text, "slabs", "CHAINED", sums.chained);
        constant(&mut text, "slabs", "TOGETHER", sums.together);
    }
    for (file, kernels) in files {
        let stem = file.rsplit('/').next().and_then(|name| name.split('.').next());
        let stem = stem.expect("a file has a name");
        for (what, of) in FACTS {
            let values: Vec<usize> = kernels.iter().map(|kernel| of(kernel)).collect();
            if values.iter().all(|&value| value == values[0]) {
                constant(&mut text, stem, what, values[0]);
                continue;
            }
            let mut named = BTreeMap::new();
            for (kernel, value) in kernels.iter().zip(values).filter(|_| stem != "gemm") {
                let name = format!("{}_{}", kernel.op.name(), kernel.variant);
                let other = named.insert(name.trim_end_matches('_').to_owned(), value);
                assert!(other.is_none_or(|other| other == value), "{name} has two {what}");
            }
            named
                .iter()
                .for_each(|(name, value)| constant(&mut text, name, what, *value));
        }
        for (what, value) in limits(&kernels) {
            constant(&mut text, stem, &what, value);
        }
    }
    text + "};\n"
}

type Fact = (&'static str, fn(&Kernel) -> usize);
const FACTS: [Fact; 5] = [
    ("THREADS", |kernel| kernel.threads),
    ("SHARED_BYTES", |kernel| kernel.shared_bytes),
    ("PER_BLOCK", |kernel| kernel.per_block),
    ("CLUSTER", |kernel| kernel.cluster),
    ("MOST_ROWS", |kernel| kernel.most_rows.unwrap_or(0)),
];

/// One that is 0 says nothing.
fn constant(text: &mut String, name: &str, what: &str, value: usize) {
    if value > 0 {
        writeln!(text, "  {}_{what} = {value},", name.to_uppercase()).expect("a String takes anything");
    }
}

/// A file's limits. Its kernels have the same.
fn limits(kernels: &[&Kernel]) -> Vec<(String, usize)> {
    let same = kernels.iter().all(|kernel| kernel.limits == kernels[0].limits);
    assert!(same, "{}: kernels of one file have one list of limits", kernels[0].file);
    let named = kernels[0].limits.iter().filter_map(|limit| match limit {
        Limit::AtMost(dimension, most) => Some((format!("MOST_{}", dimension.name()?), *most)),
        Limit::MultipleOf(dimension, of) => Some((format!("{}_MULTIPLE", dimension.name()?), *of)),
        Limit::Exactly(dimension, value) => Some((dimension.name()?.to_owned(), *value)),
    });
    named.collect()
}

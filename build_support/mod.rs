//! From `kernels/` to the table of code objects that `src/backend/gpu/code_objects.rs` includes.

mod cache;
#[allow(dead_code, reason = "some of it is for the host alone")]
#[path = "../kernels/catalogue.rs"]
mod catalogue;
mod compile;
mod cuda;
mod fingerprint;
mod header;
mod hip;
mod instances;
pub mod simt;

use catalogue::{FAMILIES, Toolchain, family_of};
use compile::{CodeObject, Compiler, Compilers};
use instances::Sources;
use std::env;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

/// Compiles what the features and the environment ask for and writes the table.
///
/// A toolchain that is missing is a warning: the library then runs on the CPU and says why. Architectures named in the
/// environment are meant: without code objects for them there is no build. A compiler named there is meant, too: it has to
/// compile for one architecture at least.
pub fn build_kernels() {
    println!("cargo::rerun-if-changed=kernels");
    // Whatever is compiled: kernels/cdna/mca.py reads them, too.
    for family in FAMILIES {
        instances::sources(family);
    }
    let mut objects = build::<hip::Hip>();
    objects.extend(build::<cuda::Cuda>());
    // Tests of code objects are ignored where there are none.
    println!("cargo::rustc-check-cfg=cfg(getp_code_objects, getp_amd_code_objects)");
    if !objects.is_empty() {
        println!("cargo::rustc-cfg=getp_code_objects");
    }
    if objects.iter().any(|object| object.arch.starts_with("gfx")) {
        println!("cargo::rustc-cfg=getp_amd_code_objects");
    }
    let table = table(&objects);
    fs::write(out_dir().join("code_objects.rs"), table).expect("OUT_DIR can be written");
}

fn build<T: Compilers>() -> Vec<CodeObject> {
    for name in [T::ARCHS_VARIABLE, T::COMPILER_VARIABLE, T::HOME_VARIABLE] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let asked = env::var(T::ARCHS_VARIABLE).ok().filter(|archs| !archs.is_empty());
    if asked.is_none() && env::var_os(T::FEATURE).is_none() {
        return Vec::new();
    }
    header::check();
    let archs = asked.clone().unwrap_or_else(|| default_archs(T::TOOLCHAIN));
    let named = env::var_os(T::COMPILER_VARIABLE);
    let compilers = match &named {
        Some(program) => Compiler::find(program).into_iter().collect(),
        None => T::compilers(),
    };
    let mut objects = Vec::new();
    let mut made = Vec::new();
    let mut with = Vec::new();
    let mut last_failure = String::new();
    for arch in archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()) {
        let built = sources_for(arch, T::TOOLCHAIN).and_then(|sources| {
            first_that_can(&compilers, |compiler| {
                compile::compile_all::<T>(compiler, arch, &sources)
            })
        });
        match built {
            Ok((compiler, built)) => {
                made.push(arch.to_owned());
                with.push(compiler.describe());
                objects.extend(built);
            }
            Err(why) if asked.is_some() => {
                eprintln!("{why}");
                println!(
                    "cargo::error={}={archs}: nothing for {arch}: {}",
                    T::ARCHS_VARIABLE,
                    first_line(&why)
                );
            }
            Err(why) => {
                made.push(format!("nothing for {arch} ({})", first_line(&why)));
                last_failure = why;
            }
        }
    }
    if let Some(program) = named.filter(|_| asked.is_none() && objects.is_empty()) {
        eprintln!("{last_failure}");
        println!(
            "cargo::error={}={} compiled no kernels: {}",
            T::COMPILER_VARIABLE,
            program.display(),
            first_line(&last_failure)
        );
    }
    with.dedup();
    let with = if with.is_empty() {
        String::new()
    } else {
        format!(", with {}", with.join(", "))
    };
    println!("cargo::warning={} kernels: {}{with}", T::NAME, made.join(", "));
    objects
}

/// Those of all the toolchain's families.
fn default_archs(toolchain: Toolchain) -> String {
    let mine = FAMILIES.iter().filter(|family| family.toolchain == toolchain);
    let archs: Vec<&str> = mine.flat_map(|family| family.architectures).copied().collect();
    archs.join(",")
}

fn sources_for(arch: &str, toolchain: Toolchain) -> Result<Sources, String> {
    let family = family_of(arch).filter(|family| family.toolchain == toolchain);
    let family = family.ok_or_else(|| format!("no family in kernels/catalogue.rs has {arch}"))?;
    Ok(instances::sources(family))
}

/// What the first compiler gives that compiles everything, or why the last one could not.
fn first_that_can(
    compilers: &[Compiler],
    compile: impl Fn(&Compiler) -> Result<Vec<CodeObject>, String>,
) -> Result<(&Compiler, Vec<CodeObject>), String> {
    let mut why = "no compiler found".to_owned();
    for compiler in compilers {
        match compile(compiler) {
            Ok(objects) => return Ok((compiler, objects)),
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// The line of a compiler's output that says most.
fn first_line(output: &str) -> &str {
    let mut lines = output.lines().filter(|line| !line.trim().is_empty());
    lines
        .clone()
        .find(|line| line.contains("error"))
        .or_else(|| lines.next())
        .unwrap_or_default()
}

fn table(objects: &[CodeObject]) -> String {
    let mut table = String::from("&[\n");
    for object in objects {
        let CodeObject { arch, file, path } = object;
        writeln!(
            table,
            "    CodeObject {{ arch: {arch:?}, file: {file:?}, image: &Aligned(*include_bytes!({path:?})).0 }},"
        )
        .expect("a String takes anything");
    }
    table + "]\n"
}

fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

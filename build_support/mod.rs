//! From `kernels/` to the table of code objects that `src/backend/gpu/code_objects.rs` includes.

mod cache;
#[allow(dead_code, reason = "some of it is for the host alone")]
#[path = "../kernels/catalogue.rs"]
mod catalogue;
mod compile;
mod compiler;
mod cuda;
mod files;
mod fingerprint;
mod header;
mod hip;
mod instances;
pub mod simt;

use catalogue::{TABLES, Table, Toolchain, platform_of, table_of};
use compile::CodeObject;
use compiler::{Compiler, Compilers};
use files::out_dir;
use std::env;
use std::fmt::Write;
use std::fs;

/// In place of architectures: a feature's host code without kernels.
const NO_ARCHS: &str = "none";

/// Compiles what the features and the environment ask for and writes the table.
///
/// What is asked for is meant. An architecture named in the environment has its code objects, or there is no build. A
/// feature asks for all that its families know: of these, one that no compiler here compiles anything for is left out
/// with a warning, unless nothing is left. Who wants a feature's host code alone says so: [`NO_ARCHS`].
pub fn build_kernels() {
    println!("cargo::rerun-if-changed=kernels");
    // Whatever is compiled: tools read them, too.
    for family in TABLES {
        instances::sources(family);
    }
    let mut objects = Vec::new();
    // What `getp_features` says. Cargo sets this in the environment of tests, too, where GETP_* are the users' options.
    let mut features = vec!["cpu".to_owned()];
    for (feature, built) in [
        (hip::Hip::FEATURE, build::<hip::Hip>()),
        (cuda::Cuda::FEATURE, build::<cuda::Cuda>()),
        ("CARGO_FEATURE_MPI", Vec::new()),
        ("CARGO_FEATURE_SIMT", Vec::new()),
        ("CARGO_FEATURE_TOKENIZER_JSON", Vec::new()),
    ] {
        features.extend(env::var_os(feature).map(|_| described(feature, &built)));
        objects.extend(built);
    }
    println!("cargo::rustc-env=FEATURES_OF_GETP={}", features.join(" "));
    // Tests of code objects are ignored where there are none.
    println!("cargo::rustc-check-cfg=cfg(getp_code_objects, getp_emulated_code_objects)");
    if !objects.is_empty() {
        println!("cargo::rustc-cfg=getp_code_objects");
    }
    let emulated = table_of(simt::DEVICE).map(|family| family.name);
    if objects.iter().any(|object| Some(object.family.name) == emulated) {
        println!("cargo::rustc-cfg=getp_emulated_code_objects");
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
    if asked.as_deref() == Some(NO_ARCHS) {
        println!("cargo::warning={} kernels: {}={NO_ARCHS}", T::NAME, T::ARCHS_VARIABLE);
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
    let mut failures = Vec::new();
    for arch in archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()) {
        let built = family_for(arch, T::TOOLCHAIN).and_then(|family| {
            let sources = instances::sources(family);
            first_that_can(&compilers, |compiler| {
                compile::compile_all::<T>(compiler, arch, family, &sources)
            })
        });
        match built {
            Ok((compiler, built)) => {
                made.push(arch.to_owned());
                with.push(compiler.describe());
                objects.extend(built);
            }
            Err(why) => failures.push((arch, why)),
        }
    }
    let left_out = |arch| asked.is_none() && !compilers.iter().any(|compiler| compile::knows::<T>(compiler, arch));
    if let (None, true, Some((_, why))) = (&asked, objects.is_empty(), failures.first()) {
        let named = named.map(|program| format!("{}={} compiled none", T::COMPILER_VARIABLE, program.display()));
        fail::<T>(&named.unwrap_or("none".into()), why);
    } else {
        for (arch, why) in &failures {
            if left_out(arch) {
                made.push(format!("nothing for {arch} ({})", first_line(why)));
            } else {
                fail::<T>(&format!("nothing for {arch}"), why);
            }
        }
    }
    with.dedup();
    if !objects.is_empty() {
        println!(
            "cargo::warning={} kernels: {}, with {}",
            T::NAME,
            made.join(", "),
            with.join(", ")
        );
    }
    objects
}

/// A feature, by the variable that Cargo sets for it, with the architectures that it has kernels for:
/// `hip=gfx90a,gfx942`, or `hip` alone without any.
fn described(variable: &str, objects: &[CodeObject]) -> String {
    let name = variable.trim_start_matches("CARGO_FEATURE_").to_lowercase();
    let mut described = name.replace('_', "-");
    let mut archs: Vec<&str> = objects.iter().map(|object| object.arch.as_str()).collect();
    archs.dedup();
    if !archs.is_empty() {
        described = described + "=" + &archs.join(",");
    }
    described
}

/// Ends the build, once the script has run.
fn fail<T: Compilers>(what: &str, why: &str) {
    eprintln!("{why}");
    println!(
        "cargo::error={} kernels: {what}: {}; {} names a compiler ({}), {archs} the architectures, and {archs}={NO_ARCHS} \
         builds without kernels",
        T::NAME,
        first_line(why),
        T::COMPILER_VARIABLE,
        T::WANTED,
        archs = T::ARCHS_VARIABLE
    );
}

/// Those of all the toolchain's families.
fn default_archs(toolchain: Toolchain) -> String {
    let platforms = TABLES.iter().flat_map(|family| family.platforms);
    let mine = platforms.filter(|platform| platform.toolchain == toolchain);
    let archs: Vec<&str> = mine.flat_map(|platform| platform.architectures).copied().collect();
    archs.join(",")
}

fn family_for(arch: &str, toolchain: Toolchain) -> Result<&'static Table, String> {
    let found = platform_of(arch).filter(|(_, platform)| platform.toolchain == toolchain);
    let (family, _) = found.ok_or_else(|| format!("no family in kernels/catalogue.rs has {arch}"))?;
    Ok(family)
}

/// What the first compiler gives that compiles everything, or why the best one could not.
fn first_that_can(
    compilers: &[Compiler],
    compile: impl Fn(&Compiler) -> Result<Vec<CodeObject>, String>,
) -> Result<(&Compiler, Vec<CodeObject>), String> {
    let mut why = None;
    for compiler in compilers {
        match compile(compiler) {
            Ok(objects) => return Ok((compiler, objects)),
            Err(error) => why = why.or(Some(error)),
        }
    }
    Err(why.unwrap_or_else(|| "no compiler found".to_owned()))
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
        let CodeObject {
            family,
            arch,
            file,
            path,
        } = object;
        let family = family.name;
        let image = match arch.starts_with(cuda::PTX) {
            true => format!("concat!(include_str!({path:?}), \"\\0\").as_bytes()"),
            false => format!("&Aligned(*include_bytes!({path:?})).0"),
        };
        writeln!(
            table,
            "    CodeObject {{ family: {family:?}, arch: {arch:?}, file: {file:?}, image: {image} }},"
        )
        .expect("a String takes anything");
    }
    table + "]\n"
}

//! The committed headers are those generated from the sources, and compile wherever they may be included.

mod kernels;
mod wire;

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn header_is_current() {
    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    config.after_includes.get_or_insert_default().push_str(VERSION);
    let mut header = Vec::new();
    cbindgen::Builder::new()
        .with_src(root().join("src/abi/mod.rs"))
        .with_config(config)
        .generate()
        .unwrap()
        .write(&mut header);
    let header = in_c90(&String::from_utf8(header).unwrap());
    current("include/getp.h", header.as_bytes(), "src/abi");
}

/// The header's version, for the preprocessor.
const VERSION: &str = concat!(
    "\n\n/* The version of this header; getp_version() is the library's. */\n#define GETP_VERSION \"",
    env!("CARGO_PKG_VERSION"),
    "\"\n#define GETP_VERSION_MAJOR ",
    env!("CARGO_PKG_VERSION_MAJOR"),
    "\n#define GETP_VERSION_MINOR ",
    env!("CARGO_PKG_VERSION_MINOR"),
    "\n#define GETP_VERSION_PATCH ",
    env!("CARGO_PKG_VERSION_PATCH"),
);

/// The end of what cbindgen.toml begins in front of the first declaration, within the include guard.
const END: &str = "#ifdef __GNUC__\n#pragma GCC diagnostic pop\n#endif\n\n";

/// cbindgen's header as C90 has it too: comments between `/*` and `*/`, which cbindgen would give two lines more each,
/// a constant that is no `long long`, and warnings as they were before.
fn in_c90(header: &str) -> String {
    let lines: Vec<&str> = header.lines().collect();
    let comment = |at: usize| lines.get(at).and_then(|line| line.trim_start().strip_prefix("//"));
    let mut out = String::new();
    for (at, line) in lines.iter().enumerate() {
        if line.ends_with("/* GETP_H */") {
            out += END;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        if let Some(text) = comment(at) {
            let begins = at == 0 || comment(at - 1).is_none();
            out += &format!("{indent}{}{text}", if begins { "/*" } else { " *" });
            if comment(at + 1).is_none() {
                let column = out.len() - out.rfind('\n').map_or(0, |end| end + 1);
                out += &if column + 3 > 120 {
                    format!("\n{indent} */")
                } else {
                    " */".to_owned()
                };
            }
        } else if let Some((code, text)) = line.split_once("// ") {
            out += &format!("{code}/* {text} */");
        } else if let Some((code, number)) = line.strip_suffix("ull").and_then(|line| line.rsplit_once(' ')) {
            out += &format!("{code} UINT64_C({number})");
        } else {
            out += line;
        }
        out.push('\n');
    }
    out
}

#[test]
fn kernels_header_is_current() {
    let source = "src/backend/gpu/args.rs";
    let header = kernels::header(&std::fs::read_to_string(root().join(source)).unwrap());
    current("kernels/args.h", header.as_bytes(), source);
}

/// Compares a committed file with what is generated from its source; with `GETP_BLESS` set, writes it.
fn current(file: &str, header: &[u8], source: &str) {
    let path = root().join(file);
    if std::env::var_os("GETP_BLESS").is_some() {
        std::fs::write(&path, header).unwrap();
    }
    let committed = std::fs::read(&path).unwrap_or_default();
    assert!(
        committed == header,
        "{file} is not what {source} gives; run GETP_BLESS=1 cargo test --test header"
    );
}

/// Compiles `source`, with warnings as errors, with each compiler that is installed for its language.
fn compile(language: &str, source: &str) {
    build(language, source, &["-fsyntax-only"], |_| ());
}

/// Compiles `source` as [`compile`] does, links it, and runs it: it returns 0.
fn run(language: &str, source: &str) {
    build(language, source, &[], |program| {
        let status = Command::new(program).status().unwrap();
        assert_eq!(status.code(), Some(0), "{language}:\n{source}");
    });
}

/// Has each compiler of the language compile `source` with these arguments, and shows `then` the program that it made.
fn build(language: &str, source: &str, arguments: &[&str], then: impl Fn(&Path)) {
    let (compilers, standard) = match language {
        "c" => (["cc", "clang"], "-std=c11"),
        _ => (["c++", "clang++"], "-std=c++17"),
    };
    let dir = tempfile::tempdir().unwrap();
    let file: PathBuf = dir.path().join(format!("program.{language}"));
    std::fs::write(&file, source).unwrap();
    for (at, compiler) in compilers.into_iter().enumerate() {
        let program = dir.path().join(compiler);
        let output = Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
            .arg(root().join("include"))
            .arg("-I")
            .arg(root().join("kernels"))
            .args(arguments)
            .arg(&file)
            .arg("-o")
            .arg(&program)
            .output();
        match output {
            Ok(output) => assert!(
                output.status.success(),
                "{compiler}: {}",
                String::from_utf8_lossy(&output.stderr)
            ),
            // The system's compiler is required, the other one is optional.
            Err(error) => {
                assert!(at > 0, "{compiler}: {error}");
                continue;
            }
        }
        then(&program);
    }
}

#[test]
fn header_compiles_alone_and_twice() {
    let source = "#include \"getp.h\"\n#include \"getp.h\"\n\
        int main(void) { Transformer *t = NULL; warm_up(t, NULL); return getp_version() == NULL; }\n";
    compile("c", source);
    compile("cpp", source);
}

/// The library gets the size of the struct itself, however the program says where it is, and the argument is evaluated
/// once.
#[test]
fn options_have_the_size_of_the_program_s_own_struct() {
    let source = "#include \"getp.h\"\n\
        getp_status getp_options_init_sized(getp_options *o, size_t size) { o->size = size; return GETP_OK; }\n\
        int main(void) { getp_options a[3]; getp_options *b = a; a[1].size = a[2].size = 0;\n\
        getp_options_init(&a[0]); getp_options_init(++b); if (b != a + 1) return 1;\n\
        getp_options_init(b + 1); for (int i = 0; i < 3; i++) if (a[i].size != sizeof(getp_options)) return 2;\n\
        return 0; }\n";
    run("c", source);
    run("cpp", source);
}

/// The structs have the eval program's layout, by the C compiler's own assertions.
#[test]
fn header_has_the_contract_s_layout() {
    let asserts = [
        "sizeof(Config) == 60",
        "sizeof(TransformerWeights) == 128",
        "sizeof(RunState) == 168",
        "sizeof(Transformer) == 384",
        "sizeof(TokenIndex) == 16",
        "sizeof(Tokenizer) == 1576",
        "sizeof(ProbIndex) == 8",
        "sizeof(Sampler) == 32",
        "sizeof(Requests) == 32",
        "sizeof(getp_options) == 80",
        "offsetof(Config, swiglu_limit) == 56",
        "offsetof(Transformer, weights) == 64",
        "offsetof(Transformer, state) == 192",
        "offsetof(Transformer, fd) == 360",
        "offsetof(Transformer, file_size) == 376",
        "offsetof(Tokenizer, byte_pieces) == 1064",
        "offsetof(Sampler, rng_state) == 24",
        "offsetof(Requests, tok_gens) == 24",
    ];
    let lines: String = asserts
        .iter()
        .map(|a| format!("_Static_assert({a}, \"\");\n"))
        .collect();
    compile(
        "c",
        &format!("#include \"getp.h\"\n{lines}int main(void) {{ return 0; }}\n"),
    );
}

/// Its assertions hold in each compiler, and one that does not hold stops it.
#[test]
fn kernels_header_compiles_and_asserts_the_host_s_layout() {
    compile(
        "cpp",
        "#include \"args.h\"\n#include \"args.h\"\nint main() { return 0; }\n",
    );
    let header = std::fs::read_to_string(root().join("kernels/args.h")).unwrap();
    let (rows, experts) = ("AT(StepHeader, rows, 0)", "AT(SortArgs, experts, 104)");
    for [right, wrong] in [
        ["SIZE(GemmArgs, 176)", "SIZE(GemmArgs, 184)"],
        [rows, "AT(StepHeader, rows, 4)"],
        [experts, "AT(SortArgs, counts, 104)"],
        // What a compiler that lays out otherwise would see.
        ["  int rows;  ", "  int before; int rows;  "],
    ] {
        assert!(header.contains(right), "{right}");
        assert!(!compiles(&header.replacen(right, wrong, 1)), "{wrong} compiles");
    }
}

/// What the host fills in, some kernel reads.
#[test]
fn kernels_read_every_field_of_their_arguments() {
    let header = std::fs::read_to_string(root().join("kernels/args.h")).unwrap();
    let mut kernels = String::new();
    for folder in std::fs::read_dir(root().join("kernels"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
    {
        let files = match folder.is_dir() {
            true => std::fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect(),
            false => vec![folder],
        };
        let is_read = |path: &std::path::PathBuf| {
            path.extension().is_some_and(|kind| kind == "h" || kind == "hip") && !path.ends_with("args.h")
        };
        files
            .iter()
            .filter(|path| is_read(path))
            .for_each(|path| kernels += &std::fs::read_to_string(path).unwrap());
    }
    let words: std::collections::HashSet<&str> = kernels
        .split(['.', '>'])
        .skip(1)
        .filter_map(|behind| behind.split(|c: char| !c.is_alphanumeric() && c != '_').next())
        .collect();
    let (mut of, mut fields) = ("", 0);
    for line in header.lines() {
        if let Some(name) = line.strip_prefix("struct ") {
            of = name.split([' ', ';']).next().unwrap();
        }
        if line == "};" {
            of = "";
        }
        // `  const u16* input;   // tiled`
        let code = line.split("//").next().unwrap();
        let Some(declared) = code
            .strip_prefix("  ")
            .and_then(|code| code.trim_end().strip_suffix(';'))
        else {
            continue;
        };
        let name = declared.split('[').next().unwrap().rsplit([' ', '*']).next().unwrap();
        if name == "reserved" || of.is_empty() {
            continue;
        }
        fields += 1;
        assert!(words.contains(name), "no kernel reads {name} of {of}");
    }
    assert!(fields > 150, "{fields}");
}

fn compiles(header: &str) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("args.cpp");
    std::fs::write(&file, header).unwrap();
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-fsyntax-only"]).arg(file);
    command.output().unwrap().status.success()
}

#[test]
fn a_program_with_its_own_structs_may_include_it() {
    let structs = "typedef struct { int a; } Transformer; typedef struct { int a; } Tokenizer;\n\
        typedef struct { int a; } Sampler; typedef struct { int a; } Requests; typedef struct { int a; } Config;\n";
    let include = "#define GETP_NO_DRIVER_STRUCTS\n#include \"getp.h\"\n#include \"getp.h\"\n";
    let main = "int main(void) { Transformer t; warm_up(&t, 0); finish(&t, 0);\n\
        return inference(&t, 0, 0, 0) == 0 || getp_model_transformer(0) == &t; }\n";
    compile("c", &format!("{structs}{include}{main}"));
    // A C++ program may declare the functions, with C++ linkage, before or after the header.
    let declarations = "void warm_up(Transformer *, Tokenizer *); void finish(Transformer *, Tokenizer *);\n\
        long long inference(Transformer *, Tokenizer *, Sampler *, Requests *);\n";
    compile("cpp", &format!("{structs}{declarations}{include}{main}"));
    compile("cpp", &format!("{structs}{include}{declarations}{main}"));
}

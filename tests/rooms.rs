//! The modules depend on each other only in the order that ARCHITECTURE.md states.
//!
//! Every `use` and every path in `src/` that begins with `crate`, `self` or `super` is resolved to the file that
//! defines the item, also through re-exports and in macros. Unit tests are exempt. A module may use the modules in the
//! lines above its own, and so may the files of each backend and of the build. No two files of a folder use each other.
//! Where `unsafe` is, where the feature `mpi` is named, and who knows a GPU's runtime or family, is held to that
//! document, too.

use getp::backend::gpu::catalogue::{TABLES, Toolchain};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// A path below the crate: of a module, or of what a module has.
type Names = Vec<String>;

/// A parsed file.
#[derive(Default)]
struct Source {
    /// Paths that it names.
    paths: Vec<Names>,
    /// The paths behind the names that its `use` items import.
    imports: BTreeMap<String, Names>,
    /// Whether it has `unsafe` code, or says that something is.
    is_unsafe: bool,
}

/// The files of the crate by their modules, and which of them uses which.
struct Crate {
    files: BTreeMap<Names, Source>,
    arrows: BTreeSet<[Names; 2]>,
}

impl Crate {
    /// The library.
    fn read() -> Self {
        Self::read_from(Path::new("src"))
    }

    /// The modules of a folder.
    fn read_from(folder: &Path) -> Self {
        let mut read = Self {
            files: BTreeMap::new(),
            arrows: BTreeSet::new(),
        };
        read_folder(folder, &[], &mut read.files);
        read.arrows = read.find_arrows();
        read
    }

    /// The module whose file defines what a path names; `None` if another crate does.
    fn home(&self, path: &[String]) -> Option<Names> {
        let mut module = Names::new();
        for (i, name) in path.iter().enumerate() {
            let child = joined(&module, std::slice::from_ref(name));
            if self.files.contains_key(&child) {
                module = child;
                continue;
            }
            return match self.files[&module].imports.get(name) {
                Some(target) if target.starts_with(&path[..=i]) => None,
                Some(target) => self.home(&joined(target, &path[i + 1..])),
                None => Some(module),
            };
        }
        Some(module)
    }

    /// Modules, and those that each of them uses.
    fn find_arrows(&self) -> BTreeSet<[Names; 2]> {
        let of = |(from, source): (&Names, &Source)| {
            let homes = source.paths.iter().filter_map(|path| self.home(path));
            homes
                .filter(|to| to != from)
                .map(|to| [from.clone(), to])
                .collect::<Vec<_>>()
        };
        self.files.iter().flat_map(of).collect()
    }

    /// What a folder's modules use of each other. Where one uses the folder's own file, that counts as `mod`.
    fn arrows_within(&self, folder: &[String]) -> BTreeMap<String, BTreeSet<String>> {
        let mut within = BTreeMap::<_, BTreeSet<_>>::new();
        for [from, to] in &self.arrows {
            if !from.starts_with(folder) || !to.starts_with(folder) || from.len() == folder.len() {
                continue;
            }
            let part = |module: &Names| module.get(folder.len()).map_or("mod".to_owned(), String::clone);
            let (from, to) = (part(from), part(to));
            if from != to {
                within.entry(from).or_default().insert(to);
            }
        }
        within
    }

    /// A folder's modules.
    fn children(&self, folder: &[String]) -> BTreeSet<String> {
        let below = self.files.keys().filter(|module| module.starts_with(folder));
        below.filter_map(|module| module.get(folder.len()).cloned()).collect()
    }

    /// What uses one of these modules of a folder, or what is below them, but for the folder itself.
    fn users(&self, folder: &[&str], modules: &[&str]) -> BTreeSet<String> {
        let folder = names(folder);
        let known: Vec<_> = modules
            .iter()
            .map(|module| joined(&folder, &names(&[module])))
            .collect();
        let uses =
            |[from, to]: &[Names; 2]| !from.starts_with(&folder) && known.iter().any(|module| to.starts_with(module));
        self.arrows
            .iter()
            .filter(|arrow| uses(arrow))
            .map(|[from, _]| from.join("::"))
            .collect()
    }
}

fn joined(a: &[String], b: &[String]) -> Names {
    [a, b].concat()
}

fn names(names: &[&str]) -> Names {
    names.iter().map(|&name| name.into()).collect()
}

fn read_folder(folder: &Path, module: &[String], sources: &mut BTreeMap<Names, Source>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let child = joined(module, &names(&[stem]));
        if path.is_dir() {
            read_folder(&path, &child, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") && stem != "tests" {
            let is_folders_own = stem == "mod" || stem == "lib";
            let module = if is_folders_own { module.to_vec() } else { child };
            read_file(&path, module, sources);
        }
    }
}

/// Reads a file, and the files that its `#[path]` attributes name.
fn read_file(path: &Path, module: Names, sources: &mut BTreeMap<Names, Source>) {
    let mut reader = Reader {
        scope: module.clone(),
        depth: 0,
        source: Source::default(),
        elsewhere: Vec::new(),
    };
    reader.visit_file(&syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap());
    sources.insert(module, reader.source);
    for (module, file) in reader.elsewhere {
        read_file(&path.parent().unwrap().join(file), module, sources);
    }
}

/// Reads a file.
struct Reader {
    /// The module that encloses what is read.
    scope: Names,
    /// Modules within the file that enclose it.
    depth: usize,
    source: Source,
    /// Modules in files that a `#[path]` attribute names, relative to this file.
    elsewhere: Vec<(Names, String)>,
}

/// The file that a module's `#[path]` attribute names.
fn path_attribute(module: &syn::ItemMod) -> Option<String> {
    module.attrs.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(syn::MetaNameValue {
            path,
            value:
                syn::Expr::Lit(syn::ExprLit {
                    lit: syn::Lit::Str(file),
                    ..
                }),
            ..
        }) if path.is_ident("path") => Some(file.value()),
        _ => None,
    })
}

impl Reader {
    /// A path from the crate's root; `None` if it begins with another crate or a name that no `use` before it imports.
    fn absolute(&self, path: &[String]) -> Option<Names> {
        let ups = path.iter().take_while(|name| *name == "super").count();
        match path.first()?.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some(joined(&self.scope, &path[1..])),
            "super" => Some(joined(&self.scope[..self.scope.len() - ups], &path[ups..])),
            name => Some(joined(self.source.imports.get(name)?, &path[1..])),
        }
    }

    fn names(&mut self, path: &[String]) {
        self.source.paths.extend(self.absolute(path));
    }

    /// A `use` item, whose path may begin with a module of the file's own.
    fn imports(&mut self, tree: &syn::UseTree, path: &[String]) {
        let with = |name: &syn::Ident| joined(path, &[name.to_string()]);
        let (name, path) = match tree {
            syn::UseTree::Path(step) => return self.imports(&step.tree, &with(&step.ident)),
            syn::UseTree::Group(group) => return group.items.iter().for_each(|tree| self.imports(tree, path)),
            syn::UseTree::Glob(_) => return self.names(path),
            syn::UseTree::Name(name) if name.ident == "self" => (path.last().cloned().unwrap(), path.to_vec()),
            syn::UseTree::Name(name) => (name.ident.to_string(), with(&name.ident)),
            syn::UseTree::Rename(rename) => (rename.rename.to_string(), with(&rename.ident)),
        };
        let target = self.absolute(&path).unwrap_or_else(|| joined(&self.scope, &path));
        self.source.paths.push(target.clone());
        if self.depth == 0 {
            self.source.imports.insert(name, target);
        }
    }

    /// Paths in a macro's definition or call.
    fn tokens(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Names::new(), 0);
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) if ident == "unsafe" => self.source.is_unsafe = true,
                TokenTree::Ident(ident) if colons == 2 => {
                    path.push(ident.to_string());
                    colons = 0;
                }
                token => {
                    self.names(&std::mem::take(&mut path));
                    colons = 0;
                    match token {
                        TokenTree::Ident(ident) => path.push(ident.to_string()),
                        TokenTree::Group(group) => self.tokens(group.stream()),
                        TokenTree::Punct(_) | TokenTree::Literal(_) => {}
                    }
                }
            }
        }
        self.names(&path);
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if module.ident == "tests" {
            return;
        }
        if let Some(file) = path_attribute(module) {
            let name = names(&[&module.ident.to_string()]);
            self.elsewhere.push((joined(&self.scope, &name), file));
            return;
        }
        self.scope.push(module.ident.to_string());
        self.depth += 1;
        visit::visit_item_mod(self, module);
        self.depth -= 1;
        self.scope.pop();
    }

    /// `pub(super)` uses nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.imports(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|segment| segment.ident.to_string());
        self.names(&segments.collect::<Names>());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.source.is_unsafe = true;
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.source.is_unsafe |= signature.unsafety.is_some();
        visit::visit_signature(self, signature);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.source.is_unsafe |= item.unsafety.is_some();
        visit::visit_item_trait(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.source.is_unsafe |= item.unsafety.is_some();
        visit::visit_item_impl(self, item);
    }

    fn visit_item_foreign_mod(&mut self, item: &'ast syn::ItemForeignMod) {
        self.source.is_unsafe |= item.unsafety.is_some();
        visit::visit_item_foreign_mod(self, item);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        self.source.is_unsafe |= attribute.path().is_ident("unsafe");
        visit::visit_attribute(self, attribute);
    }
}

/// The code block after a heading of ARCHITECTURE.md: each name, and the number of its line in the block.
fn stated(heading: &str) -> BTreeMap<String, usize> {
    let text = fs::read_to_string("ARCHITECTURE.md").unwrap();
    let behind = text
        .split_once(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("no {heading}"))
        .1;
    let block = behind
        .split("```")
        .nth(1)
        .expect("a block")
        .trim_start_matches("text\n");
    let mut lines = BTreeMap::new();
    for (line, names) in block.lines().enumerate() {
        for name in names.split_whitespace() {
            assert!(
                lines.insert(name.to_owned(), line).is_none(),
                "{heading}: {name} stands there twice"
            );
        }
    }
    lines
}

/// Violations of the stated order in a folder.
fn faults(source: &Crate, folder: &[String], stated: &BTreeMap<String, usize>) -> Vec<String> {
    let mut faults = Vec::new();
    let there = source.children(folder);
    faults.extend(
        there
            .iter()
            .filter(|name| !stated.contains_key(*name))
            .map(|name| format!("{name} has no line")),
    );
    faults.extend(
        stated
            .keys()
            .filter(|name| !there.contains(*name))
            .map(|name| format!("there is no {name}")),
    );
    for (from, to) in source.arrows_within(folder) {
        let above = |to: &&String| {
            stated
                .get(*to)
                .zip(stated.get(&from))
                .is_some_and(|(to, from)| to < from)
        };
        faults.extend(to.iter().filter(|to| !above(to)).map(|to| format!("{from} uses {to}")));
    }
    faults
}

fn check(folder: &[&str], heading: &str) {
    let faults = faults(&Crate::read(), &names(folder), &stated(heading));
    assert!(faults.is_empty(), "{heading}:\n{}", faults.join("\n"));
}

#[test]
fn rooms_use_what_stands_above_them() {
    check(&[], "### Order of the rooms");
}

#[test]
fn files_of_the_cpu_use_what_stands_above_them() {
    check(&["backend", "cpu"], "### Order within `backend/cpu/`");
}

#[test]
fn files_of_the_gpu_use_what_stands_above_them() {
    check(&["backend", "gpu"], "### Order within `backend/gpu/`");
}

#[test]
fn files_of_the_build_use_what_stands_above_them() {
    let heading = "### Order within `build_support/`";
    let faults = faults(&Crate::read_from(Path::new("build_support")), &[], &stated(heading));
    assert!(faults.is_empty(), "{heading}:\n{}", faults.join("\n"));
}

/// Headers and kernels below `kernels/`, and what each of them includes there. What the build makes is left out.
fn includes() -> BTreeMap<PathBuf, Vec<PathBuf>> {
    let kernels = Path::new("kernels");
    let folders = fs::read_dir(kernels).unwrap().map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.is_dir()).chain([kernels.to_owned()]);
    let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    let is_code = |path: &PathBuf| {
        path.extension()
            .is_some_and(|kind| ["h", "hip", "cpp"].iter().any(|of| kind == *of))
    };
    let of = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let named = text
            .lines()
            .filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
        let found = named.filter_map(|name| {
            let places = [path.parent().unwrap().join(name), kernels.join(name)];
            let place = places.into_iter().find_map(|place| place.canonicalize().ok())?;
            Some(place.strip_prefix(fs::canonicalize(".").unwrap()).unwrap().to_owned())
        });
        let found = found.collect();
        (path, found)
    };
    files.filter(is_code).map(of).collect()
}

#[test]
fn kernels_include_what_is_shared_and_their_family_s_own() {
    let includes = includes();
    assert!(includes.len() > 60, "{includes:?}");
    let folder = |path: &Path| path.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let is_test = |path: &Path| path.extension().is_some_and(|kind| kind == "cpp");
    // Families that share what mma.sync multiplies.
    let are_of_cuda = |folder: &str| {
        let mut platforms = TABLES.iter().filter(|family| family.name == folder);
        platforms.any(|family| family.platforms.iter().all(|on| on.toolchain == Toolchain::Cuda))
    };
    for (path, found) in includes.iter().filter(|(path, _)| !is_test(path)) {
        for of in found {
            let allowed = match (folder(path).as_str(), folder(of).as_str()) {
                ("gpu", "kernels") => of.ends_with("args.h"),
                (from, "mma") => from == "mma" || are_of_cuda(from),
                (from, to) => to == from || to == "gpu" || to == "kernels",
            };
            assert!(allowed, "{} includes {}", path.display(), of.display());
        }
    }
    // Headers that include each other are never left without one that includes nothing of the rest.
    let mut left = includes;
    while !left.is_empty() {
        let free: Vec<_> = left
            .iter()
            .filter(|(_, found)| !found.iter().any(|of| left.contains_key(of)))
            .map(|(path, _)| path.clone())
            .collect();
        assert!(!free.is_empty(), "they include each other: {:?}", left.keys());
        free.iter().for_each(|path| drop(left.remove(path)));
    }
}

#[test]
fn unsafe_is_where_the_document_says() {
    let source = Crate::read();
    let stated = stated("### Where `unsafe` is");
    let stated: Vec<Names> = stated
        .keys()
        .map(|path| names(&path.split("::").collect::<Vec<_>>()))
        .collect();
    let is_there: Vec<_> = source
        .files
        .iter()
        .filter(|(_, file)| file.is_unsafe)
        .map(|(module, _)| module)
        .collect();
    let unstated = is_there
        .iter()
        .filter(|module| !stated.iter().any(|path| module.starts_with(path)));
    let mut faults: Vec<_> = unstated
        .map(|module| format!("{} has some", module.join("::")))
        .collect();
    let without = stated
        .iter()
        .filter(|path| !is_there.iter().any(|module| module.starts_with(path)));
    faults.extend(without.map(|path| format!("{} has none", path.join("::"))));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The Rust files of a folder, and of those in it.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = paths.flat_map(|path| match path.is_dir() {
        true => rust_files(&path),
        false => vec![path],
    });
    files
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .collect()
}

/// How often attributes and macros name the feature `mpi`: `feature = "mpi"`.
fn names_of_mpi(tokens: TokenStream) -> usize {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let is_name = |tokens: &[TokenTree]| tokens.iter().map(TokenTree::to_string).eq(["feature", "=", "\"mpi\""]);
    let within = tokens.iter().map(|token| match token {
        TokenTree::Group(group) => names_of_mpi(group.stream()),
        _ => 0,
    });
    within.sum::<usize>() + tokens.windows(3).filter(|tokens| is_name(tokens)).count()
}

#[test]
fn the_feature_mpi_is_named_where_the_document_says() {
    let folders = ["src", "tests", "benches", "examples", "build_support"].map(Path::new);
    let files = folders.into_iter().flat_map(rust_files).chain(["build.rs".into()]);
    let names = files.map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        (path.display().to_string(), names_of_mpi(text.parse().unwrap()))
    });
    let names: BTreeMap<_, _> = names.filter(|(_, names)| *names > 0).collect();
    let stated = stated("### Where the feature `mpi` is named");
    assert!(names.keys().eq(stated.keys()), "it is named in {names:?}");
    assert!(
        names.values().all(|&names| names <= 2),
        "more than twice in a file: {names:?}"
    );
}

/// A thread that waits for another one to fill a `once_cell` takes memory for its own handle, and aborts without: the
/// standard library's needs none.
#[test]
fn statics_are_waited_for_without_memory() {
    for path in rust_files(Path::new("src")) {
        let text = fs::read_to_string(&path).unwrap();
        let wrong = text
            .lines()
            .find(|line| line.contains("static ") && line.contains("OnceCell"));
        assert_eq!(wrong, None, "{}", path.display());
    }
}

/// Counts the names in code, but for what is compiled for unit tests alone, and adds those of what is public.
fn names_in(tokens: TokenStream, counts: &mut BTreeMap<String, usize>, public: &mut BTreeSet<String>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let word = |at: usize| tokens.get(at).map(TokenTree::to_string).unwrap_or_default();
    // Behind `#[cfg(test)]`, up to the item's body or semicolon.
    let mut is_for_tests = false;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => {
                let text = group.stream().to_string();
                if text.replace(' ', "") == "cfg(test)" {
                    is_for_tests = true;
                } else if is_for_tests {
                    is_for_tests = group.delimiter() != Delimiter::Brace;
                } else if !text.starts_with("doc =") {
                    names_in(group.stream(), counts, public);
                }
            }
            TokenTree::Ident(name) if !is_for_tests => {
                *counts.entry(name.to_string()).or_default() += 1;
                if name == "pub" {
                    let kinds = ["fn", "struct", "enum", "trait", "type", "const", "static"];
                    let kind = (at + 1..at + 5).rfind(|&at| kinds.contains(&word(at).as_str()));
                    public.extend(kind.map(|kind| word(kind + 1)));
                    // A field, also of `pub(super)`.
                    let field = (at + 1..at + 3).find(|&at| word(at + 1) == ":" && word(at + 2) != ":");
                    public.extend(field.map(word));
                }
            }
            TokenTree::Punct(mark) => is_for_tests &= mark.as_char() != ';',
            TokenTree::Ident(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Modules that are there for tests alone, without their files' endings.
fn modules_of_tests(files: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for path in files {
        let folder = match path.file_stem() {
            Some(stem) if stem == "mod" || stem == "lib" => path.with_file_name(""),
            _ => path.with_extension(""),
        };
        let text = fs::read_to_string(path).unwrap();
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        for pair in lines.windows(2) {
            let declared = pair[1].strip_prefix("pub(crate) ").unwrap_or(pair[1]);
            let name = declared.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';'));
            if let ("#[cfg(test)]", Some(name)) = (pair[0], name) {
                found.insert(folder.join(name));
            }
        }
    }
    found
}

/// The compiler takes what is public for used, and nearly all is. What is for tests and benches alone has a file of its
/// own, or a name here.
#[test]
fn what_is_public_is_used() {
    // A family says what its own sums may err by.
    let for_tests = ["CONSTANTS", "FORMATS_DOCS", "STRUCTS", "sum_error"];
    let for_tools = ["preset_7m", "preset_120b"];
    let (mut counts, mut public) = (BTreeMap::new(), BTreeMap::new());
    let folders = ["src", "program", "kernels", "build_support"].map(Path::new);
    let files = folders.into_iter().flat_map(rust_files);
    let files: Vec<_> = files.chain(["build.rs".into()]).collect();
    let of_tests = modules_of_tests(&files);
    assert!(of_tests.len() > 4, "{of_tests:?}");
    for path in files {
        if of_tests.contains(&path.with_extension("")) {
            continue;
        }
        let mut names = BTreeSet::new();
        names_in(
            fs::read_to_string(&path).unwrap().parse().unwrap(),
            &mut counts,
            &mut names,
        );
        // The header has what is in `abi`.
        if !path.starts_with("src/abi") && path.file_stem().is_none_or(|stem| stem != "inspect") {
            public.extend(names.into_iter().map(|name| (name, path.clone())));
        }
    }
    assert!(public.len() > 500, "{}", public.len());
    // A macro's own names are none.
    let is_used = |name: &str| {
        counts.get(name).is_none_or(|&count| count > 1) || for_tests.contains(&name) || for_tools.contains(&name)
    };
    let unused: Vec<_> = public.iter().filter(|(name, _)| !is_used(name)).collect();
    assert!(unused.is_empty(), "nobody uses {unused:#?}");
}

#[test]
fn one_file_of_the_gpu_knows_its_runtimes() {
    let source = Crate::read();
    let runtimes = source.users(&["backend", "gpu", "driver"], &["cuda", "hip", "simt"]);
    assert_eq!(runtimes, BTreeSet::from(["backend::gpu::discover".to_owned()]));
}

/// Words of names and texts in code. Comments are none.
fn words_of(tokens: TokenStream, words: &mut Vec<String>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    for token in &tokens {
        match token {
            // `[doc = ".."]`
            TokenTree::Group(group) if group.stream().to_string().starts_with("doc =") => {}
            TokenTree::Group(group) => words_of(group.stream(), words),
            token => words.extend(
                token
                    .to_string()
                    .split(|c: char| !c.is_ascii_alphanumeric())
                    .map(str::to_lowercase),
            ),
        }
    }
}

/// A family is its own folder and its own file, and a name in each of two lists: its module and itself. Nobody else
/// asks which family it is, or of which architecture a device, also not tests: they go through all families.
#[test]
fn families_are_named_in_their_own_files_and_two_lists() {
    // What is about one family's devices: emulators and models of them, and their machine code.
    let of_one = [
        "tests/hip",
        "tests/common/wgmma.rs",
        "tests/common/amd_loops.rs",
        "tests/gpu/cuts.rs",
    ];
    // What architectures' names mean.
    let of_names = ["src/backend/gpu/code_objects.rs", "tests/rooms.rs"];
    let lists = ["kernels/catalogue.rs", "src/backend/gpu/family/mod.rs"];
    let folders = ["src", "build_support", "tests", "program", "examples", "kernels"].map(Path::new);
    let names: Vec<&str> = TABLES.iter().map(|family| family.name).collect();
    let own = |path: &str, name: &str| {
        path.starts_with(&format!("kernels/{name}/")) || path.starts_with(&format!("src/backend/gpu/family/{name}"))
    };
    let is_arch = |word: &str| {
        let number = word.strip_prefix("gfx").or(word.strip_prefix("sm"));
        number.is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit()))
    };
    let mut listed = BTreeSet::new();
    for path in folders.into_iter().flat_map(rust_files) {
        let text = fs::read_to_string(&path).unwrap().replace("sm_", "sm");
        let path = path.display().to_string();
        if of_one.iter().any(|start| path.starts_with(start)) {
            continue;
        }
        let mut words = Vec::new();
        words_of(text.parse().unwrap(), &mut words);
        for name in &names {
            // The module, its path, and the family itself.
            let times = words.iter().filter(|word| *word == name).count();
            let most = if lists.contains(&path.as_str()) { 3 } else { 0 };
            assert!(own(&path, name) || times <= most, "{path} names {name} {times} times");
            if times > 0 && !own(&path, name) {
                listed.insert((path.clone(), *name));
            }
        }
        let is_own = names.iter().any(|name| own(&path, name)) || of_names.contains(&path.as_str());
        let arch = words.iter().find(|word| is_arch(word)).filter(|_| !is_own);
        assert_eq!(arch, None, "{path} names an architecture");
    }
    assert_eq!(listed.len(), lists.len() * names.len(), "{listed:?}");
    // A folder for each family, and no other.
    let folders = fs::read_dir("kernels").unwrap().map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.join("catalogue.rs").exists());
    let folders: BTreeSet<_> = folders.map(|path| path.file_name().unwrap().to_owned()).collect();
    assert!(folders.iter().eq(BTreeSet::from_iter(&names)), "{folders:?}");
}

/// Nor do the kernels that every family has, and the headers that they share.
#[test]
fn shared_kernels_name_no_family() {
    for path in ["kernels", "kernels/gpu", "kernels/mma"]
        .map(Path::new)
        .into_iter()
        .flat_map(fs::read_dir)
        .flatten()
    {
        let path = path.unwrap().path();
        if !path.extension().is_some_and(|end| end == "h" || end == "hip") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        for line in code {
            let names = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            // Compilers' own names begin with two.
            let ours = names.filter(|name| !name.starts_with("__"));
            let mut words = ours.flat_map(|name| name.split('_'));
            let named = words.find(|word| TABLES.iter().any(|family| word.eq_ignore_ascii_case(family.name)));
            assert_eq!(named, None, "{}: {line}", path.display());
        }
    }
}

#[test]
fn no_files_of_a_folder_need_each_other() {
    let source = Crate::read();
    let modules = source.files.keys();
    let folders: BTreeSet<_> = modules.flat_map(|m| (0..m.len()).map(|n| m[..n].to_vec())).collect();
    for folder in folders {
        let arrows = source.arrows_within(&folder);
        let mut left = source.children(&folder);
        // Repeatedly removes modules that use none of those left, until all are gone or a cycle is left.
        loop {
            let uses_none = |name: &&String| arrows.get(*name).is_none_or(|to| to.is_disjoint(&left));
            let free: Vec<_> = left.iter().filter(uses_none).cloned().collect();
            if free.is_empty() {
                break;
            }
            left.retain(|name| !free.contains(name));
        }
        assert!(
            left.is_empty(),
            "in {folder:?} these need each other, or what does: {left:?}"
        );
    }
}

//! The code objects to look at: the library's, or those that the build script made in the folder which
//! `GETP_TEST_CODE_OBJECTS` names, with another compiler than the library's.

use getp::backend::gpu::catalogue;
use getp::backend::gpu::code_objects::{CODE_OBJECTS, CodeObject};
use std::fs;
use std::path::{Path, PathBuf};

pub fn code_objects() -> Vec<CodeObject> {
    let Some(folder) = std::env::var_os("GETP_TEST_CODE_OBJECTS") else {
        return CODE_OBJECTS.to_vec();
    };
    let entries = fs::read_dir(&folder).expect("GETP_TEST_CODE_OBJECTS names a folder");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let found: Vec<CodeObject> = paths.iter().filter_map(|path| read(path)).collect();
    assert!(!found.is_empty(), "no code objects in {}", folder.display());
    found
}

/// Of a file called, for example, `gfx90a-cdna-mlp1-hip.o`. What is read is needed until the test ends.
fn read(path: &Path) -> Option<CodeObject> {
    let (arch, file) = path.file_name()?.to_str()?.strip_suffix(".o")?.split_once('-')?;
    Some(CodeObject {
        family: catalogue::table_of(arch)?.name,
        arch: arch.to_owned().leak(),
        file: file.to_owned().leak(),
        image: fs::read(path).unwrap().leak(),
    })
}

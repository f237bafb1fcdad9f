//! The file that logits go to: a regular one, and none that anybody reads.

use crate::error::{Error, Result};
use crate::report;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Which file it is, whatever its paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// Of the file system.
    pub device: u64,
    /// Of the file on it.
    pub inode: u64,
}

impl FileId {
    /// The file at `path`, if there is one.
    pub fn of(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().as_ref().map(Self::from)
    }
}

impl From<&Metadata> for FileId {
    fn from(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

/// A file to be written from its beginning.
pub struct Target(File);

impl Target {
    /// Creates the file, or empties it once it is sure that it is a regular file, is none of `inputs` and is not mapped
    /// into memory.
    pub fn create(path: &Path, inputs: &[FileId]) -> Result<Self> {
        let io = |error| Error::io(path, error);
        let refuse = |why: &str| Err(Error::format(path.display().to_string(), why));
        // Opening a FIFO would wait for its reader.
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        let file = options
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return refuse("it is not a regular file; name one, or one that is not there yet");
        }
        let id = FileId::from(&metadata);
        if inputs.contains(&id) || mapped_files().contains(&id) {
            return refuse("it is read by this run; name another file");
        }
        file.set_len(0).map_err(io)?;
        Ok(Self(file))
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        report::quietly(bytes.len(), || self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The files that this process has mapped, the program's checkpoint among them: what a line of the kernel's list says
/// behind five fields. Paths are asked anew, since the list's device numbers are not those of `stat` on every file
/// system.
fn mapped_files() -> Vec<FileId> {
    let list = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = |line: &str| Some(PathBuf::from(line.get(line.find('/')?..)?));
    let mut paths: Vec<PathBuf> = list.lines().filter_map(path).collect();
    paths.dedup();
    paths.iter().filter_map(|path| FileId::of(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    fn refused(path: &Path, inputs: &[FileId]) -> String {
        let Err(error) = Target::create(path, inputs) else {
            panic!("{} is taken", path.display())
        };
        error.to_string()
    }

    #[test]
    fn a_regular_file_is_emptied() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "old").unwrap();
        let mut target = Target::create(file.path(), &[]).unwrap();
        target.write_all(b"n").unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"n");
    }

    #[test]
    fn an_input_keeps_its_bytes_whatever_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link, name] = ["file", "link", "name"].map(|name| dir.path().join(name));
        std::fs::write(&file, "weights").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::fs::hard_link(&file, &name).unwrap();
        let input = FileId::of(&file).unwrap();
        for path in [&file, &link, &name] {
            assert!(refused(path, &[input]).ends_with("it is read by this run; name another file"));
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"weights");
    }

    #[test]
    fn a_mapped_file_keeps_its_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "weights").unwrap();
        // SAFETY: nobody changes the file.
        let map = unsafe { memmap2::Mmap::map(file.as_file()) }.unwrap();
        assert!(refused(file.path(), &[]).contains("read by this run"));
        assert_eq!(&map[..], b"weights");
        drop(map);
        Target::create(file.path(), &[]).unwrap();
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let name = CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        // Without a reader it cannot be opened, and with one it is not taken.
        refused(&fifo, &[]);
        let reader = File::options().read(true).write(true).open(&fifo).unwrap();
        assert!(refused(&fifo, &[]).contains("not a regular file"));
        drop(reader);
        for path in ["/dev/null", "/dev/full"] {
            assert!(refused(Path::new(path), &[]).contains("not a regular file"));
        }
        refused(dir.path(), &[]);
    }
}

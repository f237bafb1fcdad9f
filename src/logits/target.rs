//! The file that logits are written to. It is opened so that nothing but recorded logits is overwritten.

use crate::descriptors::above_stderr;
use crate::error::{Error, Result};
use crate::report;
use std::fs::{File, Metadata, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// A file opened for writing, from its beginning, and locked against other runs that record, of any process.
pub struct Target(File);

impl Target {
    /// Creates the file, or truncates it if it is empty or begins with `magic`. Fails for any other file, and for what
    /// is not a regular file: the path may by mistake be that of a checkpoint or of the prompts. Fails while another
    /// run records to the file.
    pub fn create(path: &Path, magic: &[u8]) -> Result<Self> {
        let io = |error| Error::io(path, error);
        let refuse = |why: &str| Err(Error::format(path.display().to_string(), why));
        // Without O_NONBLOCK, opening a FIFO would wait for its other end.
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .and_then(above_stderr)
            .map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return refuse("it is not a regular file; name one, or one that is not there yet");
        }
        if is_printed_to(&file.metadata().map_err(io)?) {
            return refuse("the program prints there; name another file");
        }
        // A file system may know no locks; there nothing tells that two runs record to one file.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return refuse("another run records logits there; wait for its end, or name another file");
        }
        let mut begin = Vec::new();
        (&mut file)
            .take(magic.len() as u64)
            .read_to_end(&mut begin)
            .map_err(io)?;
        if !begin.is_empty() && begin != magic {
            return refuse("it holds something else than logits; name another file, or remove it");
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
        Ok(Self(file))
    }
}

/// Whether a file is the program's stdout or stderr, too.
fn is_printed_to(file: &Metadata) -> bool {
    let same = |stream: Metadata| (stream.dev(), stream.ino()) == (file.dev(), file.ino());
    let streams = ["/proc/self/fd/1", "/proc/self/fd/2"];
    streams
        .into_iter()
        .any(|stream| std::fs::metadata(stream).is_ok_and(same))
}

impl Drop for Target {
    /// Unlocks the file, which closing it does not where a forked process has it open, too.
    fn drop(&mut self) {
        let _ = self.0.unlock();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    const MAGIC: &[u8] = b"MAGIC";

    fn refused(path: &Path) -> String {
        let Err(error) = Target::create(path, MAGIC) else {
            panic!("{} is taken", path.display())
        };
        error.to_string()
    }

    #[test]
    fn an_earlier_file_or_an_empty_one_is_written_anew() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for old in ["", "MAGIC", "MAGIC and more"] {
            std::fs::write(file.path(), old).unwrap();
            let mut target = Target::create(file.path(), MAGIC).unwrap();
            target.write_all(b"n").unwrap();
            assert_eq!(std::fs::read(file.path()).unwrap(), b"n");
        }
    }

    #[test]
    fn any_other_file_keeps_its_bytes_whatever_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link, name] = ["file", "link", "name"].map(|name| dir.path().join(name));
        std::fs::write(&file, "MAGIE").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::fs::hard_link(&file, &name).unwrap();
        for path in [&file, &link, &name] {
            assert!(refused(path).ends_with("it holds something else than logits; name another file, or remove it"));
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"MAGIE");
        std::fs::write(&file, "MAG").unwrap();
        refused(&file);
        assert_eq!(std::fs::read(&file).unwrap(), b"MAG");
    }

    #[test]
    fn a_file_has_one_run_at_a_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut target = Target::create(file.path(), MAGIC).unwrap();
        target.write_all(b"MAGIC 1").unwrap();
        assert!(refused(file.path()).contains("another run records logits there"));
        assert_eq!(std::fs::read(file.path()).unwrap(), b"MAGIC 1");
        // As a forked process has it.
        let inherited = target.0.try_clone().unwrap();
        drop(target);
        Target::create(file.path(), MAGIC)
            .unwrap()
            .write_all(b"MAGIC 2")
            .unwrap();
        drop(inherited);
        assert_eq!(std::fs::read(file.path()).unwrap(), b"MAGIC 2");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let name = CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(refused(&fifo).contains("not a regular file"));
        for path in ["/dev/null", "/dev/full"] {
            assert!(refused(Path::new(path)).contains("not a regular file"));
        }
        refused(dir.path());
    }
}

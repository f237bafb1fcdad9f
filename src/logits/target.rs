//! The file that logits are written to. It is opened so that nothing but recorded logits is overwritten.

use crate::error::{Error, Result};
use crate::report;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A file opened for writing, from its beginning.
pub struct Target(File);

impl Target {
    /// Creates the file, or truncates it if it is empty or begins with `magic`. Fails for any other file, and for what
    /// is not a regular file: the path may by mistake be that of a checkpoint or of the prompts.
    pub fn create(path: &Path, magic: &[u8]) -> Result<Self> {
        let io = |error| Error::io(path, error);
        let refuse = |why: &str| Err(Error::format(path.display().to_string(), why));
        // Without O_NONBLOCK, opening a FIFO would wait for its other end.
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return refuse("it is not a regular file; name one, or one that is not there yet");
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

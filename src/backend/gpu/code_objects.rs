//! The kernels, compiled by the build for the architectures asked for.

/// A compiled file of kernels.
#[derive(Clone, Copy)]
pub struct CodeObject {
    /// What it was compiled for: `gfx90a`, `sm_90a`.
    pub arch: &'static str,
    /// Its source in `kernels/`.
    pub file: &'static str,
    /// The ELF file.
    pub image: &'static [u8],
}

/// All there are; empty where the build was asked for none.
pub static CODE_OBJECTS: &[CodeObject] = include!(concat!(env!("OUT_DIR"), "/code_objects.rs"));

/// Runtimes map the image where it lies, by pages.
#[repr(C, align(4096))]
#[allow(dead_code, reason = "not used where the build made no code objects")]
struct Aligned<T: ?Sized>(T);

/// What a device loads.
#[derive(Clone, Copy)]
pub struct Image {
    /// The source of its kernels; `None`: it has all of them.
    file: Option<&'static str>,
    /// For the driver.
    pub bytes: &'static [u8],
}

impl Image {
    /// An image that has all kernels.
    pub fn whole(bytes: &'static [u8]) -> Self {
        Self { file: None, bytes }
    }

    /// Whether it has the kernels of this source.
    pub fn holds(&self, file: &str) -> bool {
        self.file.is_none_or(|own| own == file)
    }
}

/// The images a device of `arch` can run.
pub fn for_arch(arch: &str) -> Vec<Image> {
    #[cfg(feature = "simt")]
    if arch == SIMT {
        return vec![Image::whole(simt_image())];
    }
    let objects = CODE_OBJECTS.iter().filter(|object| fits(object.arch, arch));
    let image = |object: &CodeObject| Image {
        file: Some(object.file),
        bytes: object.image,
    };
    objects.map(image).collect()
}

/// The architectures there are code objects for, each once.
pub fn archs() -> Vec<&'static str> {
    let mut archs: Vec<&str> = CODE_OBJECTS.iter().map(|object| object.arch).collect();
    archs.dedup();
    #[cfg(feature = "simt")]
    archs.push(SIMT);
    archs
}

/// The GPU emulated on the CPU; its code is found elsewhere.
#[cfg(feature = "simt")]
const SIMT: &str = "simt";

/// Whether code for `object` runs on `device`. A device is `sm_90`; `sm_90a` is code that runs there and nowhere else.
pub fn fits(object: &str, device: &str) -> bool {
    object == device || (object.starts_with("sm_") && object.strip_suffix('a') == Some(device))
}

/// The SIMT machine's image: the library's kernels where build.rs has put them.
#[cfg(feature = "simt")]
pub fn simt_image() -> &'static [u8] {
    env!("GETP_SIMT_KERNELS").as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_fits_its_own_architecture() {
        assert!(fits("sm_90a", "sm_90") && fits("gfx90a", "gfx90a") && fits("sm_100", "sm_100"));
        assert!(!fits("sm_90a", "sm_100") && !fits("gfx90a", "gfx90") && !fits("gfx942", "gfx90a"));
    }

    #[test]
    #[cfg_attr(
        not(getp_code_objects),
        ignore = "this build has no code objects; make test-gpu makes one that has"
    )]
    fn every_code_object_is_an_aligned_elf_file() {
        assert!(!CODE_OBJECTS.is_empty());
        for object in CODE_OBJECTS {
            assert!(object.image.as_ptr().addr() % 4096 == 0, "{}", object.file);
            assert!(
                object.image.starts_with(b"\x7fELF"),
                "{} for {}",
                object.file,
                object.arch
            );
        }
    }
}

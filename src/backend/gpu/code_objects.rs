//! The kernels, compiled by the build for the architectures asked for.

/// A compiled file of kernels.
#[derive(Clone, Copy)]
pub struct CodeObject {
    /// Whose kernels: the name of a family.
    pub family: &'static str,
    /// What it was compiled for: `gfx90a`, `sm_90a`, `compute_75`.
    pub arch: &'static str,
    /// Its source in `kernels/`.
    pub file: &'static str,
    /// An ELF file, or a text in PTX with a NUL behind it.
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

/// The images of a family's kernels that a device of `arch` runs best; none if it runs none.
pub fn for_device(family: &str, arch: &str) -> Vec<Image> {
    #[cfg(feature = "simt")]
    if arch == SIMT {
        return vec![Image::whole(simt_image())];
    }
    let fit = CODE_OBJECTS.iter().filter(|object| object.family == family);
    let fit = fit.filter(|object| fits(object.arch, arch));
    let best = fit
        .clone()
        .map(|object| object.arch)
        .max_by_key(|code| preference(code));
    let objects = fit.filter(|object| Some(object.arch) == best);
    let image = |object: &CodeObject| Image {
        file: Some(object.file),
        bytes: object.image,
    };
    objects.map(image).collect()
}

/// Whether there is code of a family's that a device of `arch` runs.
pub fn runs(family: &str, arch: &str) -> bool {
    !for_device(family, arch).is_empty()
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

/// Whether code for `object` runs on `device`. AMD's runs on its own architecture. NVIDIA's, whose devices are numbered
/// by generation and a last digit, runs within its generation: with the suffix `a` on one device alone, with `f` or
/// without one on later ones, too. PTX, `compute_`, the driver compiles for any later device.
pub fn fits(object: &str, device: &str) -> bool {
    if object == device {
        return true;
    }
    let Some(device) = numbered("sm_", device) else {
        return false;
    };
    if let Some(oldest) = numbered("compute_", object) {
        return oldest <= device;
    }
    if let Some(only) = object.strip_suffix('a').and_then(|object| numbered("sm_", object)) {
        return only == device;
    }
    let oldest = numbered("sm_", object.strip_suffix('f').unwrap_or(object));
    oldest.is_some_and(|oldest| oldest <= device && oldest / 10 == device / 10)
}

/// The number behind a prefix.
fn numbered(prefix: &str, arch: &str) -> Option<u32> {
    arch.strip_prefix(prefix)?.parse().ok()
}

/// Of what fits a device the largest is the best: what is compiled, and then the latest.
fn preference(object: &str) -> (bool, u32) {
    let number = object.chars().filter(char::is_ascii_digit).collect::<String>();
    (!is_ptx(object), number.parse().unwrap_or(0))
}

/// Whether it is a text, which the driver compiles.
pub fn is_ptx(object: &str) -> bool {
    numbered("compute_", object).is_some()
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
        for (object, devices) in [
            ("sm_90a", &["sm_90"][..]),
            ("sm_100f", &["sm_100", "sm_103"]),
            ("sm_80", &["sm_80", "sm_86", "sm_89"]),
            (
                "compute_80",
                &["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"],
            ),
            ("gfx90a", &["gfx90a"]),
            ("gfx1100", &["gfx1100"]),
        ] {
            let all = [
                "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120",
            ]
            .into_iter();
            let all = all.chain(["gfx90", "gfx90a", "gfx942", "gfx1100", "gfx1101"]);
            assert_eq!(
                all.filter(|device| fits(object, device)).collect::<Vec<_>>(),
                devices,
                "{object}"
            );
        }
    }

    #[test]
    fn compiled_code_is_better_than_a_text() {
        let best = |codes: [&'static str; 3]| codes.into_iter().max_by_key(|code| preference(code));
        assert_eq!(best(["sm_86", "compute_89", "sm_80"]), Some("sm_86"));
        assert_eq!(best(["compute_75", "compute_80", "compute_70"]), Some("compute_80"));
    }

    #[test]
    #[cfg_attr(
        not(getp_code_objects),
        ignore = "this build has no code objects; make test-gpu makes one that has"
    )]
    fn every_code_object_is_an_aligned_elf_file_or_a_text() {
        assert!(!CODE_OBJECTS.is_empty());
        for object in CODE_OBJECTS {
            if is_ptx(object.arch) {
                assert!(
                    object.image.is_ascii() && object.image.ends_with(b"\n\0"),
                    "{}",
                    object.file
                );
                continue;
            }
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

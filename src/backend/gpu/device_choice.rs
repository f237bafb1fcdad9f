//! Which devices are used: a pure function of what the user asks for and what there is.

use super::driver::{Device, ListedDevice};
use crate::error::{Error, Result};
use crate::options::DeviceChoice;

/// A runtime this library was built for.
#[derive(Debug)]
pub struct Runtime {
    /// `hip`, `cuda` or `simt`.
    pub name: &'static str,
    /// Its devices in the order of their ordinals, or why it cannot be asked.
    pub found: Result<Vec<ListedDevice>>,
}

/// What a device must be able to do.
pub struct Needs<'a> {
    /// The architectures there are code objects for.
    pub code: &'a [&'a str],
    /// Whether there are some that a device runs.
    pub runs: &'a dyn Fn(&Device) -> bool,
    /// Whether a device's kernels are those that serve any GPU, and none made for it.
    pub is_plain: &'a dyn Fn(&Device) -> bool,
    /// The memory that any part of the model takes at least.
    pub bytes: u64,
    /// The name of the option by which the user has chosen.
    pub asked_by: &'a str,
    /// Whether its kernels take the model, or why not.
    pub supports: &'a dyn Fn(&Device) -> std::result::Result<(), String>,
}

/// The devices to use. None is the CPU.
#[derive(Debug, Default)]
pub struct Chosen {
    /// In the order of use.
    pub devices: Vec<Device>,
    /// What the user should know.
    pub lines: Vec<String>,
}

/// Chooses.
///
/// `auto` takes every usable device and says of each other one why not; if that leaves none it is the CPU, with one
/// line. Of devices with plain kernels it takes some only if there are no others, which would wait for them. A choice
/// of the user's that cannot be met is an error.
pub fn choose(choice: &DeviceChoice, runtimes: &[Runtime], needs: &Needs<'_>) -> Result<Chosen> {
    match choice {
        DeviceChoice::Cpu => Ok(Chosen::default()),
        DeviceChoice::Auto => Ok(auto(runtimes, needs)),
        DeviceChoice::Gpu { runtime, ordinals } => {
            let found = devices_of(runtime, runtimes, needs)?;
            match ordinals.as_slice() {
                [] => all(runtime, found, needs),
                ordinals => some(runtime, found, ordinals, needs),
            }
        }
    }
}

/// The line for a model that runs on the CPU although a GPU would do.
pub fn cpu_line(reasons: &[String]) -> String {
    format!("running on the CPU: {}", reasons.join("; "))
}

/// The name a device has in [`DeviceChoice`], and what it is.
pub fn describe(device: &Device) -> String {
    format!(
        "{}:{} ({}, {})",
        device.runtime, device.ordinal, device.name, device.arch
    )
}

fn auto(runtimes: &[Runtime], needs: &Needs<'_>) -> Chosen {
    let mut chosen = Chosen::default();
    let mut reasons = Vec::new();
    for runtime in runtimes {
        match &runtime.found {
            Err(error) => reasons.push(error.to_string()),
            Ok(found) if found.is_empty() => reasons.push(format!("{} has no device", runtime.name)),
            Ok(found) => {
                let taken = sort_out(found, needs);
                chosen.devices.extend(taken.devices);
                chosen.lines.extend(taken.lines);
            }
        }
    }
    if chosen.devices.iter().any(|device| !(needs.is_plain)(device)) {
        let (plain, made): (Vec<_>, _) = chosen.devices.drain(..).partition(|device| (needs.is_plain)(device));
        chosen.devices = made;
        let why = "there are kernels made for other devices, and none made for it; choose it by its name";
        let lines = plain.iter().map(|device| not_used(device, why));
        chosen.lines.extend(lines);
    }
    if chosen.devices.is_empty() {
        reasons.append(&mut chosen.lines);
        if runtimes.is_empty() {
            let why = "this library was built without GPU support; build it with --features hip or cuda";
            reasons.push(why.into());
        }
        chosen.lines = vec![cpu_line(&reasons)];
    }
    chosen
}

/// The usable devices, and a line on each other one.
fn sort_out(found: &[ListedDevice], needs: &Needs<'_>) -> Chosen {
    let mut chosen = Chosen::default();
    for found in found {
        match obstacle(found, needs) {
            None => chosen.devices.push(found.device.clone()),
            Some(why) => chosen.lines.push(not_used(&found.device, &why)),
        }
    }
    chosen
}

fn not_used(device: &Device, why: &str) -> String {
    format!("{} is not used: {why}", describe(device))
}

/// Why a device cannot be used.
fn obstacle(found: &ListedDevice, needs: &Needs<'_>) -> Option<String> {
    const GIB: f64 = (1u64 << 30) as f64;
    if !(needs.runs)(&found.device) {
        let there = if needs.code.is_empty() {
            "none".into()
        } else {
            needs.code.join(", ")
        };
        return Some(format!(
            "no code object for this architecture (this library has {there})"
        ));
    }
    if found.total_bytes < needs.bytes {
        let (has, needs) = (found.total_bytes as f64 / GIB, needs.bytes as f64 / GIB);
        return Some(format!(
            "too little memory: it has {has:.1} GiB, and {needs:.1} GiB are the least that a part of the model takes"
        ));
    }
    (needs.supports)(&found.device).err()
}

fn devices_of<'a>(name: &str, runtimes: &'a [Runtime], needs: &Needs<'_>) -> Result<&'a [ListedDevice]> {
    let Some(runtime) = runtimes.iter().find(|runtime| runtime.name == name) else {
        return Err(needs.unmet(
            name,
            format!("this library was built without {name}; build it with --features {name}"),
        ));
    };
    match &runtime.found {
        Ok(found) => Ok(found),
        Err(error) => Err(needs.unmet(name, error)),
    }
}

fn all(runtime: &str, found: &[ListedDevice], needs: &Needs<'_>) -> Result<Chosen> {
    let chosen = sort_out(found, needs);
    if !chosen.devices.is_empty() {
        return Ok(chosen);
    }
    let why = match found {
        [] => "no device found".to_owned(),
        _ => chosen.lines.join("; "),
    };
    Err(needs.unmet(runtime, why))
}

fn some(runtime: &str, found: &[ListedDevice], ordinals: &[usize], needs: &Needs<'_>) -> Result<Chosen> {
    let mut chosen = Chosen::default();
    for ordinal in ordinals {
        let Some(found) = found.iter().find(|found| found.device.ordinal == *ordinal) else {
            return Err(needs.unmet(format_args!("{runtime}:{ordinal}"), there_are(found)));
        };
        if let Some(why) = obstacle(found, needs) {
            return Err(needs.unmet(describe(&found.device), why));
        }
        chosen.devices.push(found.device.clone());
    }
    Ok(chosen)
}

fn there_are(found: &[ListedDevice]) -> String {
    match found.len() {
        0 => "no device found".into(),
        1 => "there is one device, 0".into(),
        count => format!("there are {count} devices, 0 to {}", count - 1),
    }
}

impl Needs<'_> {
    fn unmet(&self, what: impl std::fmt::Display, why: impl std::fmt::Display) -> Error {
        Error::State(format!(
            "{} asks for {what}: {why}; choose another device, or auto or cpu",
            self.asked_by
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::GpuFault;

    const GIB: u64 = 1 << 30;
    const NEEDS: Needs<'_> = Needs {
        code: &["other", "new"],
        runs: &|device| device.arch != "old",
        is_plain: &|device| device.arch == "any",
        bytes: 16 * GIB,
        asked_by: "GETP_DEVICE",
        supports: &|_| Ok(()),
    };

    fn found(runtime: &'static str, ordinal: usize, arch: &str, gib: u64) -> ListedDevice {
        ListedDevice {
            device: Device {
                runtime,
                ordinal,
                name: "X".into(),
                arch: arch.into(),
                multiprocessors: 1,
            },
            total_bytes: gib * GIB,
        }
    }

    fn cuda(devices: &[(&str, u64)]) -> Runtime {
        let list = devices
            .iter()
            .enumerate()
            .map(|(ordinal, (arch, gib))| found("cuda", ordinal, arch, *gib));
        Runtime {
            name: "cuda",
            found: Ok(list.collect()),
        }
    }

    fn no_driver(name: &'static str) -> Runtime {
        Runtime {
            name,
            found: Err(Error::Gpu {
                device: name.into(),
                call: "dlopen".into(),
                fault: GpuFault::NoDriver,
                code: None,
            }),
        }
    }

    fn gpu(runtime: &'static str, ordinals: &[usize]) -> DeviceChoice {
        DeviceChoice::Gpu {
            runtime,
            ordinals: ordinals.to_vec(),
        }
    }

    fn ordinals(chosen: &Chosen) -> Vec<usize> {
        chosen.devices.iter().map(|device| device.ordinal).collect()
    }

    fn error(choice: &DeviceChoice, runtimes: &[Runtime]) -> String {
        choose(choice, runtimes, &NEEDS).unwrap_err().to_string()
    }

    #[test]
    fn auto_takes_every_usable_device_and_says_why_not_the_others() {
        let runtimes = [
            no_driver("hip"),
            cuda(&[("new", 141), ("old", 80), ("new", 8), ("new", 141)]),
        ];
        let chosen = choose(&DeviceChoice::Auto, &runtimes, &NEEDS).unwrap();
        assert_eq!(ordinals(&chosen), [0, 3]);
        assert_eq!(
            chosen.lines,
            [
                "cuda:1 (X, old) is not used: no code object for this architecture (this library has other, new)",
                "cuda:2 (X, new) is not used: too little memory: it has 8.0 GiB, and 16.0 GiB are the least that \
                 a part of the model takes",
            ]
        );
    }

    #[test]
    fn auto_takes_devices_with_plain_kernels_where_there_are_no_others() {
        let mixed = [cuda(&[("any", 24), ("new", 141)])];
        let chosen = choose(&DeviceChoice::Auto, &mixed, &NEEDS).unwrap();
        assert_eq!(ordinals(&chosen), [1]);
        assert_eq!(chosen.lines.len(), 1);
        let words = "cuda:0 (X, any) is not used: there are kernels made for other devices";
        assert!(chosen.lines[0].starts_with(words), "{:?}", chosen.lines);
        assert_eq!(ordinals(&choose(&gpu("cuda", &[]), &mixed, &NEEDS).unwrap()), [0, 1]);
        let alone = choose(&DeviceChoice::Auto, &[cuda(&[("any", 24), ("any", 24)])], &NEEDS).unwrap();
        assert_eq!((ordinals(&alone), alone.lines.len()), (vec![0, 1], 0));
    }

    #[test]
    fn auto_falls_back_to_the_cpu_with_one_line() {
        for (runtimes, words) in [
            (vec![no_driver("cuda")], "no working driver"),
            (vec![cuda(&[])], "cuda has no device"),
            (vec![cuda(&[("old", 80)])], "no code object for this architecture"),
            (vec![cuda(&[("new", 8), ("old", 8)])], "too little memory"),
            (
                vec![cuda(&[]), no_driver("hip")],
                "cuda has no device; hip: dlopen: no working driver",
            ),
        ] {
            let chosen = choose(&DeviceChoice::Auto, &runtimes, &NEEDS).unwrap();
            assert!(chosen.devices.is_empty());
            assert_eq!(chosen.lines.len(), 1, "{:?}", chosen.lines);
            assert!(
                chosen.lines[0].starts_with("running on the CPU: "),
                "{:?}",
                chosen.lines
            );
            assert!(chosen.lines[0].contains(words), "{:?}", chosen.lines);
        }
    }

    #[test]
    fn a_library_for_no_gpu_says_so() {
        let chosen = choose(&DeviceChoice::Auto, &[], &NEEDS).unwrap();
        assert!(chosen.devices.is_empty());
        assert_eq!(
            chosen.lines,
            ["running on the CPU: this library was built without GPU support; build it with --features hip or cuda"]
        );
    }

    #[test]
    fn the_cpu_needs_no_reason() {
        let chosen = choose(&DeviceChoice::Cpu, &[cuda(&[("new", 141)])], &NEEDS).unwrap();
        assert!(chosen.devices.is_empty() && chosen.lines.is_empty());
    }

    #[test]
    fn a_runtime_is_all_its_usable_devices() {
        let runtimes = [cuda(&[("old", 80), ("new", 141)])];
        let chosen = choose(&gpu("cuda", &[]), &runtimes, &NEEDS).unwrap();
        assert_eq!((ordinals(&chosen), chosen.lines.len()), (vec![1], 1));
        assert!(error(&gpu("cuda", &[]), &[cuda(&[])]).contains("no device found"));
        assert!(error(&gpu("cuda", &[]), &[cuda(&[("old", 80)])]).contains("no code object"));
    }

    #[test]
    fn named_devices_are_taken_in_the_order_named() {
        let runtimes = [cuda(&[("new", 141), ("new", 141), ("old", 80)])];
        assert_eq!(
            ordinals(&choose(&gpu("cuda", &[1, 0]), &runtimes, &NEEDS).unwrap()),
            [1, 0]
        );
        let message = error(&gpu("cuda", &[0, 2]), &runtimes);
        assert!(
            message.starts_with("GETP_DEVICE asks for cuda:2 (X, old): no code object"),
            "{message}"
        );
        let message = error(&gpu("cuda", &[7]), &runtimes);
        assert!(
            message.contains("cuda:7: there are 3 devices, 0 to 2; choose"),
            "{message}"
        );
    }

    #[test]
    fn a_runtime_that_is_not_there_is_an_error_that_says_what_to_do() {
        let message = error(&gpu("hip", &[]), &[cuda(&[])]);
        assert!(message.contains("build it with --features hip"), "{message}");
        let message = error(&gpu("hip", &[0]), &[no_driver("hip")]);
        assert!(message.contains("install the device's driver"), "{message}");
    }
}

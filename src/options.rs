//! The options, from the environment or from a C struct.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::str::FromStr;

/// The arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// float64 sums: on the CPU the eval program's logits bit for bit, on GPUs within a tolerance.
    Exact,
    /// The fastest arithmetic within the tolerances that ARCHITECTURE.md states.
    Fast,
}

/// Where the model runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On every GPU that can be used, or on the CPU if there is none.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On GPUs of one runtime.
    Gpu {
        /// One of [`RUNTIMES`].
        runtime: &'static str,
        /// The devices' numbers, each once; empty for all devices.
        ordinals: Vec<usize>,
    },
}

/// What is printed of each request on stdout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Print {
    /// Nothing.
    Nothing,
    /// The prompt followed by the answer, as the eval program's own code prints them.
    #[default]
    Text,
    /// The request's number in brackets, followed by the answer.
    Answer,
}

/// The GPU runtimes that can be named. `simt` emulates a GPU on the CPU, for tests.
pub const RUNTIMES: &[&str] = if cfg!(feature = "simt") {
    &["hip", "cuda", "simt"]
} else {
    &["hip", "cuda"]
};

/// All options, with defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `GETP_PRECISION=exact|fast`; `None` is the backend's default.
    pub precision: Option<Precision>,
    /// `GETP_DEVICE=auto|cpu|hip|cuda`, the last two optionally with devices' numbers (`cuda:0,2`).
    pub device: DeviceChoice,
    /// `GETP_THREADS=N`: threads of the CPU backend, and threads that tokenize, sample and pack weights on the host; 0 is one a
    /// core.
    /// Packing weights for GPUs takes one a core in any case.
    pub threads: usize,
    /// `GETP_MAX_BATCH=N`: the most sequences in one step; `None` is the backend's default.
    pub max_batch: Option<usize>,
    /// `GETP_STEP_TOKENS=N`: the most tokens in one step; `None` is the backend's default.
    pub step_tokens: Option<usize>,
    /// `GETP_KV_MB=N`: the most memory for a device's KV cache in MiB; 0 sizes it from free memory.
    pub kv_mb: usize,
    /// `GETP_GROUP=auto|N`: GPUs that make a replica together; `None` takes as few as have room.
    pub group: Option<usize>,
    /// `GETP_DEVICE_MB=N`: the most memory to use on each GPU in MiB; 0 is all that is free.
    pub device_mb: usize,
    /// `GETP_PRINT=0|1|answer`: what to print of each request on stdout.
    pub print: Print,
    /// `GETP_PROGRESS=0|1`: a progress bar on stderr, if that is a terminal.
    pub progress: bool,
    /// `GETP_PROFILE=0|1`: time each stage and print a table at the end.
    pub profile: bool,
    /// `GETP_LOGITS=FILE`: write the logits of every position, prompts included, to FILE. Each inference overwrites it.
    pub logits: Option<PathBuf>,
    /// `GETP_STRICT=0|1`: refuse weights that are not finite and prompts that would be cut, instead of printing a line.
    pub strict: bool,
    /// End tokens do not end answers, so that benchmarks get answers of a given length. No environment variable sets
    /// it.
    pub ignore_end: bool,
    /// What this process has of a machine that it shares with other ranks. No environment variable sets it.
    #[cfg(feature = "mpi")]
    pub part: Part,
}

/// What a process has of a machine that it shares with other ranks.
#[cfg(feature = "mpi")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The GPUs, by names that are the same for all processes of a machine; `None` where they are not shared.
    pub devices: Option<Vec<String>>,
    /// The ranks that share the host's memory.
    pub processes: usize,
}

#[cfg(feature = "mpi")]
impl Default for Part {
    fn default() -> Self {
        Self {
            devices: None,
            processes: 1,
        }
    }
}

/// The options that are set in one place, `None` where not set. A C struct goes before the environment, and that before
/// the defaults.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    /// See [`Options::precision`].
    pub precision: Option<Precision>,
    /// See [`Options::device`].
    pub device: Option<DeviceChoice>,
    /// See [`Options::threads`].
    pub threads: Option<usize>,
    /// See [`Options::max_batch`].
    pub max_batch: Option<usize>,
    /// See [`Options::step_tokens`].
    pub step_tokens: Option<usize>,
    /// See [`Options::kv_mb`].
    pub kv_mb: Option<usize>,
    /// See [`Options::group`]; `Some(None)` is `auto`.
    pub group: Option<Option<usize>>,
    /// See [`Options::device_mb`].
    pub device_mb: Option<usize>,
    /// See [`Options::print`].
    pub print: Option<Print>,
    /// See [`Options::progress`].
    pub progress: Option<bool>,
    /// See [`Options::profile`].
    pub profile: Option<bool>,
    /// See [`Options::logits`].
    pub logits: Option<PathBuf>,
    /// See [`Options::strict`].
    pub strict: Option<bool>,
}

/// Every environment variable that is read.
pub const VARIABLES: [&str; 13] = [
    "GETP_PRECISION",
    "GETP_DEVICE",
    "GETP_THREADS",
    "GETP_MAX_BATCH",
    "GETP_STEP_TOKENS",
    "GETP_KV_MB",
    "GETP_GROUP",
    "GETP_DEVICE_MB",
    "GETP_PRINT",
    "GETP_PROGRESS",
    "GETP_PROFILE",
    "GETP_LOGITS",
    "GETP_STRICT",
];

/// The most sequences and rows of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Sequences.
    pub max_batch: usize,
    /// Rows; at least `max_batch`.
    pub step_tokens: usize,
}

impl StepLimits {
    /// The CPU's default: enough sequences that each weight read from memory serves many, few enough that their KV
    /// caches fit a workstation, and more rows than that for prompts.
    pub const CPU: Self = Self {
        max_batch: 128,
        step_tokens: 512,
    };
    /// A GPU's default: its matrix cores need a hundred or more rows for each of the experts to be busy.
    pub const GPU: Self = Self {
        max_batch: 1024,
        step_tokens: 8192,
    };
}

// Limits far above what any machine needs: they only keep a mistyped value from allocating terabytes.
const MAX_ORDINAL: usize = 1023;
const MAX_THREADS: usize = 4096;
const MAX_BATCH: usize = 1 << 16;
const MAX_STEP_TOKENS: usize = 1 << 20;
const MAX_KV_MB: usize = 1 << 24;
const MAX_GROUP: usize = 1024;

impl Default for Options {
    fn default() -> Self {
        Self {
            precision: None,
            device: DeviceChoice::Auto,
            threads: 0,
            max_batch: None,
            step_tokens: None,
            kv_mb: 0,
            group: None,
            device_mb: 0,
            print: Print::Text,
            progress: true,
            profile: false,
            logits: None,
            strict: false,
            ignore_end: false,
            #[cfg(feature = "mpi")]
            part: Part::default(),
        }
    }
}

impl Options {
    /// The options of the process's environment, or defaults.
    pub fn from_env() -> Result<Self> {
        Choices::from_env()?.complete()
    }

    /// The longest sequence that the KV cache should be able to hold, memory permitting. For a model without
    /// `context_length` (a `.bin` or the program's struct) that is `seq_len`, unless GETP_KV_MB sets the memory.
    pub fn longest_sequence(&self, config: &ModelConfig) -> usize {
        match config.context_length {
            None if self.kv_mb == 0 => config.seq_len,
            _ => config.longest(),
        }
    }

    /// How many processes of ours share the host's memory.
    pub fn processes(&self) -> usize {
        #[cfg(feature = "mpi")]
        return self.part.processes;
        #[cfg(not(feature = "mpi"))]
        1
    }

    /// Bytes for the KV cache: GETP_KV_MB, or what `available` gives if that is 0.
    pub fn kv_bytes(&self, available: impl FnOnce() -> Result<usize>) -> Result<usize> {
        match self.kv_mb {
            0 => available(),
            mb => mb.checked_mul(1 << 20).ok_or(Error::Overflow("GETP_KV_MB")),
        }
    }

    /// The limits that are set, or a backend's defaults. If only one of the two is set, the other's default is adjusted
    /// so that a step has a row for each sequence.
    pub fn step_limits(&self, default: StepLimits) -> StepLimits {
        let most = self.step_tokens.unwrap_or(usize::MAX);
        let max_batch = self.max_batch.unwrap_or(default.max_batch.min(most));
        StepLimits {
            max_batch,
            step_tokens: self.step_tokens.unwrap_or(default.step_tokens.max(max_batch)),
        }
    }
}

impl Choices {
    /// Reads the process's environment, one variable after the other, since reading it whole would copy all of it.
    pub fn from_env() -> Result<Self> {
        let set = |name: &'static str| Some((name.into(), std::env::var_os(name)?));
        Self::from_vars(VARIABLES.into_iter().filter_map(set))
    }

    /// Reads the known variables among `vars`. One with an empty value counts as not set; unknown names are ignored
    /// here, and found by [`unknown_variables`].
    pub fn from_vars(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self> {
        let mut choices = Self::default();
        for (name, value) in vars {
            let known = VARIABLES.into_iter().find(|known| name == *known);
            if let Some(known) = known.filter(|_| !value.is_empty()) {
                choices.set(known, &value)?;
            }
        }
        Ok(choices)
    }

    fn set(&mut self, name: &'static str, value: &OsStr) -> Result<()> {
        match name {
            "GETP_PRECISION" => self.precision = Some(precision(name, value)?),
            "GETP_DEVICE" => self.device = Some(device(name, value)?),
            "GETP_THREADS" => self.threads = Some(number(name, value, 0, MAX_THREADS)?),
            "GETP_MAX_BATCH" => self.max_batch = Some(number(name, value, 1, MAX_BATCH)?),
            "GETP_STEP_TOKENS" => self.step_tokens = Some(number(name, value, 1, MAX_STEP_TOKENS)?),
            "GETP_KV_MB" => self.kv_mb = Some(number(name, value, 0, MAX_KV_MB)?),
            "GETP_GROUP" => self.group = Some(group(name, value)?),
            "GETP_DEVICE_MB" => self.device_mb = Some(number(name, value, 0, MAX_KV_MB)?),
            "GETP_PRINT" => self.print = Some(print(name, value)?),
            "GETP_PROGRESS" => self.progress = Some(switch(name, value)?),
            "GETP_PROFILE" => self.profile = Some(switch(name, value)?),
            "GETP_STRICT" => self.strict = Some(switch(name, value)?),
            _ => self.logits = Some(PathBuf::from(value)),
        }
        Ok(())
    }

    /// These options, and `other`'s where these are not set.
    pub fn or(self, other: Self) -> Self {
        Self {
            precision: self.precision.or(other.precision),
            device: self.device.or(other.device),
            threads: self.threads.or(other.threads),
            max_batch: self.max_batch.or(other.max_batch),
            step_tokens: self.step_tokens.or(other.step_tokens),
            kv_mb: self.kv_mb.or(other.kv_mb),
            group: self.group.or(other.group),
            device_mb: self.device_mb.or(other.device_mb),
            print: self.print.or(other.print),
            progress: self.progress.or(other.progress),
            profile: self.profile.or(other.profile),
            logits: self.logits.or(other.logits),
            strict: self.strict.or(other.strict),
        }
    }

    /// Fills in the defaults, and checks the values.
    pub fn complete(self) -> Result<Options> {
        let default = Options::default();
        let max_batch = self
            .max_batch
            .map(|n| within("GETP_MAX_BATCH", n, 1, MAX_BATCH))
            .transpose()?;
        // A step needs a row for each decoding sequence.
        let least = max_batch.unwrap_or(StepLimits::CPU.max_batch);
        let step_tokens = self.step_tokens;
        let step_tokens = step_tokens
            .map(|n| within("GETP_STEP_TOKENS", n, least, MAX_STEP_TOKENS))
            .transpose()?;
        Ok(Options {
            precision: self.precision,
            device: self.device.unwrap_or(default.device),
            threads: within("GETP_THREADS", self.threads.unwrap_or(default.threads), 0, MAX_THREADS)?,
            max_batch,
            step_tokens,
            kv_mb: within("GETP_KV_MB", self.kv_mb.unwrap_or(default.kv_mb), 0, MAX_KV_MB)?,
            group: match self.group.flatten() {
                Some(devices) => Some(within("GETP_GROUP", devices, 1, MAX_GROUP)?),
                None => None,
            },
            device_mb: within("GETP_DEVICE_MB", self.device_mb.unwrap_or(0), 0, MAX_KV_MB)?,
            print: self.print.unwrap_or(default.print),
            progress: self.progress.unwrap_or(default.progress),
            profile: self.profile.unwrap_or(default.profile),
            logits: self.logits,
            strict: self.strict.unwrap_or(default.strict),
            ignore_end: false,
            #[cfg(feature = "mpi")]
            part: Part::default(),
        })
    }
}

/// The names that begin with `GETP_` but are not known, in an environment of strings `name=value` that each end with a
/// NUL: the first few, sorted.
pub fn unknown_variables(environment: &[u8]) -> Vec<String> {
    const MOST: usize = 10;
    let names = environment.split(|&byte| byte == 0).filter_map(|variable| {
        let name = std::str::from_utf8(variable.split(|&byte| byte == b'=').next()?).ok()?;
        (name.starts_with("GETP_") && !VARIABLES.contains(&name)).then(|| name.to_owned())
    });
    let mut unknown: Vec<String> = names.take(MOST).collect();
    unknown.sort();
    unknown
}

fn precision(name: &'static str, value: &OsStr) -> Result<Precision> {
    match value.to_str() {
        Some("exact") => Ok(Precision::Exact),
        Some("fast") => Ok(Precision::Fast),
        _ => Err(unknown(name, value, "exact or fast".into())),
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        device("GETP_DEVICE", OsStr::new(text))
    }
}

/// Parses `auto`, `cpu`, a runtime's name, or a runtime's name followed by a colon and numbers separated by commas.
pub fn device(name: &'static str, value: &OsStr) -> Result<DeviceChoice> {
    let choice = value.to_str().and_then(|text| match text {
        "auto" => Some(DeviceChoice::Auto),
        "cpu" => Some(DeviceChoice::Cpu),
        _ => gpus(text),
    });
    let known = || {
        format!(
            "auto, cpu, {} or some of a runtime's devices as in cuda:0,2",
            RUNTIMES.join(", ")
        )
    };
    choice.ok_or_else(|| unknown(name, value, known()))
}

fn gpus(text: &str) -> Option<DeviceChoice> {
    let (name, list) = match text.split_once(':') {
        Some((name, list)) => (name, Some(list)),
        None => (text, None),
    };
    let runtime = RUNTIMES.iter().find(|runtime| **runtime == name)?;
    let mut ordinals = Vec::new();
    for number in list.into_iter().flat_map(|list| list.split(',')) {
        let ordinal = number.parse().ok().filter(|ordinal| *ordinal <= MAX_ORDINAL)?;
        if ordinals.contains(&ordinal) {
            return None;
        }
        ordinals.push(ordinal);
    }
    Some(DeviceChoice::Gpu { runtime, ordinals })
}

/// Devices of a replica; `None` is `auto`.
fn group(name: &'static str, value: &OsStr) -> Result<Option<usize>> {
    match value.to_str() {
        Some("auto") => Ok(None),
        text => text
            .and_then(|text| text.parse().ok())
            .filter(|n| (1..=MAX_GROUP).contains(n))
            .map(Some)
            .ok_or_else(|| unknown(name, value, format!("auto or a number from 1 to {MAX_GROUP}"))),
    }
}

fn print(name: &'static str, value: &OsStr) -> Result<Print> {
    match value.to_str() {
        Some("0") => Ok(Print::Nothing),
        Some("1") => Ok(Print::Text),
        Some("answer") => Ok(Print::Answer),
        _ => Err(unknown(name, value, "0, 1 or answer".into())),
    }
}

fn switch(name: &'static str, value: &OsStr) -> Result<bool> {
    match value.to_str() {
        Some("0") => Ok(false),
        Some("1") => Ok(true),
        _ => Err(unknown(name, value, "0 or 1".into())),
    }
}

fn number(name: &'static str, value: &OsStr, least: usize, most: usize) -> Result<usize> {
    value
        .to_str()
        .and_then(|text| text.parse().ok())
        .filter(|n| (least..=most).contains(n))
        .ok_or_else(|| unknown(name, value, format!("a number from {least} to {most}")))
}

fn within(name: &'static str, value: usize, least: usize, most: usize) -> Result<usize> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    let known = format!("a number from {least} to {most}");
    Err(unknown(name, value.to_string().as_ref(), known))
}

fn unknown(name: &'static str, value: &OsStr, known: String) -> Error {
    Error::Option {
        name,
        value: value.to_string_lossy().into_owned(),
        known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(vars: &[(&str, &str)]) -> Result<Options> {
        Choices::from_vars(vars.iter().map(|(n, v)| (n.into(), v.into())))?.complete()
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(parse(&[]).unwrap(), Options::default());
        assert_eq!(
            parse(&[("PATH", "/bin"), ("GETP_THREADS", "")]).unwrap(),
            Options::default()
        );
    }

    #[test]
    fn every_variable_is_read() {
        let options = parse(&[
            ("GETP_PRECISION", "fast"),
            ("GETP_DEVICE", "cuda:2,0"),
            ("GETP_THREADS", "3"),
            ("GETP_MAX_BATCH", "7"),
            ("GETP_STEP_TOKENS", "9"),
            ("GETP_KV_MB", "64"),
            ("GETP_GROUP", "2"),
            ("GETP_DEVICE_MB", "65536"),
            ("GETP_PRINT", "answer"),
            ("GETP_PROGRESS", "0"),
            ("GETP_PROFILE", "1"),
            ("GETP_LOGITS", "/tmp/l"),
            ("GETP_STRICT", "1"),
        ]);
        let expected = Options {
            precision: Some(Precision::Fast),
            device: DeviceChoice::Gpu {
                runtime: "cuda",
                ordinals: vec![2, 0],
            },
            threads: 3,
            max_batch: Some(7),
            step_tokens: Some(9),
            kv_mb: 64,
            group: Some(2),
            device_mb: 65_536,
            print: Print::Answer,
            progress: false,
            profile: true,
            logits: Some("/tmp/l".into()),
            strict: true,
            ignore_end: false,
            #[cfg(feature = "mpi")]
            part: Part::default(),
        };
        assert_eq!(options.unwrap(), expected);
    }

    #[test]
    fn an_unknown_value_names_the_known_ones() {
        let error = parse(&[("GETP_PRECISION", "half")]).unwrap_err().to_string();
        assert_eq!(error, "GETP_PRECISION=half is not known; use exact or fast");
        for (name, value) in [
            ("GETP_DEVICE", "gpu"),
            ("GETP_DEVICE", "cuda:"),
            ("GETP_DEVICE", "cuda:0,0"),
            ("GETP_DEVICE", "hip:-1"),
            ("GETP_DEVICE", "cpu:0"),
            ("GETP_THREADS", "-1"),
            ("GETP_THREADS", "two"),
            ("GETP_MAX_BATCH", "0"),
            ("GETP_STEP_TOKENS", "1e3"),
            ("GETP_KV_MB", "99999999999999999999"),
            ("GETP_GROUP", "0"),
            ("GETP_GROUP", "all"),
            ("GETP_DEVICE_MB", "-1"),
            ("GETP_PRINT", "yes"),
        ] {
            let error = parse(&[(name, value)]).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name}={value} is not known; use ")),
                "{error}"
            );
        }
    }

    #[test]
    fn devices_are_named_alone_or_with_numbers() {
        let read = |value: &str| parse(&[("GETP_DEVICE", value)]).unwrap().device;
        let all = DeviceChoice::Gpu {
            runtime: "hip",
            ordinals: vec![],
        };
        assert_eq!(read("auto"), DeviceChoice::Auto);
        assert_eq!(read("cpu"), DeviceChoice::Cpu);
        assert_eq!(read("hip"), all);
    }

    #[test]
    fn a_step_has_room_for_the_batch() {
        let limits = parse(&[("GETP_MAX_BATCH", "1000")])
            .unwrap()
            .step_limits(StepLimits::CPU);
        assert_eq!(limits.step_tokens, 1000);
        let error = parse(&[("GETP_STEP_TOKENS", "64")]).unwrap_err().to_string();
        assert!(error.contains("a number from 128 "), "{error}");
    }

    #[test]
    fn names_close_to_ours_are_told() {
        let environment = b"GETP_THREAD=1\0HOME=/\0GETP_PRINT=0\0\xff=GETP_\0GETP_BATCH\0";
        assert_eq!(unknown_variables(environment), ["GETP_BATCH", "GETP_THREAD"]);
        assert!(unknown_variables(b"").is_empty());
    }
}

//! What the user can choose, from the environment or from a C struct.

use crate::error::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// How numbers are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The program's own answers: float64 sums in its order.
    Exact,
    /// What the hardware does best within the gates of ARCHITECTURE.md.
    Fast,
}

/// The choices, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `GETP_PRECISION=exact|fast`; `None` lets the backend choose.
    pub precision: Option<Precision>,
    /// `GETP_THREADS=N`: worker threads of the CPU backend; 0 is one a core.
    pub threads: usize,
    /// `GETP_MAX_BATCH=N`: the most sequences in one step.
    pub max_batch: usize,
    /// `GETP_STEP_TOKENS=N`: the most tokens in one step.
    pub step_tokens: usize,
    /// `GETP_KV_MB=N`: the most memory for the KV cache in MiB; 0 sizes it from free memory.
    pub kv_mb: usize,
    /// `GETP_PRINT=0|1`: print each request's decoded text on stdout.
    pub print: bool,
    /// `GETP_PROGRESS=0|1`: a progress bar on stderr, if that is a terminal.
    pub progress: bool,
    /// `GETP_PROFILE=0|1`: time each stage and print a table at the end.
    pub profile: bool,
    /// `GETP_LOGITS=FILE`: write the logits of every position fed to FILE, which each inference begins anew.
    pub logits: Option<PathBuf>,
}

/// The choices made, `None` where none was: those of a C struct go before those of the environment, and those
/// before the defaults.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    /// See [`Options::precision`].
    pub precision: Option<Precision>,
    /// See [`Options::threads`].
    pub threads: Option<usize>,
    /// See [`Options::max_batch`].
    pub max_batch: Option<usize>,
    /// See [`Options::step_tokens`].
    pub step_tokens: Option<usize>,
    /// See [`Options::kv_mb`].
    pub kv_mb: Option<usize>,
    /// See [`Options::print`].
    pub print: Option<bool>,
    /// See [`Options::progress`].
    pub progress: Option<bool>,
    /// See [`Options::profile`].
    pub profile: Option<bool>,
    /// See [`Options::logits`].
    pub logits: Option<PathBuf>,
}

/// Every variable of the environment that is read.
pub const VARIABLES: [&str; 9] = [
    "GETP_PRECISION",
    "GETP_THREADS",
    "GETP_MAX_BATCH",
    "GETP_STEP_TOKENS",
    "GETP_KV_MB",
    "GETP_PRINT",
    "GETP_PROGRESS",
    "GETP_PROFILE",
    "GETP_LOGITS",
];

/// Enough sequences that each weight read serves many, few enough that their KV cache fits a workstation.
const DEFAULT_MAX_BATCH: usize = 128;
/// Room for prompts beside a full batch of sequences that generate.
const DEFAULT_STEP_TOKENS: usize = 512;

// Limits far above what any machine uses: they only keep a slip of the keyboard from asking for terabytes.
const MAX_THREADS: usize = 4096;
const MAX_BATCH: usize = 1 << 16;
const MAX_STEP_TOKENS: usize = 1 << 20;
const MAX_KV_MB: usize = 1 << 24;

impl Default for Options {
    fn default() -> Self {
        Self {
            precision: None,
            threads: 0,
            max_batch: DEFAULT_MAX_BATCH,
            step_tokens: DEFAULT_STEP_TOKENS,
            kv_mb: 0,
            print: true,
            progress: true,
            profile: false,
            logits: None,
        }
    }
}

impl Options {
    /// The choices of the process's environment over the defaults.
    pub fn from_env() -> Result<Self> {
        Choices::from_vars(std::env::vars_os())?.complete()
    }
}

impl Choices {
    /// Reads the variables named `GETP_*` among `vars`. One with an empty value counts as not set; unknown names
    /// are left to [`unknown_variables`].
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
            "GETP_THREADS" => self.threads = Some(number(name, value, 0, MAX_THREADS)?),
            "GETP_MAX_BATCH" => self.max_batch = Some(number(name, value, 1, MAX_BATCH)?),
            "GETP_STEP_TOKENS" => self.step_tokens = Some(number(name, value, 1, MAX_STEP_TOKENS)?),
            "GETP_KV_MB" => self.kv_mb = Some(number(name, value, 0, MAX_KV_MB)?),
            "GETP_PRINT" => self.print = Some(switch(name, value)?),
            "GETP_PROGRESS" => self.progress = Some(switch(name, value)?),
            "GETP_PROFILE" => self.profile = Some(switch(name, value)?),
            _ => self.logits = Some(PathBuf::from(value)),
        }
        Ok(())
    }

    /// These choices, and `other`'s where these have none.
    pub fn or(self, other: Self) -> Self {
        Self {
            precision: self.precision.or(other.precision),
            threads: self.threads.or(other.threads),
            max_batch: self.max_batch.or(other.max_batch),
            step_tokens: self.step_tokens.or(other.step_tokens),
            kv_mb: self.kv_mb.or(other.kv_mb),
            print: self.print.or(other.print),
            progress: self.progress.or(other.progress),
            profile: self.profile.or(other.profile),
            logits: self.logits.or(other.logits),
        }
    }

    /// These choices over the defaults, checked together.
    pub fn complete(self) -> Result<Options> {
        let default = Options::default();
        let max_batch = within(
            "GETP_MAX_BATCH",
            self.max_batch.unwrap_or(default.max_batch),
            1,
            MAX_BATCH,
        )?;
        // Who asks for a larger batch alone wants it filled, not an error about a default.
        let step_tokens = self.step_tokens.unwrap_or(default.step_tokens.max(max_batch));
        Ok(Options {
            precision: self.precision,
            threads: within("GETP_THREADS", self.threads.unwrap_or(default.threads), 0, MAX_THREADS)?,
            max_batch,
            // A step has a row for each sequence that generates.
            step_tokens: within("GETP_STEP_TOKENS", step_tokens, max_batch, MAX_STEP_TOKENS)?,
            kv_mb: within("GETP_KV_MB", self.kv_mb.unwrap_or(default.kv_mb), 0, MAX_KV_MB)?,
            print: self.print.unwrap_or(default.print),
            progress: self.progress.unwrap_or(default.progress),
            profile: self.profile.unwrap_or(default.profile),
            logits: self.logits,
        })
    }
}

/// The names among `names` that look like ours and are not, sorted.
pub fn unknown_variables(names: impl IntoIterator<Item = OsString>) -> Vec<String> {
    let mut unknown: Vec<String> = names
        .into_iter()
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name.starts_with("GETP_") && !VARIABLES.contains(&name.as_str()))
        .collect();
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
            ("GETP_THREADS", "3"),
            ("GETP_MAX_BATCH", "7"),
            ("GETP_STEP_TOKENS", "9"),
            ("GETP_KV_MB", "64"),
            ("GETP_PRINT", "0"),
            ("GETP_PROGRESS", "0"),
            ("GETP_PROFILE", "1"),
            ("GETP_LOGITS", "/tmp/l"),
        ]);
        let expected = Options {
            precision: Some(Precision::Fast),
            threads: 3,
            max_batch: 7,
            step_tokens: 9,
            kv_mb: 64,
            print: false,
            progress: false,
            profile: true,
            logits: Some("/tmp/l".into()),
        };
        assert_eq!(options.unwrap(), expected);
    }

    #[test]
    fn an_unknown_value_names_the_known_ones() {
        let error = parse(&[("GETP_PRECISION", "half")]).unwrap_err().to_string();
        assert_eq!(error, "GETP_PRECISION=half is not known; use exact or fast");
        for (name, value) in [
            ("GETP_THREADS", "-1"),
            ("GETP_THREADS", "two"),
            ("GETP_MAX_BATCH", "0"),
            ("GETP_STEP_TOKENS", "1e3"),
            ("GETP_KV_MB", "99999999999999999999"),
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
    fn a_step_has_room_for_the_batch() {
        assert_eq!(parse(&[("GETP_MAX_BATCH", "1000")]).unwrap().step_tokens, 1000);
        let error = parse(&[("GETP_STEP_TOKENS", "64")]).unwrap_err().to_string();
        assert!(error.contains("a number from 128 "), "{error}");
    }

    #[test]
    fn names_close_to_ours_are_told() {
        let names = ["GETP_THREAD", "HOME", "GETP_PRINT", "GETP_BATCH"].map(OsString::from);
        assert_eq!(unknown_variables(names), ["GETP_BATCH", "GETP_THREAD"]);
    }
}

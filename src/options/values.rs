//! What options can be, and how their values are written: as text in the environment and in strings of `getp_options`,
//! and as numbers in its other fields.

use crate::error::{Error, Result};
use crate::requests::Steps;
use std::ffi::{OsStr, OsString, c_int};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

/// The arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// float64 sums: on the CPU the eval program's logits bit for bit, on GPUs within a tolerance.
    Exact,
    /// The fastest arithmetic within the tolerances that docs/precision.md states.
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

/// Far above what any machine has: it only keeps a mistyped number from being taken.
const MAX_ORDINAL: usize = 1023;

/// A value as it is written.
#[derive(Clone, Copy, Debug)]
pub enum WrittenValue<'a> {
    /// In a variable, or in a string of the C struct.
    Text(&'a OsStr),
    /// In a number of the C struct, where 0 is an option that is not set.
    Number(c_int),
}

impl fmt::Display for WrittenValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => text.display().fmt(f),
            Self::Number(number) => number.fmt(f),
        }
    }
}

impl<'a> WrittenValue<'a> {
    fn text(self) -> Option<&'a str> {
        match self {
            Self::Text(text) => text.to_str(),
            Self::Number(_) => None,
        }
    }

    fn number(self) -> Option<usize> {
        match self {
            Self::Text(text) => text.to_str()?.parse().ok(),
            Self::Number(number) => number.try_into().ok(),
        }
    }
}

/// How the values of an option are written.
pub trait Kind {
    /// What they are.
    type Value;

    /// The value; `None` if it is not one of this kind.
    fn read(&self, written: WrittenValue<'_>) -> Option<Self::Value>;

    /// What can be written there, for the error: "use ...".
    fn known(&self, written: WrittenValue<'_>) -> String;
}

/// Reads the value of what `name` names, a variable or a field of the C struct. The error lists what can be written
/// there.
pub fn read<K: Kind, T: From<K::Value>>(kind: &K, name: &'static str, written: WrittenValue<'_>) -> Result<T> {
    let value = kind.read(written).map(T::from);
    value.ok_or_else(|| Error::Option {
        name,
        value: written.to_string(),
        known: kind.known(written),
    })
}

/// A number within a range.
pub struct Number(pub RangeInclusive<usize>);

impl Kind for Number {
    type Value = usize;

    fn read(&self, written: WrittenValue<'_>) -> Option<usize> {
        written.number().filter(|number| self.0.contains(number))
    }

    fn known(&self, _: WrittenValue<'_>) -> String {
        format!("a number from {} to {}", self.0.start(), self.0.end())
    }
}

/// `auto`, which is `None`, or a number within a range.
pub struct AutoOr(pub Number);

impl Kind for AutoOr {
    type Value = Option<usize>;

    fn read(&self, written: WrittenValue<'_>) -> Option<Option<usize>> {
        match written.text() {
            Some("auto") => Some(None),
            _ => self.0.read(written).map(Some),
        }
    }

    fn known(&self, written: WrittenValue<'_>) -> String {
        let number = self.0.known(written);
        match written {
            WrittenValue::Text(_) => format!("auto or {number}"),
            WrittenValue::Number(_) => number,
        }
    }
}

/// A value that has a name.
pub struct Word<T> {
    /// In the environment.
    pub text: &'static str,
    /// In C: the constant of getp.h.
    pub constant: &'static str,
    /// The constant's value.
    pub code: c_int,
    /// What it stands for.
    pub value: T,
}

/// One of these.
pub struct Words<T: 'static>(pub &'static [Word<T>]);

impl<T: Copy> Kind for Words<T> {
    type Value = T;

    fn read(&self, written: WrittenValue<'_>) -> Option<T> {
        let is_written = |word: &&Word<T>| match written {
            WrittenValue::Text(text) => text == word.text,
            WrittenValue::Number(number) => number == word.code,
        };
        self.0.iter().find(is_written).map(|word| word.value)
    }

    fn known(&self, written: WrittenValue<'_>) -> String {
        let name = |word: &Word<T>| match written {
            WrittenValue::Text(_) => word.text,
            WrittenValue::Number(_) => word.constant,
        };
        let names: Vec<_> = self.0.iter().map(name).collect();
        match names.split_last() {
            Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
            _ => names.concat(),
        }
    }
}

const fn word<T>(text: &'static str, constant: &'static str, code: c_int, value: T) -> Word<T> {
    Word {
        text,
        constant,
        code,
        value,
    }
}

/// On or off.
pub const SWITCH: Words<bool> = Words(&[word("0", "GETP_OFF", 2, false), word("1", "GETP_ON", 1, true)]);

/// The names of [`Precision`].
pub const PRECISION: Words<Precision> = Words(&[
    word("exact", "GETP_EXACT", 1, Precision::Exact),
    word("fast", "GETP_FAST", 2, Precision::Fast),
]);

/// The names of [`Print`].
pub const PRINT: Words<Print> = Words(&[
    word("0", "GETP_OFF", 2, Print::Nothing),
    word("1", "GETP_ON", 1, Print::Text),
    word("answer", "GETP_ANSWER", 3, Print::Answer),
]);

/// The names of [`Steps`].
pub const STEPS: Words<Steps> = Words(&[
    word("positions", "GETP_POSITIONS", 1, Steps::Positions),
    word("tokens", "GETP_TOKENS", 2, Steps::Tokens),
]);

/// The path of a file.
pub struct FilePath;

impl Kind for FilePath {
    type Value = PathBuf;

    fn read(&self, written: WrittenValue<'_>) -> Option<PathBuf> {
        match written {
            WrittenValue::Text(text) if !text.is_empty() => Some(OsString::from(text).into()),
            _ => None,
        }
    }

    fn known(&self, _: WrittenValue<'_>) -> String {
        "the path of a file".into()
    }
}

/// `auto`, `cpu`, a runtime's name, or a runtime's name followed by a colon and numbers separated by commas.
pub struct Devices;

impl Kind for Devices {
    type Value = DeviceChoice;

    fn read(&self, written: WrittenValue<'_>) -> Option<DeviceChoice> {
        match written.text()? {
            "auto" => Some(DeviceChoice::Auto),
            "cpu" => Some(DeviceChoice::Cpu),
            text => gpus(text),
        }
    }

    fn known(&self, _: WrittenValue<'_>) -> String {
        let runtimes = RUNTIMES.join(", ");
        format!("auto, cpu, {runtimes} or some of a runtime's devices as in cuda:0,2")
    }
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

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        read(&Devices, "GETP_DEVICE", WrittenValue::Text(text.as_ref()))
    }
}

//! The options, from the environment or from a C struct: one table of them.

mod values;

pub use values::{DeviceChoice, Precision, Print, RUNTIMES, WrittenValue};

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::requests::Steps;
use std::ffi::OsString;
use std::path::PathBuf;
use values::{AutoOr, Devices, FilePath, Number, PRECISION, PRINT, STEPS, SWITCH, read};

/// Passes the table of options to a macro. A row says what an option does; its name, here and in `getp_options`;
/// its type and default; its variable; how its values are written.
///
/// docs/options.md has the same table for users, and `abi/options.rs` the C struct, which cbindgen can read only there.
macro_rules! table {
    ($then:ident) => {
        $then! {
            /// The arithmetic; `None` is the backend's default.
            precision: Option<Precision> = None, "GETP_PRECISION", PRECISION;
            /// Where the model runs.
            device: DeviceChoice = DeviceChoice::Auto, "GETP_DEVICE", Devices;
            /// Threads of the CPU backend, and those that tokenize, sample and pack weights on the host; 0 is one a
            /// core.
            threads: usize = 0, "GETP_THREADS", Number(0..=4096);
            /// The most sequences in one step; `None` is the backend's default.
            max_batch: Option<usize> = None, "GETP_MAX_BATCH", Number(1..=1 << 16);
            /// The most tokens in one step; `None` is the backend's default.
            step_tokens: Option<usize> = None, "GETP_STEP_TOKENS", Number(1..=MAX_STEP_TOKENS);
            /// The most memory for a device's KV cache in MiB; 0 sizes it from free memory.
            kv_mb: usize = 0, "GETP_KV_MB", Number(0..=MAX_MB);
            /// GPUs that make a replica together; `None` takes as few as have room.
            group: Option<usize> = None, "GETP_GROUP", AutoOr(Number(1..=1024));
            /// The most memory to use on each GPU in MiB; 0 is all that is free.
            device_mb: usize = 0, "GETP_DEVICE_MB", Number(0..=MAX_MB);
            /// What to print of each request on stdout.
            print: Print = Print::Text, "GETP_PRINT", PRINT;
            /// A progress bar on stderr, if that is a terminal.
            progress: bool = true, "GETP_PROGRESS", SWITCH;
            /// Time each operation and print a table at the end.
            profile: bool = false, "GETP_PROFILE", SWITCH;
            /// The file to write the logits of every position to, prompts included. Each inference overwrites it.
            logits: Option<PathBuf> = None, "GETP_LOGITS", FilePath;
            /// Refuse weights that are not finite and prompts that would be cut, instead of printing a line.
            strict: bool = false, "GETP_STRICT", SWITCH;
            /// What the steps of a request count. Versions of the evaluation program differ in it.
            steps: Steps = Steps::Positions, "GETP_STEPS", STEPS;
        }
    };
}
pub(crate) use table;

// The largest numbers are far above what any machine needs: they only keep a mistyped one from allocating terabytes.
const MAX_STEP_TOKENS: usize = 1 << 20;
const MAX_MB: usize = 1 << 24;

/// What the table becomes: [`Options`], which has all options; [`Choices`], those that are set so far; and [`Names`],
/// by what each was set.
macro_rules! options {
    ($(
        $(#[$doc:meta])*
        $field:ident: $type:ty = $default:expr, $variable:literal, $kind:expr;
    )*) => {
        /// All options, with defaults filled in.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Options {
            $(
                $(#[$doc])*
                #[doc = concat!("\n\nIn the environment `", $variable, "`.")]
                pub $field: $type,
            )*
            /// What has set them.
            pub names: Names,
            /// End tokens do not end answers, so that benchmarks get answers of a given length. No environment variable
            /// sets it.
            pub ignore_end: bool,
            /// What this process has of a machine that it shares with other ranks. No environment variable sets it.
            pub share: MachineShare,
        }

        impl Default for Options {
            fn default() -> Self {
                Self {
                    $($field: $default,)*
                    names: Names::default(),
                    ignore_end: false,
                    share: MachineShare::default(),
                }
            }
        }

        /// For each option the name by which the user has set it, for messages: a field of the C struct, or else the
        /// variable.
        #[allow(missing_docs)] // the fields are the options
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Names {
            $(pub $field: &'static str,)*
        }

        impl Default for Names {
            fn default() -> Self {
                Self { $($field: $variable,)* }
            }
        }

        /// The options' environment variables.
        pub const VARIABLES: &[&str] = &[$($variable),*];

        /// The options that are set so far, `None` where not set, and by what. The C struct is read first, then of the
        /// environment what that has left.
        #[derive(Clone, Debug, Default)]
        pub struct Choices {
            $(
                #[doc = concat!("See [`Options::", stringify!($field), "`].")]
                pub $field: Option<$type>,
            )*
            /// What has set them.
            pub names: Names,
        }

        impl Choices {
            $(
                #[doc = concat!("Sets [`Options::", stringify!($field), "`], as `name` says.")]
                pub fn $field(&mut self, name: &'static str, written: WrittenValue<'_>) -> Result<()> {
                    self.$field = Some(read(&$kind, name, written)?);
                    self.names.$field = name;
                    Ok(())
                }
            )*

            /// Reads the variables of what is not set yet; the others may hold anything. One with an empty value counts
            /// as not set.
            pub fn or_variables(mut self, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
                $(
                    if self.$field.is_none()
                        && let Some(text) = variable($variable).filter(|text| !text.is_empty())
                    {
                        self.$field($variable, WrittenValue::Text(&text))?;
                    }
                )*
                Ok(self)
            }

            fn or_default(self) -> Options {
                let default = Options::default();
                Options {
                    $($field: self.$field.unwrap_or(default.$field),)*
                    names: self.names,
                    ..default
                }
            }
        }
    };
}
table!(options);

/// What a process has of a machine that it shares with other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineShare {
    /// The GPUs, by names that are the same for all processes of a machine; `None` where they are not shared.
    pub devices: Option<Vec<String>>,
    /// The ranks that share the host's memory.
    pub processes: usize,
}

impl Default for MachineShare {
    fn default() -> Self {
        Self {
            devices: None,
            processes: 1,
        }
    }
}

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
    /// A GPU's default: its matrix cores need a hundred or more rows for each of the experts to be busy. One that has a
    /// model alone may have longer steps (`backend::gpu::group::steps`).
    pub const GPU: Self = Self {
        max_batch: 1024,
        step_tokens: 8192,
    };
}

impl Options {
    /// The options of the process's environment, or defaults.
    pub fn from_env() -> Result<Self> {
        Choices::default().or_env()?.complete()
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
        self.share.processes
    }

    /// Bytes for the KV cache: GETP_KV_MB, or what `available` gives if that is 0.
    pub fn kv_bytes(&self, available: impl FnOnce() -> Result<usize>) -> Result<usize> {
        match self.kv_mb {
            0 => available(),
            mb => mb.checked_mul(1 << 20).ok_or(Error::Overflow(self.names.kv_mb)),
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
    /// Reads the process's environment, one variable after the other, since reading it whole would copy all of it. See
    /// [`Self::or_variables`].
    pub fn or_env(self) -> Result<Self> {
        self.or_variables(|name| std::env::var_os(name))
    }

    /// Fills in the defaults, and checks what depends on two options.
    pub fn complete(self) -> Result<Options> {
        let options = self.or_default();
        // A step needs a row for each decoding sequence.
        let sequences = options.max_batch.unwrap_or(StepLimits::CPU.max_batch);
        match options.step_tokens {
            Some(rows) if rows < sequences => Err(Error::Option {
                name: options.names.step_tokens,
                value: rows.to_string(),
                known: format!(
                    "a number from {sequences} (a row for each sequence of {}) to {MAX_STEP_TOKENS}",
                    options.names.max_batch
                ),
            }),
            _ => Ok(options),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use values::Kind;

    fn parse(vars: &[(&str, &str)]) -> Result<Options> {
        let value = |name: &str| Some(vars.iter().find(|(known, _)| *known == name)?.1.into());
        Choices::default().or_variables(value)?.complete()
    }

    /// A value of each variable that is not its default.
    const OTHERS: &[(&str, &str)] = &[
        ("GETP_PRECISION", "fast"),
        ("GETP_DEVICE", "cuda:2,0"),
        ("GETP_THREADS", "3"),
        ("GETP_MAX_BATCH", "7"),
        ("GETP_STEP_TOKENS", "129"),
        ("GETP_KV_MB", "64"),
        ("GETP_GROUP", "2"),
        ("GETP_DEVICE_MB", "65536"),
        ("GETP_PRINT", "answer"),
        ("GETP_PROGRESS", "0"),
        ("GETP_PROFILE", "1"),
        ("GETP_LOGITS", "/tmp/l"),
        ("GETP_STRICT", "1"),
        ("GETP_STEPS", "tokens"),
    ];

    /// A row of the table.
    struct Row {
        field: &'static str,
        variable: &'static str,
        /// What can be written into the variable.
        known: String,
    }

    fn rows() -> Vec<Row> {
        macro_rules! rows {
            ($($(#[$_doc:meta])* $field:ident: $_type:ty = $_default:expr, $variable:literal, $kind:expr;)*) => {
                vec![$(Row {
                    field: stringify!($field),
                    variable: $variable,
                    known: $kind.known(WrittenValue::Text("".as_ref())),
                }),*]
            };
        }
        table!(rows)
    }

    /// The fields in which two differ.
    fn differing(a: &Options, b: &Options) -> Vec<&'static str> {
        macro_rules! differing {
            ($($(#[$_doc:meta])* $field:ident: $_type:ty = $_default:expr, $_variable:literal, $_kind:expr;)*) => {
                [$((stringify!($field), a.$field != b.$field)),*]
            };
        }
        let fields = table!(differing).into_iter().filter(|(_, differs)| *differs);
        fields.map(|(field, _)| field).collect()
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
    fn each_variable_sets_its_own_option_alone() {
        for row in rows() {
            let other = OTHERS.iter().find(|(variable, _)| *variable == row.variable);
            let other = other.unwrap_or_else(|| panic!("say in OTHERS a value of {}", row.variable));
            let set = parse(&[*other]).unwrap();
            assert_eq!(differing(&set, &Options::default()), [row.field], "{}", row.variable);
            assert_eq!(set.names, Names::default());
        }
        assert_eq!(OTHERS.len(), VARIABLES.len());
    }

    #[test]
    fn variables_are_read_as_what_they_say() {
        let expected = Options {
            precision: Some(Precision::Fast),
            device: DeviceChoice::Gpu {
                runtime: "cuda",
                ordinals: vec![2, 0],
            },
            threads: 3,
            max_batch: Some(7),
            step_tokens: Some(129),
            kv_mb: 64,
            group: Some(2),
            device_mb: 65_536,
            print: Print::Answer,
            progress: false,
            profile: true,
            logits: Some("/tmp/l".into()),
            strict: true,
            steps: Steps::Tokens,
            ..Options::default()
        };
        assert_eq!(parse(OTHERS).unwrap(), expected);
    }

    /// The table of docs/options.md: of each variable its values and its default.
    fn documented() -> Vec<[&'static str; 3]> {
        let text = include_str!("../docs/options.md");
        let lines = text.lines().filter_map(|line| line.strip_prefix("| `GETP_"));
        let cells = |line: &'static str| line.split(" | ").collect::<Vec<_>>();
        let row = |line| match cells(line)[..] {
            [variable, values, default, _] => [variable.trim_end_matches('`'), values, default],
            _ => panic!("{line}"),
        };
        lines.map(row).collect()
    }

    #[test]
    fn the_document_has_the_table() {
        let (documented, rows) = (documented(), rows());
        let names: Vec<_> = documented.iter().map(|[name, ..]| format!("GETP_{name}")).collect();
        assert_eq!(names, VARIABLES, "in docs/options.md, in src/options.rs");
        for ([_, values, default], row) in documented.into_iter().zip(rows) {
            // "auto or a number from 1 to 1024" is there "`auto`, 1..1024", and "0 or 1" is "`0`, `1`".
            let (words, number) = match row.known.split_once("a number from ") {
                Some((words, number)) => (words.trim_end_matches("or "), Some(number.replace(" to ", ".."))),
                None => (row.known.as_str(), None),
            };
            let own = words.replace(" or ", ", ");
            let own = own.split(", ").map(str::trim).filter(|word| !word.is_empty());
            let mut expected: Vec<_> = own.map(|word| format!("`{word}`")).collect();
            expected.extend(number);
            match row.variable {
                "GETP_LOGITS" => assert_eq!(values, "a path"),
                // How devices are named it shows by an example; of the runtimes, simt is for tests.
                "GETP_DEVICE" => assert_eq!(values, "`auto`, `cpu`, `hip`, `cuda`, `cuda:0,2`"),
                _ => assert_eq!(values.trim_end_matches(" MiB"), expected.join(", "), "{}", row.variable),
            }
            // A default that is one value, and not each backend's own.
            let value = default.split(':').next().unwrap_or(default).trim_matches('`');
            if !value.contains(' ') && value != "none" {
                let set = parse(&[(row.variable, value)]).unwrap();
                assert_eq!(
                    differing(&set, &Options::default()),
                    [""; 0],
                    "{}: {default}",
                    row.variable
                );
            }
        }
    }

    /// A field of the struct in C whose comment does not name its variable, or a variable without a field.
    #[test]
    fn the_header_has_the_table() {
        let header = include_str!("../include/getp.h");
        let end = header.find("} getp_options;").unwrap();
        let start = header[..end].rfind("typedef struct").unwrap();
        let is_of_name = |c: char| c == '_' || c.is_ascii_uppercase();
        let (mut fields, mut comment) = (Vec::new(), String::new());
        for line in header[start..end].lines().skip(1) {
            if line.trim_start().starts_with(['/', '*']) {
                comment.push_str(line);
                continue;
            }
            let name = line.trim_end_matches(';').rsplit([' ', '*']).next().unwrap();
            let words = comment.split(|c| !is_of_name(c));
            let variables = words.filter_map(|word| VARIABLES.iter().find(|variable| word == **variable));
            fields.extend(variables.map(|variable| (name, *variable)));
            comment.clear();
        }
        let mut rows: Vec<_> = rows().iter().map(|row| (row.field, row.variable)).collect();
        rows.sort();
        fields.sort();
        assert_eq!(fields, rows, "in include/getp.h, in src/options.rs");
        // The constants are there with the values that the table has for them.
        let constant = |name: &str, code| {
            assert!(header.contains(&format!("#define {name} {code}\n")), "{name} is {code}");
        };
        PRECISION.0.iter().for_each(|word| constant(word.constant, word.code));
        PRINT.0.iter().for_each(|word| constant(word.constant, word.code));
        SWITCH.0.iter().for_each(|word| constant(word.constant, word.code));
        STEPS.0.iter().for_each(|word| constant(word.constant, word.code));
    }

    #[test]
    fn what_is_set_first_counts_and_the_rest_is_not_read() {
        let mut choices = Choices::default();
        choices
            .threads("getp_options.threads", WrittenValue::Number(5))
            .unwrap();
        let value = |name: &str| match name {
            "GETP_THREADS" => Some("many".into()),
            "GETP_MAX_BATCH" => Some("6".into()),
            _ => None,
        };
        let options = choices.or_variables(value).unwrap().complete().unwrap();
        assert_eq!((options.threads, options.max_batch), (5, Some(6)));
        let names = options.names;
        assert_eq!(
            (names.threads, names.max_batch),
            ("getp_options.threads", "GETP_MAX_BATCH")
        );
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
        let mut choices = Choices::default();
        choices
            .max_batch("getp_options.max_batch", WrittenValue::Number(9))
            .unwrap();
        let value = |name: &str| (name == "GETP_STEP_TOKENS").then(|| "8".into());
        let error = choices.or_variables(value).unwrap().complete().unwrap_err();
        assert_eq!(
            error.to_string(),
            "GETP_STEP_TOKENS=8 is not known; use a number from 9 (a row for each sequence of getp_options.max_batch) \
             to 1048576"
        );
    }

    #[test]
    fn names_close_to_ours_are_told() {
        let environment = b"GETP_THREAD=1\0HOME=/\0GETP_PRINT=0\0\xff=GETP_\0GETP_BATCH\0";
        assert_eq!(unknown_variables(environment), ["GETP_BATCH", "GETP_THREAD"]);
        assert!(unknown_variables(b"").is_empty());
    }
}

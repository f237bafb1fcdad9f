//! Makes a random model of any size, as a `.bin` file or as a directory, Hugging Face's or the release's original.
//!
//!     make_model model.bin --preset 20b --layers 2
//!     make_model model-hf --preset 7m --format safetensors --shards 3
//!     make_model 7m --format safetensors --tokenizer
//!     make_model original --preset 7m --format original

#[allow(dead_code)] // its command line is not used here
#[path = "export_tokenizer.rs"]
mod export_tokenizer;
#[path = "../tests/common/synthetic.rs"]
mod synthetic;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use getp::checkpoint::TensorLayout;
use getp::config::ModelConfig;
use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

use synthetic::{Dense, Directory, Experts, Synthetic, Temperament};

/// Makes a random gpt-oss model. The same seed gives the same values in all formats.
#[derive(Parser)]
struct Args {
    /// The `.bin` file or the directory to write.
    out: PathBuf,
    /// The dimensions to start from.
    #[arg(long, value_enum, default_value = "7m")]
    preset: Preset,
    #[command(flatten)]
    dims: Dims,
    /// Chooses the values.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How strongly layers change the residual stream.
    #[arg(long, value_enum, default_value = "tame")]
    temperament: Temperament,
    /// What to write.
    #[arg(long, value_enum, default_value = "bin")]
    format: Format,
    /// Files to split a directory into; more than one get an index, but for the original.
    #[arg(long, default_value_t = 1)]
    shards: usize,
    /// A safetensors directory gets a tokenizer.json and a generation_config.json, too, as the released ones have them.
    #[arg(long)]
    tokenizer: bool,
    /// MXFP4 experts of a safetensors directory are widened to bfloat16, as transformers saves them.
    #[arg(long)]
    dequantized: bool,
    /// What all values but the experts' matrices are.
    #[arg(long, value_enum, default_value = "bf16")]
    dense: Dense,
    /// What the experts' matrices are; mxfp4 only in the original.
    #[arg(long, value_enum, default_value = "mxfp4")]
    experts: Experts,
}

#[derive(Clone, Copy, ValueEnum)]
enum Preset {
    #[value(name = "7m")]
    Debug7m,
    #[value(name = "20b")]
    Oss20b,
    #[value(name = "120b")]
    Oss120b,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Bin,
    /// Hugging Face's directory.
    Safetensors,
    /// The release's original directory.
    Original,
}

/// Dimensions other than the preset's.
#[derive(clap::Args)]
#[command(next_help_heading = "Dimensions, instead of the preset's")]
struct Dims {
    #[arg(long)]
    vocab: Option<usize>,
    #[arg(long)]
    hidden: Option<usize>,
    #[arg(long)]
    n_experts: Option<usize>,
    #[arg(long)]
    experts_per_token: Option<usize>,
    #[arg(long)]
    intermediate: Option<usize>,
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long)]
    head_dim: Option<usize>,
    #[arg(long)]
    heads: Option<usize>,
    #[arg(long)]
    kv_heads: Option<usize>,
    #[arg(long)]
    seq_len: Option<usize>,
    #[arg(long)]
    context: Option<usize>,
    #[arg(long)]
    rope_theta: Option<f32>,
    #[arg(long)]
    rope_scaling: Option<f32>,
    #[arg(long)]
    window: Option<usize>,
    #[arg(long)]
    swiglu_limit: Option<f32>,
}

impl Dims {
    fn over(&self, preset: ModelConfig) -> ModelConfig {
        ModelConfig {
            vocab_size: self.vocab.unwrap_or(preset.vocab_size),
            hidden_dim: self.hidden.unwrap_or(preset.hidden_dim),
            n_experts: self.n_experts.unwrap_or(preset.n_experts),
            experts_per_token: self.experts_per_token.unwrap_or(preset.experts_per_token),
            intermediate_dim: self.intermediate.unwrap_or(preset.intermediate_dim),
            n_layers: self.layers.unwrap_or(preset.n_layers),
            head_dim: self.head_dim.unwrap_or(preset.head_dim),
            n_attn_heads: self.heads.unwrap_or(preset.n_attn_heads),
            n_kv_heads: self.kv_heads.unwrap_or(preset.n_kv_heads),
            seq_len: self.seq_len.unwrap_or(preset.seq_len),
            initial_context_length: self.context.unwrap_or(preset.initial_context_length),
            context_length: None,
            rope_theta: self.rope_theta.unwrap_or(preset.rope_theta),
            rope_scaling_factor: self.rope_scaling.unwrap_or(preset.rope_scaling_factor),
            yarn_ramp: None,
            rope_concentration: None,
            sliding_window: self.window.unwrap_or(preset.sliding_window),
            swiglu_limit: self.swiglu_limit.unwrap_or(preset.swiglu_limit),
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let preset = match args.preset {
        Preset::Debug7m => ModelConfig::preset_7m(),
        Preset::Oss20b => ModelConfig::preset_20b(),
        Preset::Oss120b => ModelConfig::preset_120b(),
    };
    let (config, seed, temperament) = (args.dims.over(preset), args.seed, args.temperament);
    let (dense, experts) = (args.dense, args.experts);
    let is_directory = matches!(args.format, Format::Safetensors);
    ensure!(
        is_directory || !args.tokenizer,
        "--tokenizer is for --format safetensors"
    );
    let vocab_size = config.vocab_size;
    ensure!(
        vocab_size >= LEAST_VOCAB || !args.tokenizer,
        "--tokenizer needs at least {LEAST_VOCAB} ids: the bytes and the tokens with a name"
    );
    let synthetic = Synthetic {
        config,
        seed,
        temperament,
        dense,
        experts,
    }
    .check()?;
    match args.format {
        Format::Bin => {
            let bar = announce(&args.out, TensorLayout::new(synthetic.config.clone())?.file_bytes())?;
            synthetic.write_bin(&args.out, &|bytes| bar.inc(bytes as u64))?;
            bar.finish();
        }
        Format::Safetensors | Format::Original => {
            let form = Directory {
                original: matches!(args.format, Format::Original),
                dequantized: args.dequantized,
                shards: args.shards,
            };
            let bar = announce(&args.out, synthetic.directory_bytes(form))?;
            synthetic.write_directory(&args.out, form, &|bytes| bar.inc(bytes as u64))?;
            bar.finish();
        }
    }
    if args.tokenizer {
        write_tokenizer(&args.out, vocab_size)?;
    }
    Ok(())
}

/// The fewest ids of a model with a tokenizer.
const LEAST_VOCAB: usize = 256 + export_tokenizer::NAMES;

/// The files beside a model of so many ids that its texts need. The released directories also have a
/// `chat_template.jinja`, which nothing here reads.
fn write_tokenizer(dir: &Path, vocab_size: usize) -> Result<()> {
    let write = |name: &str, write: &dyn Fn(&mut BufWriter<File>) -> std::io::Result<()>| {
        let path = dir.join(name);
        let file = File::create(&path).map(BufWriter::new);
        let written = file.and_then(|mut file| write(&mut file).and_then(|()| file.flush()));
        written.with_context(|| format!("cannot write {}", path.display()))
    };
    let entries = export_tokenizer::entries_of(vocab_size)?;
    let id = |name: &str| entries.iter().position(|(bytes, _)| bytes == name.as_bytes());
    let ends = ["<|return|>", "<|endoftext|>", "<|call|>"].map(id);
    let generation = serde_json::json!({
        "bos_token_id": id("<|startoftext|>"), "eos_token_id": ends, "pad_token_id": ends[1], "do_sample": true,
        "transformers_version": "4.55.0",
    });
    write("tokenizer.json", &|file| export_tokenizer::write_json(file, &entries))?;
    write("generation_config.json", &|file| writeln!(file, "{generation:#}"))
}

/// Says how large the model will be, and gives a line on stderr with bytes written, rate and time left.
fn announce(out: &Path, bytes: usize) -> Result<ProgressBar> {
    println!("{}: {}", out.display(), DecimalBytes(bytes as u64));
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")?;
    Ok(ProgressBar::new(bytes as u64).with_style(style))
}

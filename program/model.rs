//! A model, opened for the program: its tokenizer, and its weights on the devices.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use anyhow::{Result, anyhow, bail};
use getp::abi::lifecycle::warn_of_unknown_variables;
use getp::backend;
use getp::checkpoint::{self, Checkpoint, Generation};
use getp::cluster::launcher::{StartedBy, started_by};
use getp::config::ModelConfig;
use getp::engine::Engine;
use getp::options::Options;
use getp::report;
use getp::text::TextTokenizer;

/// Which model, and what encodes its texts.
#[derive(clap::Args)]
pub struct Place {
    /// The model's directory, or its .bin file.
    #[arg(short, long)]
    pub model: PathBuf,
    /// A tokenizer.json, or a directory with one, where the model's directory has none.
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
}

/// A model that is ready.
pub struct Model {
    pub checkpoint: Arc<dyn Checkpoint>,
    pub engine: Engine,
    pub tokenizer: Arc<TextTokenizer>,
    pub generation: Generation,
}

impl Place {
    /// What encodes and decodes texts.
    pub fn tokenizer(&self) -> Result<TextTokenizer> {
        Ok(TextTokenizer::open(self.tokenizer_path())?)
    }

    fn tokenizer_path(&self) -> &Path {
        self.tokenizer.as_ref().unwrap_or(&self.model)
    }

    /// Packs the weights. Meanwhile it reads the tokenizer, and prepares what else is needed.
    pub fn open<T: Send>(
        &self,
        prepare: impl FnOnce(&Arc<TextTokenizer>, &ModelConfig, &Generation) -> T + Send,
    ) -> Result<(Model, T)> {
        if let StartedBy::Together(_) | StartedBy::WithoutMpi(_) = started_by(|name| std::env::var(name).ok()) {
            bail!("getp runs as one process, which uses all GPUs of its host; start it without mpirun or srun");
        }
        warn_of_unknown_variables();
        let options = Options::from_env()?;
        let checkpoint = checkpoint::open(&self.model)?;
        let generation = checkpoint.generation();
        generation.ignored.iter().for_each(report::warning);
        let path = self.tokenizer_path();
        if !path.is_file() && !path.join("tokenizer.json").exists() {
            // It is told before the weights are packed.
            self.tokenizer()?;
        }
        let (engine, tokenizer, prepared) = thread::scope(|scope| {
            let tokenizer = scope.spawn(|| {
                let tokenizer = Arc::new(self.tokenizer()?);
                let prepared = prepare(&tokenizer, checkpoint.config(), &generation);
                Ok::<_, anyhow::Error>((tokenizer, prepared))
            });
            let engine = Engine::warm_up(&*checkpoint, options, &backend::open)?;
            let (tokenizer, prepared) = tokenizer
                .join()
                .map_err(|_| anyhow!("the tokenizer cannot be read"))??;
            Ok::<_, anyhow::Error>((engine, tokenizer, prepared))
        })?;
        let (tokens, models) = (tokenizer.vocabulary().vocab_size(), engine.config().vocab_size);
        if tokens > models {
            bail!("the tokenizer has {tokens} tokens, and the model {models}; name the model's own with --tokenizer");
        }
        let model = Model {
            checkpoint,
            engine,
            tokenizer,
            generation,
        };
        Ok((model, prepared))
    }
}

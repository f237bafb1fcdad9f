//! Structured answers: JSON schemas, regular expressions and grammars, compiled by llguidance.
//!
//! llguidance has a trie of the vocabulary, and walks it with a lexer and an Earley parser to find the tokens that can
//! come next. A schema with a keyword that it does not know is refused, not followed in part. It is the program's, as a
//! library that is linked with it exports its functions, too.

use getp::error::{Error, Result, cut};
use getp::grammar::{Grammar, Matcher};
use getp::memory::{self, Purpose};
use getp::text::{Specials, TextTokenizer};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher as Inner, ParserFactory};
use std::fmt;
use std::sync::Arc;

/// What an answer is to be like.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// JSON of this schema.
    Json(serde_json::Value),
    /// A text that matches a regular expression as a whole.
    Regex(String),
    /// A text of a grammar in llguidance's form of Lark.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Form {
    /// The field that asks for it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Json(_) => "the JSON schema",
            Self::Regex(_) => "structured_outputs.regex",
            Self::Lark(_) => "structured_outputs.grammar",
            Self::Choice(_) => "structured_outputs.choice",
        }
    }
}

/// Compiles forms for a vocabulary.
pub struct Compiler {
    factory: ParserFactory,
    ends: Arc<[u32]>,
}

impl Compiler {
    /// For a model with `vocab_size` logits, whose answers end with one of these tokens.
    pub fn new(tokenizer: Arc<TextTokenizer>, vocab_size: usize, ends: &[u32]) -> Result<Self> {
        let is_token = |&&end: &&u32| (end as usize) < vocab_size;
        let ends: Vec<u32> = ends.iter().filter(is_token).copied().collect();
        let Some(&end) = ends.first() else {
            let why = "it names no end token, and only with one can an answer of a given form end";
            return Err(Error::format("the model", why));
        };
        let word = |id: u32| match tokenizer.bytes(id, Specials::Text) {
            // Special tokens are marked, and what ends answers, so that no text has them.
            text if ends.contains(&id) && !text.is_empty() => [&[TokTrie::SPECIAL_TOKEN_MARKER], text].concat(),
            [] => match tokenizer.bytes(id, Specials::Tokens) {
                [] => Vec::new(),
                name => [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat(),
            },
            bytes => bytes.to_vec(),
        };
        let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, end), &words).with_eos_tokens(&ends);
        let environment: TokEnv = Arc::new(Environment { trie, tokenizer });
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|why| Error::Internal(format!("the vocabulary has no trie: {why}")))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self {
            factory,
            ends: ends.into(),
        })
    }

    /// Compiles a form, or says why it cannot be followed.
    pub fn compile(&self, form: &Form) -> Result<Arc<dyn Grammar>, String> {
        let grammar = match form {
            Form::Json(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Form::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Form::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Form::Choice(texts) => {
                let texts = texts
                    .iter()
                    // Lark has no such sign in a text, and JSON need not write it otherwise.
                    .map(|text| {
                        serde_json::Value::from(text.as_str())
                            .to_string()
                            .replace('\x7F', "\\u007F")
                    });
                // As a terminal, which is a regular expression: a rule may have 2,000 alternatives.
                TopLevelGrammar::from_lark(format!("start: TEXT\nTEXT: {}", texts.collect::<Vec<_>>().join(" | ")))
            }
        };
        let matcher = Inner::new(self.factory.create_parser(grammar));
        if let Some(why) = matcher.get_error() {
            return Err(told(&why));
        }
        // What has no text at all is found by its first mask.
        match matcher.deep_clone().compute_mask_or_eos() {
            Ok(first) if !first.is_zero() => Ok(Arc::new(Compiled {
                matcher,
                ends: self.ends.clone(),
            })),
            _ => Err("there is no such text".into()),
        }
    }
}

/// What llguidance has to know of the vocabulary.
struct Environment {
    trie: TokTrie,
    tokenizer: Arc<TextTokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<u32> {
        let encode = |text: &str| {
            self.tokenizer
                .encode(text.as_bytes(), Specials::Text)
                .unwrap_or_default()
        };
        self.trie.tokenize_with_greedy_fallback(text, encode)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.is_checkpoint_s()
    }
}

/// A grammar, as a matcher that has seen no token.
struct Compiled {
    matcher: Inner,
    ends: Arc<[u32]>,
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

impl Grammar for Compiled {
    fn matcher(&self) -> Box<dyn Matcher> {
        // With a lexer of its own: threads would wait for each other's.
        Box::new(Following {
            inner: self.matcher.deep_clone(),
            ends: self.ends.clone(),
            came: Vec::new(),
        })
    }
}

/// How far an answer has come.
struct Following {
    inner: Inner,
    ends: Arc<[u32]>,
    /// Tokens that came since it was last asked. It takes them when it is asked again: the engine asks all at once,
    /// each in a thread, and tells them their tokens one after the other.
    came: Vec<u32>,
}

impl Following {
    /// The matcher, with all tokens.
    fn inner(&mut self) -> &mut Inner {
        for token in self.came.drain(..) {
            // What goes wrong stays within, and is told with the next mask.
            if !self.inner.is_stopped() {
                let _ = self.inner.consume_token(token);
            }
        }
        &mut self.inner
    }
}

fn error(why: &impl ToString) -> Error {
    let why = format!("it cannot be followed any further: {}", told(&why.to_string()));
    Error::format("the answer's form", why)
}

/// The most characters of what llguidance says that are shown.
const MOST_SHOWN: usize = 200;

/// What llguidance says, as a line.
fn told(why: &str) -> String {
    cut(why.split_whitespace().collect::<Vec<_>>().join(" "), MOST_SHOWN)
}

impl fmt::Debug for Following {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Following")
    }
}

impl Matcher for Following {
    fn take(&mut self, token: u32) {
        self.came.push(token);
    }

    fn allows(&mut self, token: u32) -> Result<bool> {
        let ends_it = self.ends.contains(&token);
        let inner = self.inner();
        let is_whole = inner.is_stopped() && !inner.is_error();
        let allows = match ends_it {
            true => is_whole || inner.is_accepting().map_err(|why| error(&why))?,
            false => !is_whole && inner.validate_tokens(&[token]).map_err(|why| error(&why))? == 1,
        };
        Ok(allows)
    }

    fn mask(&mut self, mask: &mut Vec<u32>) -> Result<()> {
        let allowed = self.inner().compute_mask_or_eos();
        let allowed = allowed.map_err(|why| error(&why))?;
        if allowed.is_zero() {
            return Err(error(&"no token can go on with the answer, nor end it"));
        }
        mask.clear();
        memory::append(mask, allowed.as_slice(), Purpose::Draws)
    }
}

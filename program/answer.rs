//! An answer while its tokens come, and what is written of it.

use std::sync::Arc;

use anyhow::{Context, Result};
use getp::harmony::{self, Delta};
use getp::request::{End, Score};
use getp::text::{Decoder, Specials, TextTokenizer};
use serde_json::{Value, json};

use crate::body::{Asked, Form};
use crate::stops::{FoundString, Stops};

/// One answer to one prompt.
pub struct Answer {
    tokenizer: Arc<TextTokenizer>,
    text: Text,
    stops: Stops,
    /// Before the answer has more tokens than these, no string ends it.
    min_tokens: usize,
    tokens: Vec<u32>,
    scores: Vec<Score>,
    finish: Option<Finish>,
    /// Whether a grammar says what the user sees.
    has_form: bool,
}

/// Why an answer ends.
enum Finish {
    Token(End),
    String(FoundString),
}

/// What tokens become.
enum Text {
    Chat {
        reader: Box<harmony::Reader>,
        /// The number of the last message that the user sees.
        last: Option<usize>,
    },
    Plain(Decoder),
    /// None: the tokens of the prompt behind so many are scored.
    Score(usize),
}

impl Text {
    /// What the user sees of the answer with this token more.
    fn next(&mut self, token: u32) -> Result<String> {
        match self {
            Self::Plain(decoder) => Ok(decoder.next([token])?),
            Self::Score(_) => Ok(String::new()),
            Self::Chat { reader, last } => Ok(seen(reader.next([token])?, last)),
        }
    }

    /// What the user sees more of it now that it has ended.
    fn close(&mut self) -> Result<String> {
        match self {
            Self::Plain(decoder) => Ok(decoder.end()),
            Self::Score(_) => Ok(String::new()),
            Self::Chat { reader, last } => Ok(seen(reader.close()?, last)),
        }
    }

    /// Whether the token that ends the answer says how.
    fn reads_end(&self, token: u32) -> bool {
        match self {
            Self::Plain(_) | Self::Score(_) => false,
            Self::Chat { reader, .. } => reader.is_end(token),
        }
    }
}

/// What the user sees of these pieces; `last` is the number of the last message that he saw of.
fn seen(deltas: Vec<Delta>, last: &mut Option<usize>) -> String {
    let mut seen = String::new();
    for Delta { message, content, .. } in deltas.into_iter().filter(Delta::is_content) {
        if last.replace(message).is_some_and(|last| last != message) {
            seen += harmony::BETWEEN;
        }
        seen += &content;
    }
    seen
}

impl Answer {
    /// An answer without tokens.
    pub fn new(tokenizer: &Arc<TextTokenizer>, asked: &Asked) -> Result<Self> {
        Ok(Self {
            text: match &asked.form {
                Form::Chat(open) => Text::Chat {
                    reader: Box::new(harmony::Reader::going_on(tokenizer.clone(), open.clone())?),
                    last: None,
                },
                Form::Score(context) => Text::Score(*context),
                Form::Completion => Text::Plain(Decoder::new(tokenizer.clone(), Specials::Text)),
            },
            tokenizer: tokenizer.clone(),
            stops: Stops::new(asked.stops.clone()),
            min_tokens: asked.min_tokens,
            tokens: Vec::new(),
            scores: Vec::new(),
            finish: None,
            has_form: asked.grammar.is_some(),
        })
    }

    /// How many tokens it has that were asked for.
    pub fn len(&self) -> usize {
        match self.text {
            Text::Score(_) => 0,
            Text::Chat { .. } | Text::Plain(_) => self.tokens.len(),
        }
    }

    /// Takes scores of the prompt's tokens, from its second one on.
    pub fn take_prompt(&mut self, scores: &[Score]) {
        self.scores.extend_from_slice(scores);
    }

    /// Takes tokens and their scores, if there are any; the last token ends the answer as `end` says. Gives whether the
    /// answer has ended. It does where a string is found, and tokens behind that are dropped.
    pub fn take(&mut self, tokens: &[u32], scores: &[Score], end: Option<End>) -> Result<bool> {
        let mut scores = scores.iter();
        for (at, &token) in tokens.iter().enumerate() {
            if self.finish.is_some() {
                break;
            }
            self.tokens.push(token);
            self.scores.extend(scores.next().cloned());
            let is_text = match end.filter(|_| at + 1 == tokens.len()) {
                Some(End::EndToken(_) | End::StopToken(_)) => self.text.reads_end(token),
                Some(End::Length) | None => true,
            };
            if !is_text {
                continue;
            }
            let piece = self.text.next(token)?;
            self.look(&piece);
        }
        if let Some(end) = end.filter(|_| self.finish.is_none()) {
            let rest = self.text.close()?;
            self.look(&rest);
            self.finish.get_or_insert(Finish::Token(end));
        }
        Ok(self.finish.is_some())
    }

    /// Looks for a string that ends the answer in what the user sees of it more.
    fn look(&mut self, piece: &str) {
        if self.tokens.len() <= self.min_tokens {
            self.stops.pass(piece);
        } else {
            self.finish = self.stops.find(piece).map(Finish::String);
        }
    }

    /// What is written of it.
    pub fn choice(mut self, index: usize, logprobs: Option<usize>) -> Result<Value> {
        let logprobs = match self.text {
            Text::Score(context) => return self.score(context),
            Text::Chat { .. } => logprobs.map(|_| self.chat_logprobs()),
            Text::Plain(_) => logprobs.map(|_| self.plain_logprobs()),
        };
        let mut finish_reason = match self.finish {
            Some(Finish::Token(End::Length)) | None => "length",
            Some(Finish::Token(_) | Finish::String(_)) => "stop",
        };
        let stop_reason = match &self.finish {
            Some(Finish::String(found)) => json!(found.string),
            Some(Finish::Token(End::StopToken(token))) => json!(token),
            _ => Value::Null,
        };
        let cut = match &self.finish {
            Some(Finish::String(found)) => Some(self.stops.text()[..found.at].to_owned()),
            _ => None,
        };
        let mut choice = match &mut self.text {
            Text::Chat { reader, .. } => {
                let mut answer = reader.end()?;
                if self.has_form {
                    answer.keep_final();
                }
                if cut.is_some() {
                    answer.message.content = cut;
                } else if finish_reason == "stop" && answer.finish_reason == "tool_calls" {
                    finish_reason = "tool_calls";
                }
                json!({"message": answer.message})
            }
            Text::Plain(_) | Text::Score(_) => json!({"text": cut.as_deref().unwrap_or(self.stops.text())}),
        };
        choice["index"] = json!(index);
        choice["logprobs"] = json!(logprobs);
        choice["finish_reason"] = json!(finish_reason);
        choice["stop_reason"] = stop_reason;
        Ok(choice)
    }

    /// A token's bytes, its name if it is a special one.
    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.bytes(token, Specials::Tokens)
    }

    fn name(&self, token: u32) -> String {
        String::from_utf8_lossy(self.bytes(token)).into_owned()
    }

    /// A token's name where it is a field's: one that is no text by itself is given by its bytes, as OpenAI has it, so
    /// that no two have one name.
    fn key(&self, token: u32) -> String {
        let bytes = self.bytes(token);
        match str::from_utf8(bytes) {
            Ok(name) => name.to_owned(),
            Err(_) => bytes
                .iter()
                .fold("bytes:".into(), |name, byte| format!("{name}\\x{byte:02x}")),
        }
    }

    /// The log-probabilities of a continuation, and whether it is what the model would have written.
    fn score(&self, context: usize) -> Result<Value> {
        let scores = self
            .scores
            .get(context - 1..)
            .context("the scores of a prompt are missing")?;
        let is_largest = |score: &Score| score.top.first().is_some_and(|(token, _)| *token == score.token);
        Ok(json!({
            "logprob": scores.iter().map(|score| f64::from(score.logprob.max(LEAST))).sum::<f64>(),
            "is_greedy": scores.iter().all(is_largest),
            "tokens": scores.iter().map(|score| score.token).collect::<Vec<_>>(),
            "token_logprobs": scores.iter().map(|score| finite(score.logprob)).collect::<Vec<_>>(),
        }))
    }

    fn chat_logprobs(&self) -> Value {
        let one = |token: u32, logprob: f32| json!({"token": self.name(token), "logprob": finite(logprob), "bytes": self.bytes(token)});
        let content = self.scores.iter().map(|score| {
            let mut content = one(score.token, score.logprob);
            let top = score.top.iter().map(|&(token, logprob)| one(token, logprob));
            content["top_logprobs"] = top.collect();
            content
        });
        json!({"content": content.collect::<Value>()})
    }

    fn plain_logprobs(&self) -> Value {
        // Characters that have begun; a token that goes on with one has that one's offset.
        let mut begun: usize = 0;
        let mut text_offset = Vec::new();
        let goes_on = |byte: &u8| byte & 0xC0 == 0x80;
        for score in &self.scores {
            let bytes = self.bytes(score.token);
            text_offset.push(begun - usize::from(begun > 0 && bytes.first().is_some_and(goes_on)));
            begun += bytes.iter().filter(|byte| !goes_on(byte)).count();
        }
        let top = |score: &Score| -> Value {
            let named = score
                .top
                .iter()
                .map(|&(token, logprob)| (self.key(token), json!(finite(logprob))));
            Value::Object(named.collect())
        };
        json!({
            "tokens": self.scores.iter().map(|score| self.key(score.token)).collect::<Vec<_>>(),
            "token_logprobs": self.scores.iter().map(|score| finite(score.logprob)).collect::<Vec<_>>(),
            "top_logprobs": self.scores.iter().map(top).collect::<Vec<_>>(),
            "text_offset": text_offset,
        })
    }
}

/// A logarithm for JSON, which has no infinities: others, too, write this for that of 0. It has no more digits than
/// tell it from other float32.
fn finite(logprob: f32) -> f64 {
    let logprob = logprob.max(LEAST);
    logprob.to_string().parse().unwrap_or(logprob.into())
}

const LEAST: f32 = -9999.0;

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 256;

    /// A vocabulary of the bytes, and the special tokens of conversations behind them.
    fn tokenizer() -> Arc<TextTokenizer> {
        let entry = |score: f32, bytes: &[u8]| {
            let length = bytes.len() as u32;
            [&score.to_le_bytes(), &length.to_le_bytes(), bytes].concat()
        };
        let mut file = 1_u32.to_le_bytes().to_vec();
        (0..=u8::MAX).for_each(|byte| file.extend(entry(0.0, &[byte])));
        for name in [
            "return",
            "start",
            "message",
            "channel",
            "constrain",
            "end",
            "call",
            "endoftext",
        ] {
            file.extend(entry(-1e30, format!("<|{name}|>").as_bytes()));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.bin");
        std::fs::write(&path, file).unwrap();
        Arc::new(TextTokenizer::open(&path).unwrap())
    }

    fn answer(form: Form, stops: &[&str], min_tokens: usize) -> Answer {
        let asked = Asked {
            form,
            prompts: vec![vec![1]],
            n: 1,
            model: None,
            max_tokens: None,
            min_tokens,
            temperature: None,
            topp: None,
            seed: None,
            ignore_end: false,
            stop_tokens: Vec::new(),
            stops: stops.iter().map(|stop| (*stop).to_owned()).collect(),
            logprobs: None,
            grammar: None,
        };
        Answer::new(&tokenizer(), &asked).unwrap()
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    fn choice(answer: Answer) -> (usize, Value) {
        (answer.len(), answer.choice(0, None).unwrap())
    }

    /// However many tokens come at once.
    #[test]
    fn what_is_behind_a_stop_string_is_dropped() {
        let ends = Some(End::EndToken(END));
        for size in 1..=12 {
            let mut stopped = answer(Form::Completion, &["END"], 0);
            let tokens = [ids("an END of it"), vec![END]].concat();
            let has_ended = tokens.chunks(size).enumerate().any(|(at, chunk)| {
                let end = ends.filter(|_| (at + 1) * size >= tokens.len());
                stopped.take(chunk, &[], end).unwrap()
            });
            let (tokens, choice) = choice(stopped);
            assert!(has_ended && tokens == 6, "{size}");
            assert_eq!(
                (&choice["text"], &choice["stop_reason"]),
                (&json!("an "), &json!("END")),
                "{size}"
            );
        }
    }

    /// Each token is a byte, and three of them have no name of their own.
    #[test]
    fn tokens_within_a_character_have_its_offset_and_their_bytes() {
        let mut scored = answer(Form::Completion, &[], 0);
        let tokens = ids("aé→z");
        let score = |&token: &u32| Score {
            token,
            logprob: -1.0,
            top: vec![(0xE2, -1.0), (0x86, -2.0), (0x61, -3.0)],
        };
        let scores: Vec<Score> = tokens.iter().map(score).collect();
        scored.take(&tokens, &scores, Some(End::Length)).unwrap();
        let logprobs = &scored.choice(0, Some(3)).unwrap()["logprobs"];
        assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2, 2, 2, 3]));
        assert_eq!(logprobs["tokens"][2], "bytes:\\xa9");
        assert_eq!(
            logprobs["top_logprobs"][0],
            json!({"bytes:\\xe2": -1.0, "bytes:\\x86": -2.0, "a": -3.0})
        );
    }

    #[test]
    fn no_string_ends_an_answer_before_it_has_its_least_tokens() {
        let mut answer = answer(Form::Completion, &["a"], 3);
        assert!(!answer.take(&ids("aaa"), &[], None).unwrap());
        assert!(answer.take(&ids("ba"), &[], None).unwrap());
        assert_eq!(choice(answer).1["text"], "aaab");
    }

    #[test]
    fn the_token_that_ends_an_answer_is_no_text() {
        for (end, reason, stop_reason) in [
            (End::StopToken(u32::from(b'c')), "stop", json!(u32::from(b'c'))),
            (End::EndToken(u32::from(b'c')), "stop", Value::Null),
            (End::Length, "length", Value::Null),
        ] {
            let text = if end == End::Length { "abc" } else { "ab" };
            for form in [Form::Completion, Form::Chat(None)] {
                let is_chat = form != Form::Completion;
                let mut answer = answer(form, &[], 0);
                assert!(answer.take(&ids("abc"), &[], Some(end)).unwrap());
                let (tokens, choice) = choice(answer);
                let said = if is_chat {
                    &choice["message"]["content"]
                } else {
                    &choice["text"]
                };
                assert_eq!((tokens, said), (3, &json!(text)));
                assert_eq!(
                    (&choice["finish_reason"], &choice["stop_reason"]),
                    (&json!(reason), &stop_reason)
                );
            }
        }
    }

    /// What is thought holds no stop string, and neither do the arguments of a call.
    #[test]
    fn stop_strings_of_a_chat_are_in_what_the_user_sees() {
        let special = |name: &str| tokenizer().special(&format!("<|{name}|>")).unwrap();
        let message = |channel: &str, text: &str| {
            [
                vec![special("channel")],
                ids(channel),
                vec![special("message")],
                ids(text),
            ]
            .concat()
        };
        let next = [vec![special("end"), special("start")], ids("assistant")].concat();
        let mut stopped = answer(Form::Chat(None), &["x", "a\n\nb"], 0);
        let tokens = [
            message("analysis", "x"),
            next.clone(),
            message("commentary", "a"),
            next,
            message("final", "b and x"),
        ];
        assert!(stopped.take(&tokens.concat(), &[], None).unwrap());
        let message_of = |choice: &Value| choice["message"].clone();
        let (_, first) = choice(stopped);
        assert_eq!(
            message_of(&first),
            json!({"role": "assistant", "content": "", "reasoning": "x"})
        );
        assert_eq!(first["stop_reason"], "a\n\nb");

        let mut calls = answer(Form::Chat(None), &["x"], 0);
        let call = [
            ids("commentary"),
            ids(" to=functions.f"),
            vec![special("message")],
            ids("x"),
        ]
        .concat();
        let call = [vec![special("channel")], call, vec![special("call")]].concat();
        assert!(calls.take(&call, &[], Some(End::EndToken(special("call")))).unwrap());
        let (_, choice) = choice(calls);
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(
            choice["message"]["tool_calls"][0]["function"],
            json!({"name": "f", "arguments": "x"})
        );
    }
}

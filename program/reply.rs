//! A line of the output.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use crate::body::{Asked, Form};
use crate::output;

/// What becomes of a line of the input.
#[derive(Serialize)]
pub struct Reply<'a> {
    id: String,
    custom_id: Option<&'a str>,
    response: Option<Response<'a>>,
    error: Option<Failure<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Response<'a> {
    Answers {
        status_code: u16,
        request_id: String,
        body: Body<'a>,
    },
    Score(&'a Value),
}

#[derive(Serialize)]
struct Body<'a> {
    id: String,
    object: &'static str,
    created: u64,
    model: Option<&'a str>,
    choices: &'a [Option<Value>],
    usage: Usage,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct Failure<'a> {
    code: &'a str,
    message: &'a str,
}

impl<'a> Reply<'a> {
    /// The answers to what a line asks for; `tokens` are those of its prompts and of its answers.
    pub fn of_row(
        line: usize,
        custom_id: &'a str,
        asked: &'a Asked,
        ended: &'a [Option<Value>],
        tokens: [usize; 2],
    ) -> Self {
        let (prefix, object) = match asked.form {
            Form::Chat(_) => ("chatcmpl", "chat.completion"),
            Form::Completion => ("cmpl", "text_completion"),
            Form::Score(_) => return Self::score(line, custom_id, ended),
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let body = Body {
            id: format!("{prefix}-{line}"),
            object,
            created: since.map_or(0, |since| since.as_secs()),
            model: asked.model.as_deref(),
            choices: ended,
            usage: Usage {
                prompt_tokens: tokens[0],
                completion_tokens: tokens[1],
                total_tokens: tokens[0] + tokens[1],
            },
        };
        Self {
            id: output::id(line),
            custom_id: Some(custom_id),
            response: Some(Response::Answers {
                status_code: 200,
                request_id: format!("req_{line}"),
                body,
            }),
            error: None,
        }
    }

    fn score(line: usize, custom_id: &'a str, ended: &'a [Option<Value>]) -> Self {
        Self {
            id: output::id(line),
            custom_id: Some(custom_id),
            response: ended.first().and_then(Option::as_ref).map(Response::Score),
            error: None,
        }
    }

    /// Why a line has no answer.
    pub fn error(line: usize, custom_id: Option<&'a str>, code: &'a str, message: &'a str) -> Self {
        Self {
            id: output::id(line),
            custom_id,
            response: None,
            error: Some(Failure { code, message }),
        }
    }
}

use super::conversation::Tail;
use super::json::Json;
use super::*;
use crate::grammar::{self, Grammar, Matcher};
use crate::text::Specials;
use crate::text::tests::tokenizer_of;
use serde_json::json;
use std::sync::Arc;

const NAMES: [&str; 8] = [
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|endoftext|>",
];

/// A vocabulary of the bytes, the special tokens behind them, and one more that no rule knows.
fn tokenizer(names: &[&str]) -> Arc<TextTokenizer> {
    let specials = names.iter().chain(&["<|odd|>"]);
    let specials: Vec<_> = specials.map(|&name| (-1e30, name)).collect();
    Arc::new(tokenizer_of(1, |_| 0.0, &specials))
}

/// The ids of a text in which names stand for special tokens.
fn ids(text: &str) -> Vec<u32> {
    let names: Vec<&str> = NAMES.into_iter().chain(["<|odd|>"]).collect();
    let (mut rest, mut ids) = (text, Vec::new());
    while let Some(first) = rest.chars().next() {
        match names.iter().position(|name| rest.starts_with(name)) {
            Some(at) => {
                ids.push(256 + at as u32);
                rest = &rest[names[at].len()..];
            }
            None => {
                let (character, behind) = rest.split_at(first.len_utf8());
                ids.extend(character.bytes().map(u32::from));
                rest = behind;
            }
        }
    }
    ids
}

fn read(text: &str) -> serde_json::Value {
    let mut reader = Reader::new(tokenizer(&NAMES)).unwrap();
    let mut pieces: Vec<Delta> = Vec::new();
    for id in ids(text) {
        pieces.extend(reader.next([id]).unwrap());
    }
    let answer = reader.end().unwrap();
    // Pieces are the messages' texts, but for what was kept back at the very end.
    for (number, message) in answer.messages.iter().enumerate() {
        let own: Vec<_> = pieces.iter().filter(|piece| piece.message == number).collect();
        let whole: String = own.iter().map(|piece| piece.content.as_str()).collect();
        assert!(
            own.iter()
                .all(|piece| piece.channel == message.channel && piece.recipient == message.recipient)
        );
        assert!(message.content.starts_with(&whole), "{message:?}");
        assert!(
            whole == message.content || number + 1 == answer.messages.len(),
            "{message:?}"
        );
    }
    // The reader is as new.
    let mut whole = reader.next(ids(text)).unwrap();
    assert_eq!(reader.end().unwrap(), answer);
    whole.retain(|piece| !piece.content.is_empty());
    serde_json::to_value(answer).unwrap()
}

#[test]
fn an_answer_has_reasoning_and_content() {
    let answer = read(
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>final<|message|>It is 4: é.<|return|>",
    );
    assert_eq!(
        answer,
        json!({
            "message": {"role": "assistant", "content": "It is 4: é.", "reasoning": "2 + 2."},
            "finish_reason": "stop",
            "messages": [
                {"role": "assistant", "channel": "analysis", "content": "2 + 2."},
                {"role": "assistant", "channel": "final", "content": "It is 4: é."},
            ],
        })
    );
}

#[test]
fn calls_of_tools_are_read_wherever_the_recipient_stands() {
    let arguments = "{\"a\": 1}";
    for header in [
        " to=functions.add<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary to=functions.add<|constrain|>json",
        "<|channel|>commentary to=functions.add json",
        "<|channel|>commentary functions.add <|constrain|>json",
        "<|channel|>analysis to=functions.add code",
    ] {
        let answer = read(&format!("{header}<|message|>{arguments}<|call|>"));
        assert_eq!(answer["finish_reason"], "tool_calls", "{header}");
        assert_eq!(
            answer["message"],
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}},
            ]}),
            "{header}"
        );
        assert_eq!(answer["messages"][0]["recipient"], "functions.add");
    }
    let answer = read(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary\
         <|message|>{}<|call|>",
    );
    assert_eq!(answer["message"]["content"], "I look.");
    assert_eq!(answer["messages"][1].get("content_type"), None);
}

#[test]
fn what_is_cut_is_read_as_far_as_it_goes() {
    let answer = read("<|channel|>analysis<|message|>Let me th");
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(
        answer["message"],
        json!({"role": "assistant", "content": null, "reasoning": "Let me th"})
    );
    let answer = read("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final");
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["message"]["content"], "");
    let answer = read("<|channel|>analysis<|message|>So.<|end|><|start|>");
    assert_eq!(
        read("<|channel|>analysis<|message|>So.<|end|><|start|>assistant"),
        answer
    );
    assert_eq!(
        (&answer["finish_reason"], answer["messages"].as_array().unwrap().len()),
        (&json!("length"), 1)
    );
    assert_eq!(
        read("<|channel|>analysis<|message|>So.<|end|>")["finish_reason"],
        "length"
    );
    let answer = read("");
    assert_eq!(answer["message"], json!({"role": "assistant", "content": null}));
    assert_eq!(
        (&answer["finish_reason"], &answer["messages"]),
        (&json!("length"), &json!([]))
    );
    // A character that is cut.
    let mut reader = Reader::new(tokenizer(&NAMES)).unwrap();
    reader.next([ids("<|message|>a"), vec![0xE2, 0x82]].concat()).unwrap();
    assert_eq!(reader.end().unwrap().message.content.as_deref(), Some("a\u{FFFD}"));
}

#[test]
fn an_answer_without_channels_is_final() {
    for text in [
        "Paris.<|return|>",
        "<|message|>Paris.<|return|>",
        "assistant<|message|>Paris.<|endoftext|>",
        "<|start|>assistant<|message|>Paris.<|return|>",
        "<|channel|>final<|message|>Paris.<|return|>",
        "<|channel|>final <|constrain|>json<|message|>Paris.<|return|>",
        "<|channel|>final json<|message|>Paris.<|return|>",
    ] {
        let answer = read(text);
        assert_eq!(
            answer["message"],
            json!({"role": "assistant", "content": "Paris."}),
            "{text}"
        );
        assert_eq!(answer["finish_reason"], "stop", "{text}");
        assert_eq!(answer["messages"][0].get("ids"), None, "{text}");
    }
    // A call that names nobody is no call.
    let answer = read("<|channel|>commentary<|message|>{}<|call|>");
    assert_eq!(
        (&answer["finish_reason"], &answer["message"]["content"]),
        (&json!("stop"), &json!("{}"))
    );
}

#[test]
fn an_answer_may_go_on_with_a_message() {
    let open = |message: serde_json::Value| {
        let messages = json!([{"role": "user", "content": "x"}, message]);
        let conversation = json!({"messages": messages, "continue_final_message": true});
        let conversation = Conversation::parse(conversation.to_string().as_bytes()).unwrap();
        conversation.open_message().unwrap()
    };
    let read = |message: serde_json::Value, text: &str| {
        let mut reader = Reader::going_on(tokenizer(&NAMES), Some(open(message))).unwrap();
        // The text comes as it is read, and not when the answer has ended.
        let deltas = reader.next(ids(text)).unwrap();
        assert!(deltas[0].content.starts_with('m'), "{deltas:?}");
        serde_json::to_value(reader.end().unwrap().message).unwrap()
    };
    assert_eq!(
        read(json!({"role": "assistant", "content": "It is"}), "more.<|return|>"),
        json!({"role": "assistant", "content": "more."})
    );
    assert_eq!(
        read(
            json!({"role": "assistant", "reasoning": "Let me"}),
            "more<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
        ),
        json!({"role": "assistant", "content": "4", "reasoning": "more"})
    );
    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]});
    let read = read(call, "m}<|call|>");
    assert_eq!(
        read["tool_calls"][0]["function"],
        json!({"name": "f", "arguments": "m}"})
    );
    let conversation = Conversation::parse(b"[{\"role\": \"user\", \"content\": \"x\"}]").unwrap();
    assert_eq!(conversation.open_message(), None);
}

/// A grammar of texts that are the letter x, any number of times.
#[derive(Debug)]
struct Xs;

impl Grammar for Xs {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(Self)
    }
}

impl Matcher for Xs {
    fn take(&mut self, _: u32) {}

    fn allows(&mut self, token: u32) -> Result<bool> {
        Ok([u32::from(b'x'), ids("<|return|>")[0]].contains(&token))
    }

    fn mask(&mut self, mask: &mut Vec<u32>) -> Result<()> {
        mask.resize(9, 0);
        for token in [u32::from(b'x'), ids("<|return|>")[0]] {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }
}

/// Where in a text the first token is that a conversation with these tools does not allow; `None` if there is none. The
/// mask says the same as the answer for each token.
fn first_forbidden(tools: &[&str], open: Option<&Message>, text: &str) -> Option<usize> {
    first_forbidden_where("<|return|><|call|>", tools, open, text)
}

/// The same, where these tokens end an answer.
fn first_forbidden_where(ends: &str, tools: &[&str], open: Option<&Message>, text: &str) -> Option<usize> {
    let tokenizer = tokenizer(&NAMES);
    let tools: Vec<String> = tools.iter().map(|tool| (*tool).to_owned()).collect();
    let framed = Framed::new(
        Arc::new(Headers::new(&tokenizer, &tools, &ids(ends)).unwrap()),
        Arc::new(Xs),
    );
    let framed = match open {
        Some(message) => framed.going_on(message, ids("x")).unwrap(),
        None => framed,
    };
    let mut matcher = Grammar::matcher(&framed);
    ids(text).into_iter().position(|token| {
        let mut mask = Vec::new();
        matcher.mask(&mut mask).unwrap();
        let all = tokenizer.vocabulary().vocab_size() as u32;
        let allowed = (0..all).filter(|&token| matcher.allows(token).unwrap());
        assert!(allowed.eq(grammar::tokens(&mask)));
        let is_forbidden = !matcher.allows(token).unwrap();
        matcher.take(token);
        is_forbidden
    })
}

#[test]
fn a_final_message_has_a_form_within_a_frame() {
    let thought = "<|channel|>analysis<|message|>any thing<|end|><|start|>assistant";
    for whole in [
        "<|channel|>final<|message|>xxx<|return|>",
        "<|channel|>final <|constrain|>json<|message|>x<|return|>",
        &format!("{thought}<|channel|>final<|message|>x<|return|>"),
        // A thought that ends with the next one's beginning.
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|><|message|><|end|>",
        &format!("{thought}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>"),
        "<|channel|>commentary to=functions.fg<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>x",
    ] {
        assert_eq!(first_forbidden(&["f", "fg"], None, whole), None, "{whole}");
    }
    for (text, at) in [
        ("x", 0),
        ("<|message|>", 0),
        ("<|channel|>commentary<|message|>To you:", 11),
        ("<|channel|>finally", 6),
        ("<|channel|>final<|message|>xy", 8),
        ("<|channel|>analysis<|message|>a<|return|>", 11),
        ("<|channel|>analysis<|message|>a<|call|>", 11),
        ("<|channel|>analysis<|message|>a<|end|><|start|>user", 13),
        ("<|channel|>commentary to=functions.h", 25),
        ("<|channel|>commentary to=functions.f<|message|>{}<|return|>", 29),
        ("<|channel|>final<|message|>x<|end|>", 8),
    ] {
        assert_eq!(first_forbidden(&["f", "fg"], None, text), Some(at), "{text}");
    }
    assert_eq!(
        first_forbidden(&[], None, "<|channel|>commentary to=functions.f"),
        Some(1)
    );
}

/// What ends an answer ends no thought, and what ends none is no end of a call.
#[test]
fn a_frame_knows_what_ends_answers() {
    let thought = "<|channel|>analysis<|message|>a";
    let call = "<|channel|>commentary to=functions.f<|message|>a";
    for (ends, text, at) in [
        ("<|return|>", format!("{call}<|call|>"), 28),
        ("<|end|><|return|>", format!("{thought}<|end|>"), 11),
    ] {
        assert_eq!(
            first_forbidden_where(ends, &["f"], None, &text),
            Some(at),
            "{ends} {text}"
        );
    }
}

#[test]
fn a_message_that_goes_on_has_its_form_from_there() {
    let on = |channel: &str, recipient: Option<&str>| Message {
        channel: Some(channel.to_owned()),
        recipient: recipient.map(str::to_owned),
        ..Message::default()
    };
    assert_eq!(first_forbidden(&[], Some(&on("final", None)), "x<|return|>"), None);
    assert_eq!(first_forbidden(&[], Some(&on("final", None)), "y"), Some(0));
    let thought = on("analysis", None);
    assert_eq!(
        first_forbidden(&[], Some(&thought), "y<|end|><|start|>assistant<|channel|>final"),
        None
    );
    assert_eq!(first_forbidden(&[], Some(&thought), "y<|return|>"), Some(1));
    let call = on("commentary", Some("functions.f"));
    assert_eq!(first_forbidden(&["f"], Some(&call), "y<|call|>"), None);
}

#[test]
fn a_form_is_told_to_the_model_and_its_schema_to_whoever_samples() {
    let of = |format: serde_json::Value| {
        let messages = json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "?"}]);
        let request = json!({"messages": messages, "response_format": format});
        Conversation::parse(request.to_string().as_bytes()).unwrap()
    };
    let described = of(json!({"type": "json_schema", "json_schema": {
        "name": "fruit", "description": "One fruit.\nNo other.", "strict": true, "schema": {"maxLength": 9, "type": "string"}
    }}));
    assert_eq!(
        described.messages[1].texts[0],
        "# Instructions\n\nBe brief.\n\n# Response Formats\n\n## fruit\n\n// One fruit.\n// No other.\n\
         {\"maxLength\":9,\"type\":\"string\"}"
    );
    assert_eq!(
        described.response_schema().unwrap().to_string(),
        "{\"maxLength\":9,\"type\":\"string\"}"
    );
    let object = of(json!({"type": "json_object"}));
    assert_eq!(object.messages[1].texts[0], "# Instructions\n\nBe brief.");
    assert_eq!(object.response_schema().unwrap().to_string(), "{\"type\":\"object\"}");
    assert_eq!(of(json!({"type": "text"})).response_schema(), None);
}

#[test]
fn what_the_end_shows_to_be_text_is_given() {
    let mut reader = Reader::new(tokenizer(&NAMES)).unwrap();
    assert_eq!(reader.next(ids("no header")).unwrap(), []);
    let deltas = reader.close().unwrap();
    assert_eq!((deltas.len(), deltas[0].content.as_str()), (1, "no header"));
    assert!(deltas[0].is_content());
    assert_eq!(reader.close().unwrap(), []);
    assert_eq!(reader.end().unwrap().message.content.as_deref(), Some("no header"));
}

#[test]
fn headers_that_no_rule_knows_are_text() {
    for (text, content) in [
        (
            "<|channel|>thoughts<|message|>Hm.<|return|>",
            "<|channel|>thoughts<|message|>Hm.",
        ),
        ("<|channel|><|message|>Hm.<|return|>", "<|channel|><|message|>Hm."),
        (
            "<|channel|>analysis<|channel|>final<|message|>Hm.<|return|>",
            "<|channel|>analysis<|channel|>final<|message|>Hm.",
        ),
        (
            "<|channel|>final one two three<|message|>Hm.<|return|>",
            "<|channel|>final one two three<|message|>Hm.",
        ),
        (
            "<|channel|>final<|odd|><|message|>Hm.<|return|>",
            "<|channel|>final<|odd|><|message|>Hm.",
        ),
        ("<|channel|>what", "<|channel|>what"),
    ] {
        let answer = read(text);
        assert_eq!(answer["message"]["content"], content, "{text}");
        let expected = ids(text.trim_end_matches("<|return|>"));
        assert_eq!(answer["messages"][0]["ids"], json!(expected), "{text}");
    }
    // The messages beside it are what they are.
    let answer =
        read("<|channel|>analysis<|message|>So.<|end|>No header.<|end|><|start|>assistant<|message|>4<|return|>");
    assert_eq!(
        answer["message"],
        json!({"role": "assistant", "content": "No header.\n\n4", "reasoning": "So."})
    );
    // Other special tokens within a text are their names, and a message may lack its end.
    let answer = read("<|message|>a<|channel|>b<|message|>c<|odd|><|start|>assistant<|message|>d<|return|>");
    assert_eq!(answer["message"]["content"], "a<|channel|>b<|message|>c<|odd|>\n\nd");
    // Whom the model takes for somebody else does not speak for the assistant.
    let answer = read("<|message|>a<|end|><|start|>user<|message|>b<|return|>");
    assert_eq!(answer["message"]["content"], "a");
    assert_eq!(answer["messages"][1], json!({"role": "user", "content": "b"}));
}

/// Whatever the tokens are, and however they are cut.
#[test]
fn reading_never_fails_and_loses_nothing() {
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let tokenizer = tokenizer(&NAMES);
    let words = [
        "assistant",
        " to=functions.f",
        "analysis",
        "final",
        "commentary",
        "json",
        " ",
        "€",
        "x y z",
        "user",
    ];
    for _ in 0..3000 {
        let mut tokens = Vec::new();
        for _ in 0..random(14) {
            match random(3) {
                0 => tokens.push(256 + random(9) as u32),
                1 => tokens.extend(ids(words[random(words.len() as u64) as usize])),
                _ => tokens.push(random(300) as u32),
            }
        }
        let mut reader = Reader::new(tokenizer.clone()).unwrap();
        reader.next(tokens.iter().copied()).unwrap();
        let whole = reader.end().unwrap();
        let mut rest = tokens.as_slice();
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at((random(4) as usize).min(rest.len()));
            reader.next(piece.iter().copied()).unwrap();
            rest = behind;
        }
        assert_eq!(reader.end().unwrap(), whole, "{tokens:?}");
    }
}

#[test]
fn a_tokenizer_without_the_frame_is_refused() {
    let error = Reader::new(tokenizer(&NAMES[..3])).err().unwrap().to_string();
    assert!(error.contains("no special token <|constrain|>"), "{error}");
    let conversation = Conversation::parse(br#"[{"role": "user", "content": "a"}]"#).unwrap();
    let error = render(&tokenizer(&NAMES), &conversation).unwrap_err().to_string();
    assert!(error.contains("opened of a tokenizer.bin"), "{error}");
    let text = tokenizer(&NAMES).decode(ids("<|end|>a"), Specials::Tokens).unwrap();
    assert_eq!(text, b"<|end|>a");
}

/// The messages of a conversation: `author:name to=recipient channel type|text|text`.
fn messages(conversation: serde_json::Value) -> Vec<String> {
    let conversation = Conversation::parse(conversation.to_string().as_bytes()).unwrap();
    let shown = |message: &conversation::Message| {
        let mut out = message.author.clone();
        out += &message.name.iter().map(|name| format!(":{name}")).collect::<String>();
        out += &message
            .recipient
            .iter()
            .map(|name| format!(" to={name}"))
            .collect::<String>();
        out += &message.channel.map(|name| format!(" {name}")).unwrap_or_default();
        out += &message.content_type.map(|name| format!(" {name}")).unwrap_or_default();
        out + "|" + &message.texts.join("|")
    };
    conversation.messages.iter().map(shown).collect()
}

const SYSTEM: &str = "system|You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06";
const CHANNELS: &str = "# Valid channels: analysis, commentary, final. Channel must be included for every message.";

#[test]
fn a_list_of_messages_is_a_conversation() {
    let read = messages(json!([
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
         "name": "Ann"},
        {"role": "assistant", "id": "5", "content": "c", "reasoning": "d", "refusal": null, "tool_calls": [],
         "reasoning_details": []},
        {"role": "assistant", "content": null, "reasoning": "e"},
        {"role": "assistant", "content": null},
        {"role": "developer", "content": "Be rude."},
    ]));
    assert_eq!(
        read,
        [
            format!("{SYSTEM}\n\nReasoning: medium\n\n{CHANNELS}").as_str(),
            "developer|# Instructions\n\nBe kind.\n\nBe short.",
            "user:Ann|a|b",
            "assistant analysis|d",
            "assistant final|c",
            "assistant analysis|e",
            "assistant final|",
            "developer|# Instructions\n\nBe rude.",
        ]
    );
}

#[test]
fn a_request_says_more() {
    let read = messages(json!({
        "model": "gpt-oss-20b", "max_tokens": 3, "temperature": 0.5,
        "date": "2025-06-28", "reasoning_effort": "high", "knowledge_cutoff": "2024-07", "model_identity": "You are I.",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "d", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"a": [null, 1.5], "b": 1}}},
            ]},
            {"role": "tool", "tool_call_id": "2", "content": "g's"},
            {"role": "tool", "tool_call_id": "1", "content": "f's"},
            {"role": "tool", "name": "functions.h", "content": ""},
        ],
    }));
    assert_eq!(
        read,
        [
            &format!(
                "system|You are I.\nKnowledge cutoff: 2024-07\nCurrent date: 2025-06-28\n\nReasoning: high\n\n{CHANNELS}\n\
                 Calls to these tools must go to the commentary channel: 'functions'."
            ),
            "developer|# Tools\n\n## functions\n\nnamespace functions {\n\ntype f = () => any;\n\n} // namespace functions",
            "user|a",
            "assistant analysis|d",
            "assistant commentary|I look.",
            "assistant to=functions.f commentary <|constrain|>json|{}",
            "assistant to=functions.g commentary <|constrain|>json|{\"a\":[null,1.5],\"b\":1}",
            "functions.g to=assistant commentary|g's",
            "functions.f to=assistant commentary|f's",
            "functions.h to=assistant commentary|",
        ]
    );
}

#[test]
fn what_stands_behind_the_messages_is_the_caller_s() {
    let tail = |more: &str| {
        let json = format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {{\"role\": \"assistant\", \"content\": \"b\", \
             \"reasoning\": \"c\"}}]{more}}}"
        );
        Conversation::parse(json.as_bytes())
            .map(|conversation| conversation.tail)
            .map_err(|error| error.to_string())
    };
    assert_eq!(tail("").unwrap(), Tail::Answer);
    assert_eq!(tail(", \"add_generation_prompt\": false").unwrap(), Tail::Nothing);
    assert_eq!(tail(", \"continue_final_message\": true").unwrap(), Tail::Open(2));
    let both = tail(", \"continue_final_message\": true, \"add_generation_prompt\": true").unwrap_err();
    assert!(both.contains("exclude each other"), "{both}");
}

#[test]
fn what_nobody_can_mean_is_refused_by_name() {
    let with = |message: &str| format!("[{{\"role\": \"user\", \"content\": \"a\"}}, {message}]");
    let request = |field: &str| format!("{{\"messages\": [], {field}}}");
    for (json, words) in [
        ("{".to_owned(), "it is no JSON: EOF"),
        ("3".to_owned(), "it is 3; it must be an object"),
        ("{}".to_owned(), "messages is missing; it must be a list"),
        (request("\"tool\": []"), "tool is []; the field is not known here"),
        (
            request("\"tools\": [{\"function\": {}}]"),
            "tools[0].function.name is missing",
        ),
        (request("\"tools\": [{\"type\": \"web\"}]"), "tools[0].type is \"web\""),
        (request("\"tool_choice\": \"required\""), "tool_choice is \"required\""),
        (request("\"reasoning_effort\": \"max\""), "reasoning_effort is \"max\""),
        (
            request("\"response_format\": {\"type\": \"yaml\"}"),
            "response_format.type is \"yaml\"",
        ),
        (request("\"date\": 5"), "date is 5; it must be a text"),
        (
            request("\"continue_final_message\": true"),
            "where the last message is not the assistant's",
        ),
        (with("{\"content\": \"b\"}"), "messages[1].role is missing"),
        (
            with("{\"role\": \"bot\", \"content\": \"b\"}"),
            "messages[1].role is \"bot\"",
        ),
        (with("{\"role\": \"user\"}"), "messages[1].content is missing"),
        (
            with("{\"role\": \"user\", \"content\": 3}"),
            "messages[1].content is 3; it must be a text",
        ),
        (
            with("{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}"),
            "messages[1].content[0] is {\"type\":\"image_url\"}; only parts",
        ),
        (with("{\"role\": \"assistant\"}"), "messages[1].content is missing"),
        (
            with("{\"role\": \"assistant\", \"content\": \"\", \"reasoning\": \"a\", \"thinking\": \"b\"}"),
            "reasoning under several names",
        ),
        (
            with("{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"arguments\": \"\"}}]}"),
            "messages[1].tool_calls[0].function.name is missing",
        ),
        (
            with("{\"role\": \"tool\", \"tool_call_id\": \"9\", \"content\": \"\"}"),
            "tool_call_id is \"9\", which no call before it has",
        ),
    ] {
        let error = Conversation::parse(json.as_bytes()).unwrap_err().to_string();
        assert!(
            error.starts_with("conversation: ") && error.contains(words),
            "{json}: {error}"
        );
    }
}

#[test]
fn values_are_written_as_they_were_read() {
    for json in [
        "null",
        "[1,-2,1.5,true]",
        "{\"b\":\"\\n\u{e9}\",\"a\":{}}",
        "1e30",
        "1e-7",
        "0.0",
        "\"1e+3\"",
    ] {
        assert_eq!(serde_json::from_str::<Json>(json).unwrap().to_string(), json);
    }
    // The last value of a name counts, in the place of the first.
    let twice = serde_json::from_str::<Json>("{\"a\": 1, \"b\": 2, \"a\": 1E+30}").unwrap();
    assert_eq!(twice.to_string(), "{\"a\":1e30,\"b\":2}");
    // openai-harmony reads numbers like this, too: a few come out one unit off, and that is what it renders.
    let near = serde_json::from_str::<Json>("3e30").unwrap();
    assert_eq!(near.to_string(), "3.0000000000000003e30");
}

/// The example of the description of harmony.
#[test]
fn tools_are_types() {
    let schema = |json: &str| serde_json::from_str::<Json>(json).unwrap();
    let tool = |name: &str, description: &str, parameters: Option<&str>| tools::Tool {
        name: name.into(),
        description: description.into(),
        parameters: parameters.map(schema),
    };
    let section = tools::section(&[
        tool("get_location", "Gets the location of the user.", None),
        tool(
            "get_current_weather",
            "Gets the current weather in the provided location.",
            Some(
                r#"{"type": "object", "properties": {
                    "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                    "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
                }, "required": ["location"]}"#,
            ),
        ),
    ]);
    assert_eq!(
        section,
        "# Tools\n\n## functions\n\nnamespace functions {\n\n// Gets the location of the user.\n\
         type get_location = () => any;\n\n// Gets the current weather in the provided location.\n\
         type get_current_weather = (_: {\n// The city and state, e.g. San Francisco, CA\nlocation: string,\n\
         format?: \"celsius\" | \"fahrenheit\", // default: celsius\n}) => any;\n\n} // namespace functions"
    );
}

//! `getp`, the program, on a tiny model: its answers are those of the handles, whatever is among the lines, and however
//! often it is interrupted.

#[allow(dead_code)] // its command line is not used here
#[path = "../examples/export_tokenizer.rs"]
mod export_tokenizer;
#[path = "program/forms.rs"]
mod forms;
#[path = "common/synthetic.rs"]
mod synthetic;

use getp::config::ModelConfig;
use getp::harmony::{self, Conversation};
use getp::random::request_seed;
use getp::text::{Specials, TextTokenizer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use synthetic::{Temperament, write_safetensors};
use tempfile::TempDir;

const VOCABULARY: usize = 512;
/// The first of the tokens with a name, `<|startoftext|>`.
const FIRST_NAMED: usize = VOCABULARY - export_tokenizer::NAMES;
const OF_SEED_0: u64 = getp::abi::sampler::GETP_STATE_OF_SEED_0;

/// A model's directory as the released ones are, but tiny.
static MODEL: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let config = ModelConfig {
        vocab_size: VOCABULARY,
        n_experts: 4,
        ..ModelConfig::preset_7m()
    };
    write_safetensors(dir.path(), &config, 5, Temperament::Tame, 1).unwrap();
    let entries = export_tokenizer::entries_of(VOCABULARY).unwrap();
    let mut file = Vec::new();
    export_tokenizer::write_json(&mut file, &entries).unwrap();
    fs::write(dir.path().join("tokenizer.json"), file).unwrap();
    let ends = [4, 1, 14].map(|named| FIRST_NAMED + named);
    let generation = json!({"eos_token_id": ends, "do_sample": true, "temperature": 3.0, "max_new_tokens": 24});
    fs::write(dir.path().join("generation_config.json"), generation.to_string()).unwrap();
    dir
});
static TOKENIZER: LazyLock<Arc<TextTokenizer>> = LazyLock::new(|| Arc::new(TextTokenizer::open(MODEL.path()).unwrap()));

/// The same model with rows behind those of its tokenizer's tokens.
static PADDED: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let config = ModelConfig {
        vocab_size: VOCABULARY + 300,
        n_experts: 4,
        ..ModelConfig::preset_7m()
    };
    write_safetensors(dir.path(), &config, 5, Temperament::Tame, 1).unwrap();
    for file in ["tokenizer.json", "generation_config.json"] {
        fs::copy(MODEL.path().join(file), dir.path().join(file)).unwrap();
    }
    dir
});

fn getp(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_getp"));
    command.args(arguments).env("GETP_THREADS", "2").env("GETP_KV_MB", "16");
    command
}

/// A folder with a file of requests.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new(lines: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("requests.jsonl"), lines.join("\n")).unwrap();
        Self { dir }
    }

    fn answers(&self) -> PathBuf {
        self.dir.path().join("answers.jsonl")
    }

    fn command(&self, command: &str, more: &[&str]) -> Command {
        self.command_of(&MODEL, command, more)
    }

    fn command_of(&self, model: &TempDir, command: &str, more: &[&str]) -> Command {
        let (input, output) = (self.dir.path().join("requests.jsonl"), self.answers());
        let mut command = getp(&[command, "-m", model.path().to_str().unwrap()]);
        command
            .arg("-i")
            .arg(input)
            .arg("-o")
            .arg(output)
            .args(more)
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, command: &str, more: &[&str]) -> Output {
        self.command(command, more).output().unwrap()
    }

    /// Runs to the end; gives the answers by line, and what it said.
    fn all(&self, more: &[&str]) -> (BTreeMap<usize, Value>, String) {
        let output = self.run("batch", more);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        (rows(&self.answers()), said)
    }
}

#[test]
fn check_says_what_everything_is_taken_for() {
    let check = |dir: &Path| {
        let output = getp(&["check", dir.to_str().unwrap()]).output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        // Blanks between columns are left to it.
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        (output.status.success(), out.lines().map(words).collect::<Vec<_>>(), err)
    };
    let (is_right, lines, err) = check(MODEL.path());
    assert!(is_right, "{err}");
    for expected in [
        "config.json the model's dimensions",
        "tokenizer.json text to tokens and back",
        "vocab_size 512 used",
        "attention_bias true what is computed; no other value is supported",
        "rope_scaling.rope_type \"yarn\" used",
        "temperature 3.0 used where a request does not say otherwise",
        "the tokenizer: 512 tokens of 512",
    ] {
        assert!(lines.iter().any(|line| line == expected), "{expected}: {lines:#?}");
    }
    assert!(
        lines.iter().any(|line| line.starts_with("H100 80 GB one ")),
        "{lines:#?}"
    );

    // All that is wrong is said, and which file is none of the model's.
    let broken = tempfile::tempdir().unwrap();
    for file in fs::read_dir(MODEL.path()).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, broken.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = fs::read_to_string(broken.path().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    (config["attention_bias"], config["magic"], config["attention_dropout"]) = (json!(false), json!(7), json!(0.1));
    fs::write(broken.path().join("config.json"), config.to_string()).unwrap();
    fs::write(broken.path().join("notes.txt"), "").unwrap();
    let (is_right, lines, err) = check(broken.path());
    assert!(!is_right);
    for expected in [
        "notes.txt not read",
        "attention_bias false refused: only true is supported",
        "magic 7 refused: not known",
        "attention_dropout 0.1 ignored: changes no answer",
    ] {
        assert!(lines.iter().any(|line| line == expected), "{expected}: {lines:#?}");
    }
    assert!(err.contains("magic is 7"), "{err}");

    // A pipe that nobody writes to would be waited for.
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    ] {
        let odd = tempfile::tempdir().unwrap();
        for file in fs::read_dir(MODEL.path()).unwrap() {
            let path = file.unwrap().path();
            fs::copy(&path, odd.path().join(path.file_name().unwrap())).unwrap();
        }
        let pipe = odd.path().join(file);
        fs::remove_file(&pipe).unwrap();
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let (is_right, _, err) = check(odd.path());
        assert!(!is_right && err.contains("it is no file"), "{file}: {err}");
    }
}

/// What is not getp's is neither cut nor written to.
#[test]
fn no_other_file_is_taken_for_answers() {
    let place = Place::new(&[]);
    let foreign = "{\"a\": 1}";
    fs::write(place.answers(), foreign).unwrap();
    let output = place.run("batch", &["--resume"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("is no beginning of an answer"),
        "{said}"
    );
    assert_eq!(fs::read_to_string(place.answers()).unwrap(), foreign);

    fs::remove_file(place.answers()).unwrap();
    fs::hard_link(place.dir.path().join("requests.jsonl"), place.answers()).unwrap();
    let output = place.run("batch", &["--resume"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("the file of the requests"),
        "{said}"
    );
}

/// A line that is no request has the same custom_id, or none, when the run is gone on with.
#[test]
fn a_run_with_lines_that_are_no_requests_goes_on() {
    let deep = format!(
        "{{\"custom_id\":\"d\",\"body\":{}1{}}}",
        "[".repeat(200),
        "]".repeat(200)
    );
    let lines = [
        "{\"custom_id\":\"a\",\"body\":{\"prompt\":\"\\ud83d\"}}",
        "{\"custom_id\":\"b\",\"x\":1e999}",
        "{\"custom_id\":\"c\",\"custom_id\":\"e\",\"body\":{}}",
        "[\"a\"]",
        &deep,
    ];
    let place = Place::new(&lines.map(str::to_owned));
    let (first, _) = place.all(&[]);
    assert_eq!(first.len(), lines.len());
    let (again, _) = place.all(&["--resume"]);
    assert_eq!(first, again);
}

/// The answers of a file by line; each line once, and whole. When each was made is left out.
fn rows(path: &Path) -> BTreeMap<usize, Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let mut rows = BTreeMap::new();
    for line in text.lines() {
        let mut row: Value = serde_json::from_str(line).unwrap();
        if let Some(created) = row.pointer_mut("/response/body/created") {
            assert!(created.as_u64().unwrap() > 1_700_000_000);
            *created = Value::Null;
        }
        let number = row["id"]
            .as_str()
            .unwrap()
            .strip_prefix("batch_req_")
            .unwrap()
            .parse()
            .unwrap();
        assert!(rows.insert(number, row).is_none(), "line {number} twice");
    }
    rows
}

fn request(id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string()
}

fn chat(id: &str, body: Value) -> String {
    request(id, "/v1/chat/completions", body)
}

fn completion(id: &str, body: Value) -> String {
    request(id, "/v1/completions", body)
}

/// What the handles answer to a prompt: tokens, and their log-probabilities.
fn handles(prompt: &[u32], state: u64, temperature: f32, max_tokens: usize) -> (Vec<u32>, Vec<f32>) {
    let (tokens, scores, _) = handles_with_prompt(prompt, state, temperature, max_tokens);
    (tokens, scores)
}

/// The same, and the log-probabilities of the prompt's tokens from the second one on.
fn handles_with_prompt(
    prompt: &[u32],
    state: u64,
    temperature: f32,
    max_tokens: usize,
) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    use getp::abi::{batch::*, event::*, model::*, options::GETP_ON};
    use std::ptr::{null, null_mut};
    let path = std::ffi::CString::new(MODEL.path().to_str().unwrap()).unwrap();
    let prompt: Vec<i32> = prompt.iter().map(|id| id.cast_signed()).collect();
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let model = getp_model_open(path.as_ptr(), null());
        let batch = getp_batch_open(model, null());
        assert!(!batch.is_null());
        let mut request: Request = std::mem::zeroed();
        getp_request_init_sized(&mut request, size_of::<Request>());
        (request.prompt, request.prompt_length, request.seed) = (prompt.as_ptr(), prompt.len(), state);
        (request.temperature, request.max_tokens, request.logprobs) = (temperature, max_tokens, GETP_ON);
        request.prompt_logprobs = GETP_ON;
        assert_eq!(getp_batch_submit(batch, &request, null_mut()), 0);
        let mut event = null();
        assert_eq!(getp_batch_next(batch, 60.0, &mut event), 0);
        let told = &*event;
        let tokens = std::slice::from_raw_parts(told.tokens, told.count)
            .iter()
            .map(|id| id.cast_unsigned())
            .collect();
        let logprobs = |all: *const LogProb, count| {
            if count == 0 {
                return Vec::new();
            }
            let all = std::slice::from_raw_parts(all, count).iter();
            all.map(|score| score.logprob).collect()
        };
        let scores = logprobs(told.logprobs, told.count);
        let prompt_scores = logprobs(told.prompt_logprobs, told.prompt_count);
        getp_event_free(event);
        getp_batch_close(batch);
        getp_model_close(model);
        (tokens, scores, prompt_scores)
    }
}

fn is_end(id: u32) -> bool {
    [4, 1, 14].contains(&(id as usize).wrapping_sub(FIRST_NAMED))
}

/// The text of a completion of these tokens.
fn text(tokens: &[u32]) -> String {
    let kept = tokens.iter().copied().filter(|&id| !is_end(id));
    String::from_utf8_lossy(&TOKENIZER.decode(kept, Specials::Text).unwrap()).into_owned()
}

#[test]
fn answers_are_those_of_the_handles() {
    let messages = json!([{"role": "system", "content": "short"}, {"role": "user", "content": "<|end|> is text"}]);
    let ids: Vec<u32> = (40..60).collect();
    let place = Place::new(&[
        chat(
            "chat",
            json!({"model": "tiny", "messages": messages, "seed": 7, "max_tokens": 12}),
        ),
        chat("by its line", json!({"messages": messages, "reasoning_effort": "low"})),
        completion(
            "text",
            json!({"prompt": "a line\nand another", "max_tokens": 9, "temperature": 0}),
        ),
        completion("ids", json!({"prompt": ids, "max_tokens": 30, "n": 2, "logprobs": 0})),
        completion(
            "several",
            json!({"prompt": [[65], [66, 67]], "max_tokens": 5, "seed": 0}),
        ),
    ]);
    let (rows, said) = place.all(&[]);
    assert!(said.contains("5 answered, 0 errors, 0 left; "), "{said}");
    // Four blocks of the conversations, and one of the prompt that is answered twice.
    assert!(said.contains("; 80 tokens of all prompts shared; "), "{said}");

    let render = |body: Value| harmony::render(&TOKENIZER, &Conversation::parse(body.to_string().as_bytes()).unwrap());
    let check_chat = |line: usize, prompt: Vec<u32>, state: u64, max: usize| {
        let (tokens, _) = handles(&prompt, state, 3.0, max);
        let mut reader = harmony::Reader::new(TOKENIZER.clone()).unwrap();
        reader.next(tokens.iter().copied()).unwrap();
        let answer = reader.end().unwrap();
        let body = &rows[&line]["response"]["body"];
        assert_eq!(body["choices"][0]["message"], json!(answer.message));
        assert_eq!(body["choices"][0]["finish_reason"], answer.finish_reason);
        assert_eq!(body["usage"]["prompt_tokens"], prompt.len());
        assert_eq!(body["usage"]["completion_tokens"], tokens.len());
        assert_eq!(body["object"], "chat.completion");
    };
    check_chat(1, render(json!({"messages": messages})).unwrap(), 7, 12);
    assert_eq!(rows[&1]["response"]["body"]["model"], "tiny");
    assert_eq!(rows[&1]["custom_id"], "chat");
    let low = render(json!({"messages": messages, "reasoning_effort": "low"})).unwrap();
    check_chat(2, low, request_seed(OF_SEED_0, 1), 24);

    let choice = |line: usize, index: usize| &rows[&line]["response"]["body"]["choices"][index];
    let prompt = TOKENIZER.encode(b"a line\nand another", Specials::Text).unwrap();
    assert_eq!(choice(3, 0)["text"], text(&handles(&prompt, 1, 0.0, 9).0));
    for index in 0..2 {
        let (tokens, scores) = handles(&ids, request_seed(request_seed(OF_SEED_0, 3), index), 3.0, 30);
        assert_eq!(choice(4, index)["index"], index);
        assert_eq!(choice(4, index)["text"], text(&tokens));
        let written = choice(4, index)["logprobs"]["token_logprobs"].as_array().unwrap();
        let written: Vec<f32> = written.iter().map(|logprob| logprob.as_f64().unwrap() as f32).collect();
        assert_eq!(written, scores);
        let ends = tokens.last().is_some_and(|&id| is_end(id));
        assert_eq!(choice(4, index)["finish_reason"], if ends { "stop" } else { "length" });
    }
    assert_ne!(choice(4, 0)["text"], choice(4, 1)["text"]);
    for (index, prompt) in [&[65][..], &[66, 67]].into_iter().enumerate() {
        assert_eq!(
            choice(5, index)["text"],
            text(&handles(prompt, request_seed(OF_SEED_0, index), 3.0, 5).0)
        );
    }
    assert_eq!(rows[&5]["response"]["body"]["usage"]["prompt_tokens"], 3);
}

/// What a run says that cannot begin.
fn refused(arguments: &[&str]) -> String {
    let output = getp(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).unwrap()
}

/// A vocabulary that is padded beyond the tokenizer's: the answers of a model without the padding, greedy, sampled and
/// of a nucleus, and log-probabilities over all ids.
#[test]
fn ids_that_a_vocabulary_is_padded_with_are_not_sampled() {
    let kinds = [(0.0, 1.0), (1.0, 1.0), (2.0, 0.9)];
    let body = |(temperature, top_p): (f32, f32), prompt: usize| {
        json!({"prompt": [prompt, 7, 9], "max_tokens": 40, "ignore_eos": true, "temperature": temperature,
               "top_p": top_p, "logprobs": 1, "seed": prompt})
    };
    let lines = kinds.iter().flat_map(|&kind| (1..9).map(move |prompt| (kind, prompt)));
    let lines: Vec<String> = lines
        .map(|(kind, prompt)| completion(&format!("{kind:?} {prompt}"), body(kind, prompt)))
        .collect();
    let answers = |model: &TempDir, more: &[&str], precision: &str| {
        let place = Place::new(&lines);
        let mut command = place.command_of(model, "batch", more);
        let output = command.env("GETP_PRECISION", precision).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        (rows(&place.answers()), said)
    };
    let choice = |row: &Value| row["response"]["body"]["choices"][0].clone();
    let text = |row: &Value| choice(row)["text"].as_str().unwrap().to_owned();
    let first_logprob = |row: &Value| choice(row)["logprobs"]["token_logprobs"][0].as_f64().unwrap();
    for precision in ["exact", "fast"] {
        let (own, said) = answers(&MODEL, &[], precision);
        assert!(!said.contains("never sampled"), "{said}");
        let (padded, said) = answers(&PADDED, &[], precision);
        let line = "the model has 812 ids and the tokenizer 512; the others are never sampled";
        assert!(said.contains(line), "{said}");
        let texts = |rows: &BTreeMap<usize, Value>| rows.values().map(text).collect::<Vec<_>>();
        assert_eq!(texts(&own), texts(&padded), "{precision}");
        let less = own
            .values()
            .zip(padded.values())
            .all(|(own, padded)| first_logprob(padded) < first_logprob(own));
        assert!(less, "{precision}: log-probabilities are over all ids");
        let (all, said) = answers(&PADDED, &["--sample-padding"], precision);
        assert!(!said.contains("never sampled"), "{said}");
        let others = own
            .values()
            .zip(all.values())
            .filter(|(own, all)| text(own) != text(all))
            .count();
        assert!(others > 20, "{precision}: {others}");
    }
}

#[test]
fn what_cannot_begin_says_why() {
    let place = Place::new(&[completion("a", json!({"prompt": "a"}))]);
    let name = |name: &str| place.dir.path().join(name).to_str().unwrap().to_owned();
    let (requests, answers, model) = (
        name("requests.jsonl"),
        name("answers.jsonl"),
        MODEL.path().to_str().unwrap(),
    );
    let run = |model: &str, input: &str, output: &str| refused(&["batch", "-m", model, "-i", input, "-o", output]);
    let none = run(&name("none"), &requests, &answers);
    assert!(
        none.ends_with("/none: No such file or directory (os error 2)\n"),
        "{none}"
    );
    assert!(run(model, &name("none"), &answers).contains("/none: No such file"));
    assert!(run(model, &name(""), &answers).contains("it is no file; write the requests to one"));
    assert!(run(model, &requests, &name("none/answers")).contains("none/answers: No such file"));
    for more in [&[][..], &["--resume"]] {
        let same = [&["batch", "-m", model, "-i", &requests, "-o", &requests], more].concat();
        assert!(refused(&same).contains("cannot be written to the file of the requests; name another one"));
    }
    let taken = name("taken.jsonl");
    fs::copy(&requests, &taken).unwrap();
    assert!(run(model, &requests, &taken).contains("it is not empty; go on with --resume"));
    let option = |option: &str| {
        let output = getp(&["batch", "-m", model, "-i", &requests, "-o", &answers, option]).output();
        String::from_utf8(output.unwrap().stderr).unwrap()
    };
    assert!(option("--max-tokens=0").contains("it must be a whole number above 0"));
    assert!(option("--seed=0.5").contains("it must be a whole number of 64 bits"));
    let negative = [
        "batch",
        "-m",
        &name("none"),
        "-i",
        &requests,
        "-o",
        &answers,
        "--seed",
        "-1",
    ];
    assert!(refused(&negative).contains("/none: No such file"));
    // Before the weights are packed.
    let bare = name("bare");
    fs::create_dir(&bare).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(MODEL.path().join(file), Path::new(&bare).join(file)).unwrap();
    }
    let said = run(&bare, &requests, &answers);
    assert!(
        said.contains("there is no tokenizer.json in it") && !said.contains("KV cache"),
        "{said}"
    );
    let own = [
        &["batch", "-m", &bare, "--tokenizer", model][..],
        &["-i", &requests, "-o", &answers],
    ]
    .concat();
    assert!(getp(&own).output().unwrap().status.success());
    fs::remove_file(&answers).unwrap();
    let launched = getp(&own).env("OMPI_COMM_WORLD_SIZE", "2").output().unwrap();
    assert!(String::from_utf8_lossy(&launched.stderr).contains("start it without mpirun or srun"));
    assert_eq!(fs::read_to_string(&requests).unwrap().lines().count(), 1);
}

#[test]
fn lines_that_cannot_be_answered_have_an_error() {
    let messages = json!([{"role": "user", "content": "x"}]);
    let body = |field: &str, value: Value| json!({"messages": messages, "max_tokens": 2, field: value});
    let mut lines = vec![completion("good", json!({"prompt": "a", "max_tokens": 2}))];
    let mut expected = vec![None];
    let mut bad = |line: String, words: &'static str| {
        lines.push(line);
        expected.push(Some(words));
    };
    bad(
        "{".into(),
        "the line is no JSON: EOF while parsing an object at column 1",
    );
    bad("[1]".into(), "the line is [1]; it must be an object");
    bad("\"\u{0}".into(), "the line is no JSON");
    bad(
        r#"{"body": {"prompt": "a\ud83dz"}, "custom_id": "half"}"#.into(),
        "the line is no JSON",
    );
    bad("{}".into(), "custom_id is missing");
    bad("{\"custom_id\": 5}".into(), "custom_id is 5; it must be a text");
    bad("{\"custom_id\": \"n\"}".into(), "body is missing");
    bad(json!({"custom_id": "u", "body": {}}).to_string(), "url is missing");
    bad(
        request("e", "/v1/embeddings", json!({})),
        "url is \"/v1/embeddings\"; use",
    );
    bad(
        completion("good", json!({"prompt": "a"})),
        "custom_id is that of line 1, too",
    );
    bad(chat("no messages", json!({"max_tokens": 1})), "messages is missing");
    bad(
        chat("role", json!({"messages": [{"role": "robot", "content": ""}]})),
        "messages[0].role is \"robot\"",
    );
    bad(completion("empty", json!({"prompt": ""})), "the prompt has no token");
    bad(
        completion("id", json!({"prompt": [1, 512]})),
        "prompt has 512; tokens are from 0 to 511",
    );
    bad(
        completion("mixed", json!({"prompt": [1, "a"]})),
        "prompt is [1,\"a\"]; it must be a text",
    );
    bad(
        completion("none", json!({"prompt": "a", "max_tokens": 0})),
        "ask for 1 or more",
    );
    bad(
        completion("many", json!({"prompt": ["a", "b"], "n": 1_u64 << 63})),
        "it must be from 1 to 1024",
    );
    bad(
        completion("long", json!({"prompt": vec![65; 140_000], "max_tokens": 1})),
        "positions, and the model has 131072",
    );
    for (field, value, words) in [
        (
            "temperature",
            json!(-1),
            "temperature is -1; it must be 0, which is greedy",
        ),
        ("temperature", json!("hot"), "temperature is \"hot\""),
        ("top_p", json!(0), "top_p is 0; it must be a number above 0"),
        ("top_k", json!(50), "top_k is 50; it would change the answer"),
        (
            "presence_penalty",
            json!(0.5),
            "presence_penalty is 0.5; it would change",
        ),
        (
            "logit_bias",
            json!({"5": 1}),
            "logit_bias is {\"5\":1}; it would change",
        ),
        ("stop", json!([""]), "stop has an empty text"),
        ("stop", json!(5), "stop is 5; it must be a text, or a list of them"),
        ("n", json!(0), "n is 0; it must be from 1"),
        ("seed", json!(1.5), "seed is 1.5; it must be a whole number of 64 bits"),
        (
            "temperature",
            json!(1e300),
            "temperature is 1e300; it must be 0, which is greedy, or a number above it in float32's range",
        ),
        (
            "max_tokens",
            json!(1e30),
            "max_tokens is 1e30; it must be a whole number that is not negative, below 2^53",
        ),
        (
            "max_completion_tokens",
            json!(9),
            "max_completion_tokens is 9 and max_tokens 2",
        ),
        ("top_logprobs", json!(3), "top_logprobs is given without logprobs"),
        ("logprobs", json!(2), "logprobs is 2; it must be true or false"),
    ] {
        bad(chat(&format!("{field} {value}"), body(field, value)), words);
    }
    // Values that change nothing, and fields that nobody knows.
    for (field, value) in [
        ("top_k", json!(-1)),
        ("presence_penalty", json!(0)),
        ("frequency_penalty", json!(0.0)),
        ("frequency_penalty", json!(-0.0)),
        ("top_k", json!(-1.0)),
        ("n", json!(1.0)),
        ("seed", json!(15.0)),
        ("logit_bias", json!({})),
        ("user", json!("u")),
        ("response_format", json!({"type": "text"})),
        ("an_odd_field", json!(1)),
        ("an_odd_field", json!(2)),
    ] {
        lines.push(chat(&format!("harmless {field} {value}"), body(field, value)));
        expected.push(None);
    }
    lines.push("  ".into());
    let half = 1 + lines.iter().position(|line| line.contains("half")).unwrap();
    let place = Place::new(&lines);
    let (rows, said) = place.all(&[]);
    assert_eq!(rows[&half]["custom_id"], "half");
    assert_eq!(
        said.matches("body.an_odd_field is not known, and ignored").count(),
        1,
        "{said}"
    );
    assert_eq!(rows.len(), expected.len());
    for (line, words) in (1..).zip(expected) {
        let row = &rows[&line];
        match words {
            None => assert!(row["error"].is_null() && row["response"]["status_code"] == 200, "{row}"),
            Some(words) => {
                assert!(row["response"].is_null(), "{row}");
                assert!(
                    row["error"]["message"].as_str().unwrap().contains(words),
                    "{row} {words}"
                );
            }
        }
    }
}

#[test]
fn few_fields_that_nobody_knows_are_named() {
    let fields: serde_json::Map<_, _> = (0..99)
        .map(|id| (format!("odd{id:02}{}", "x".repeat(99)), json!(0)))
        .collect();
    let mut body = json!({"prompt": "a", "max_tokens": 1});
    body.as_object_mut().unwrap().extend(fields);
    let (_, said) = Place::new(&[completion("a", body)]).all(&[]);
    assert_eq!(said.matches("is not known, and ignored").count(), 20, "{said}");
    assert_eq!(said.matches("are ignored without a word").count(), 1, "{said}");
    let mut named = said.lines().filter(|line| line.contains("ignored"));
    assert!(named.all(|line| line.len() < 160), "{said}");
}

/// The text of the answer to a request.
fn content(row: &Value) -> &str {
    let choice = &row["response"]["body"]["choices"][0];
    choice["text"]
        .as_str()
        .or(choice["message"]["content"].as_str())
        .unwrap()
}

#[test]
fn an_answer_ends_before_its_stop_string() {
    const TOKENS: usize = 64;
    for is_chat in [false, true] {
        let ask = |id: &str, tokens: usize, stop: Value| {
            let sampling = json!({"max_tokens": tokens, "seed": 3, "stop": stop, "ignore_eos": true});
            let mut body = sampling;
            if !is_chat {
                body["prompt"] = json!("stop");
                return completion(id, body);
            }
            // The answer goes on with a text, so that it has no header.
            let said = |role: &str| json!({"role": role, "content": "so"});
            body["messages"] = json!([said("user"), said("assistant")]);
            body["continue_final_message"] = json!(true);
            chat(id, body)
        };
        let lines: Vec<_> = (1..=TOKENS)
            .map(|tokens| ask(&tokens.to_string(), tokens, Value::Null))
            .collect();
        let (growing, _) = Place::new(&lines).all(&[]);
        let whole = content(&growing[&TOKENS]);
        let characters: Vec<char> = whole.chars().collect();
        let cuts = characters.windows(3).map(String::from_iter);
        // What stands for bytes that are no character yet may become another one.
        let stops: Vec<String> = cuts.filter(|stop: &String| !stop.contains('\u{FFFD}')).collect();
        assert!(stops.len() > 10, "{whole:?}");
        let lines = (1..)
            .zip(&stops)
            .map(|(line, stop): (usize, _)| ask(&line.to_string(), TOKENS, json!(["no such text", stop])));
        let (rows, _) = Place::new(&lines.collect::<Vec<_>>()).all(&[]);
        assert_eq!(rows.len(), stops.len());
        for (line, stop) in (1..).zip(stops) {
            let body = &rows[&line]["response"]["body"];
            assert_eq!(content(&rows[&line]), &whole[..whole.find(&stop).unwrap()], "{stop:?}");
            let choice = &body["choices"][0];
            assert_eq!(
                (&choice["finish_reason"], &choice["stop_reason"]),
                (&json!("stop"), &json!(stop))
            );
            // It has no token more than it takes.
            let least = growing.iter().find(|(_, row)| content(row).contains(&stop)).unwrap();
            assert_eq!(body["usage"]["completion_tokens"], *least.0, "{stop:?}");
        }
    }
}

#[test]
fn continuations_are_scored() {
    let line = |id: &str, context: Value, continuation: Value| {
        json!({"custom_id": id, "context": context, "continuation": continuation}).to_string()
    };
    let ids = json!([70, 71, 72]);
    let place = Place::new(&[
        line("text", json!("a word "), json!("and more")),
        line("ids", ids.clone(), json!([73, 74])),
        line("greedy", ids.clone(), json!([0])),
        line("mixed", ids.clone(), json!("x")),
        line("nothing before", json!([]), ids.clone()),
        line("nothing behind", ids, json!([])),
    ]);
    let run = |place: &Place| {
        let output = place.run("score", &["--resume"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        rows(&place.answers())
    };
    let scored = run(&place);
    for (line, words) in [
        (4, "must be two texts"),
        (5, "context has no token"),
        (6, "continuation has no token"),
    ] {
        assert!(
            scored[&line]["error"]["message"].as_str().unwrap().contains(words),
            "{}",
            scored[&line]
        );
    }
    // Blanks at the border belong to the continuation, and the two are tokenized as one text.
    let whole = TOKENIZER.encode(b"a word and more", Specials::Text).unwrap();
    let before = TOKENIZER.encode(b"a word", Specials::Text).unwrap().len();
    let checks = [(1, whole, before), (2, vec![70, 71, 72, 73, 74], 3)];
    for (line, ids, before) in checks {
        let response = &scored[&line]["response"];
        assert_eq!(response["tokens"], json!(ids[before..]));
        let (_, _, scores) = handles_with_prompt(&ids, 1, 0.0, 1);
        let written = response["token_logprobs"].as_array().unwrap();
        let written: Vec<f32> = written.iter().map(|logprob| logprob.as_f64().unwrap() as f32).collect();
        assert_eq!(written, scores[before - 1..]);
        let sum: f64 = written.iter().map(|&logprob| f64::from(logprob)).sum();
        assert!((response["logprob"].as_f64().unwrap() - sum).abs() < 1e-9);
        assert_eq!(response["is_greedy"], false);
    }
    // The token that the model would have written.
    let (greedy, _) = handles(&[70, 71, 72], 1, 0.0, 1);
    let line = line("greedy", json!([70, 71, 72]), json!(greedy));
    assert_eq!(run(&Place::new(&[line]))[&1]["response"]["is_greedy"], true);
}

fn many(count: usize) -> Vec<String> {
    let line = |number: usize| match number % 10 {
        9 => format!("{{\"custom_id\": \"{number}\", \"body\": {number}}}"),
        rest => {
            let messages = json!([{"role": "user", "content": "word ".repeat(1 + number % 7)}]);
            let stop = if rest == 4 { json!("e") } else { Value::Null };
            chat(
                &number.to_string(),
                json!({"messages": messages, "max_tokens": 4 + number % 29, "stop": stop}),
            )
        }
    };
    (0..count).map(line).collect()
}

/// Waits until the file has so many lines, or the process has ended.
fn wait_for(lines: usize, path: &Path, child: &mut Child) {
    let count = || fs::read(path).map_or(0, |text| text.iter().filter(|&&byte| byte == b'\n').count());
    while count() < lines && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn runs_that_are_killed_and_resumed_are_one_run() {
    let lines = many(120);
    let (whole, _) = Place::new(&lines).all(&[]);
    assert_eq!(whole.len(), 120);
    assert_eq!(whole.values().filter(|row| row["error"].is_object()).count(), 12);
    let place = Place::new(&lines);
    for kill_at in [1, 2, 30, 77] {
        let mut child = place
            .command("batch", &["--resume"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(kill_at, &place.answers(), &mut child);
        child.kill().unwrap();
        child.wait().unwrap();
        // As if it had been killed within a line, or the system had kept no more of it.
        let text = fs::read(place.answers()).unwrap();
        fs::write(place.answers(), &text[..text.len() - (kill_at * 7).min(text.len())]).unwrap();
    }
    let (resumed, _) = place.all(&["--resume"]);
    assert_eq!(resumed, whole);
    // With all answers there is nothing to do.
    assert_eq!(place.all(&["--resume"]).0, whole);
    let refused = place.run("batch", &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("go on with --resume"));
    // Answers to other requests are left alone.
    fs::write(place.dir.path().join("requests.jsonl"), many(121)[1..].join("\n")).unwrap();
    let before = fs::read(place.answers()).unwrap();
    let refused = place.run("batch", &["--resume"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("go on with the requests that it was made of"));
    assert_eq!(fs::read(place.answers()).unwrap(), before);
}

/// How many lines the long tests have: as the variable SOAK says, or few.
fn soak() -> usize {
    std::env::var("SOAK").map_or(80, |lines| lines.parse().unwrap())
}

/// Conversations of mixed length that ask for all kinds of answers. Each tenth line is bad, in one of several ways.
fn mixed(count: usize, rng: &mut ChaCha8Rng) -> Vec<String> {
    let mut words = |most: usize| -> String {
        let one = |rng: &mut ChaCha8Rng| ["a ", "word\n", "été ", "<|end|>", "1234", "東京 "][rng.random_range(0..6)];
        (0..rng.random_range(1..=most)).map(|_| one(rng)).collect()
    };
    let texts: Vec<[String; 3]> = (0..count).map(|_| [words(30), words(12), words(6)]).collect();
    let mut line = |(number, [long, short, tiny]): (usize, [String; 3])| {
        let messages = match number % 4 {
            0 => json!([{"role": "user", "content": tiny}]),
            1 => json!([{"role": "system", "content": short}, {"role": "user", "content": long}]),
            2 => json!([{"role": "user", "content": short}, {"role": "assistant", "content": tiny},
                        {"role": "user", "content": long}]),
            _ => json!([{"role": "user", "content": long}, {"role": "assistant", "content": short, "reasoning": tiny},
                        {"role": "user", "content": tiny}, {"role": "assistant", "content": tiny},
                        {"role": "user", "content": short}]),
        };
        let mut body = json!({"messages": messages, "max_tokens": rng.random_range(1..60)});
        for (field, value) in [
            ("temperature", json!(0)),
            ("n", json!(3)),
            ("stop", json!(["e", "word"])),
            ("logprobs", json!(true)),
            ("ignore_eos", json!(true)),
            ("seed", json!(number)),
        ] {
            if rng.random_bool(0.2) {
                body[field] = value;
            }
        }
        let id = number.to_string();
        if number % 10 != 9 {
            return chat(&id, body);
        }
        match number / 10 % 5 {
            0 => chat(&id, body)[..40].to_owned(),
            1 => json!({"custom_id": id}).to_string(),
            2 => chat(&id, json!({"messages": [{"role": "nobody", "content": "x"}]})),
            3 => completion(&id, json!({"prompt": [VOCABULARY]})),
            _ => completion(&id, json!({"prompt": "x", "max_tokens": 1_u64 << 40})),
        }
    };
    (0..count).zip(texts).map(&mut line).collect()
}

/// A run that is killed again and again, whenever that may be, from before its first answer on, is one run in the end:
/// each line has the answer of an undisturbed run, once.
#[test]
fn whenever_a_run_is_killed_its_answers_are_those_of_one() {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let count = soak();
    let lines = mixed(count, &mut rng);
    let (whole, _) = Place::new(&lines).all(&[]);
    assert_eq!(whole.len(), count);
    let bad = whole.values().filter(|row| row["error"].is_object()).count();
    assert_eq!(bad, count / 10);
    let place = Place::new(&lines);
    let finished = |text: &[u8]| text.iter().filter(|&&byte| byte == b'\n').count();
    let mut kills = 0;
    while kills < 5 + count / 50 {
        let before = fs::read(place.answers()).map_or(0, |text| finished(&text));
        let mut child = place
            .command("batch", &["--resume"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Before it has begun, or behind some more answers.
        match rng.random_range(0..4) {
            0 => std::thread::sleep(Duration::from_millis(rng.random_range(0..400))),
            _ => wait_for(before + rng.random_range(1..=count / 10), &place.answers(), &mut child),
        }
        std::thread::sleep(Duration::from_micros(rng.random_range(0..20_000)));
        child.kill().unwrap();
        kills += usize::from(!child.wait().unwrap().success());
        if finished(&fs::read(place.answers()).unwrap_or_default()) > count * 9 / 10 {
            break;
        }
    }
    assert!(kills > 3, "{kills}");
    let (resumed, _) = place.all(&["--resume"]);
    assert!(resumed.keys().eq(whole.keys()));
    for (line, row) in whole {
        assert_eq!(resumed[&line], row, "line {line}, after {kills} kills");
    }
}

/// What the drop-in's `inference` answers to prompts, `getp batch` answers to their ids.
#[test]
fn rows_are_those_of_an_inference() {
    use getp::abi::{driver, model::*, options::*, requests::*, sampler::*, tokenizer::*};
    const STEPS: usize = 80;
    const SEED: u64 = 5;
    let count = soak();
    let texts: Vec<String> = (0..count)
        .map(|i| ["a word", "1234 ", "été", "and so on, "][i % 4].repeat(1 + i % 5) + &i.to_string())
        .collect();
    let place = Place::new(&[]);
    let c_path = |path: &Path| std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let prompts = place.dir.path().join("prompts");
    fs::write(&prompts, format!("{count}\n{}\n", texts.join("\n"))).unwrap();
    for temperature in [0.0, 1.0] {
        // SAFETY: paths, handles and structs of this test's own.
        let answers: Vec<Vec<u32>> = unsafe {
            let mut options: Options = std::mem::zeroed();
            getp_options_init_sized(&mut options, size_of::<Options>());
            (options.print, options.kv_mb) = (GETP_OFF, 16);
            let model = getp_model_open(c_path(MODEL.path()).as_ptr(), &options);
            let tokenizer = getp_tokenizer_open(c_path(MODEL.path()).as_ptr());
            let requests = getp_requests_open(c_path(&prompts).as_ptr(), STEPS as i32, tokenizer);
            let sampler = getp_sampler_open(model, temperature, 0.9, SEED);
            let (transformer, vocabulary) = (getp_model_transformer(model), getp_tokenizer_get(tokenizer));
            let rows = getp_requests_get(requests);
            assert!(driver::inference(transformer, vocabulary, getp_sampler_get(sampler), rows) > 0);
            let answer = |request: usize| {
                let mut length = 0;
                let tokens = getp_requests_tokens(requests, request as i32, &mut length);
                let tokens = std::slice::from_raw_parts(tokens, length).iter();
                tokens.map(|token| token.cast_unsigned()).collect()
            };
            let answers = (0..count).map(answer).collect();
            getp_sampler_close(sampler);
            getp_requests_close(requests);
            getp_tokenizer_close(tokenizer);
            getp_model_close(model);
            answers
        };
        let lines: Vec<String> = texts
            .iter()
            .enumerate()
            .map(|(number, text)| {
                let ids = TOKENIZER.vocabulary().encode(text.as_bytes(), usize::MAX).unwrap();
                let tokens = STEPS - ids.len() + 1;
                // The drop-in's end tokens are none of this vocabulary's.
                completion(
                    &number.to_string(),
                    json!({"prompt": ids, "max_tokens": tokens, "temperature": temperature, "top_p": 0.9,
                           "ignore_eos": true}),
                )
            })
            .collect();
        let place = Place::new(&lines);
        let (rows, _) = place.all(&["--seed", &SEED.to_string()]);
        for (row, answer) in rows.values().zip(&answers) {
            assert_eq!(row["response"]["body"]["usage"]["completion_tokens"], answer.len());
            let decoded = TOKENIZER.decode(answer.iter().copied(), Specials::Text).unwrap();
            assert_eq!(content(row), String::from_utf8_lossy(&decoded));
        }
        assert_eq!(rows.len(), answers.len());
    }
}

/// Both signals come while the process is stopped, so that it ends the run and is told to end at once in one moment.
/// They come to its first thread, which reports a run's end: of two threads the one with the second signal may be too
/// late.
#[test]
fn a_second_interrupt_ends_the_process_at_once() {
    let place = Place::new(&many(400));
    let mut child = place.command("batch", &[]).spawn().unwrap();
    wait_for(20, &place.answers(), &mut child);
    let pid = child.id().cast_signed();
    for signal in [libc::SIGSTOP, libc::SIGINT, libc::SIGTERM, libc::SIGCONT] {
        // SAFETY: the process is this test's own.
        let sent = unsafe {
            match signal {
                libc::SIGINT | libc::SIGTERM => libc::syscall(libc::SYS_tgkill, pid, pid, signal),
                _ => libc::kill(pid, signal).into(),
            }
        };
        assert_eq!(sent, 0);
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(!said.contains("interrupted") && !said.contains(" answered, "), "{said}");
    // What it has written is gone on with, half a line included.
    assert_eq!(place.all(&["--resume"]).0.len(), 400);
}

#[test]
fn an_interrupt_leaves_whole_lines() {
    let lines = many(400);
    let place = Place::new(&lines);
    let mut child = place.command("batch", &[]).spawn().unwrap();
    wait_for(20, &place.answers(), &mut child);
    // SAFETY: the process is this test's own.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) }, 0);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted; go on with --resume"), "{said}");
    let finished = rows(&place.answers());
    assert!((20..400).contains(&finished.len()), "{}", finished.len());
    let (all, _) = place.all(&["--resume"]);
    assert_eq!(all.len(), 400);
    assert!(finished.iter().all(|(line, row)| all[line] == *row));
}

/// Room for a whole context is kept for an answer that may have as many tokens as there is room for.
#[test]
fn a_request_without_a_limit_is_named() {
    use std::io::{BufRead, BufReader};
    let bare = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(MODEL.path().join(file), bare.path().join(file)).unwrap();
    }
    let line = |id: &str| chat(id, json!({"messages": [{"role": "user", "content": "x"}]}));
    let place = Place::new(&[line("a"), line("b")]);
    let run = |more: &[&str]| {
        let mut command = getp(&["batch", "-m", bare.path().to_str().unwrap()]);
        let files = [place.dir.path().join("requests.jsonl"), place.answers()];
        command.arg("-i").arg(&files[0]).arg("-o").arg(&files[1]);
        command.args(more).stderr(Stdio::piped());
        command
    };
    let mut child = run(&[]).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains(" has no max_tokens")));
    child.kill().unwrap();
    child.wait().unwrap();
    let limited = run(&["--resume", "--max-tokens", "3"]).output().unwrap();
    assert!(limited.status.success());
    assert!(!String::from_utf8_lossy(&limited.stderr).contains("max_tokens"));
    let rows = rows(&place.answers());
    assert!(
        rows.values()
            .all(|row| row["response"]["body"]["usage"]["completion_tokens"] == 3)
    );
}

fn piped(arguments: &[&str], input: &[u8]) -> Output {
    use std::io::Write;
    let mut command = getp(arguments);
    command.args(["-m", MODEL.path().to_str().unwrap()]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn text_is_tokenized_and_back() {
    let text = "a line\n<|end|> and é\n".as_bytes();
    for specials in [&[][..], &["--specials"]] {
        let arguments = |command| [&[command], specials].concat();
        let ids = piped(&arguments("tokenize"), text).stdout;
        let expected = TOKENIZER.encode(
            text,
            if specials.is_empty() {
                Specials::Text
            } else {
                Specials::Tokens
            },
        );
        let words: Vec<String> = expected.unwrap().iter().map(u32::to_string).collect();
        assert_eq!(String::from_utf8(ids.clone()).unwrap(), words.join(" ") + "\n");
        assert_eq!(piped(&arguments("detokenize"), &ids).stdout, text);
    }
    let lines = piped(&["tokenize", "--lines"], b"a\n\nb").stdout;
    assert_eq!(String::from_utf8(lines).unwrap(), "64\n\n65\n");
    assert_eq!(piped(&["detokenize"], b"[64, 65]\n").stdout, b"ab");
    let refused = piped(&["detokenize"], b"64 x");
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("\"x\" is no token; use numbers from 0 to 511"));
}

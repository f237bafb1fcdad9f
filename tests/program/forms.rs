//! Answers of a given form: they have it, whatever the weights are, and cost the others nothing.

use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A schema by chance, whose texts are short: random weights close no long one.
fn schema(rng: &mut ChaCha8Rng, depth: u32) -> Value {
    let kinds = if depth == 0 { 9 } else { 12 };
    match rng.random_range(0..kinds) {
        0 => json!({"type": "integer", "minimum": rng.random_range(-900..0), "maximum": rng.random_range(0..900)}),
        1 => json!({"type": "number", "minimum": -1, "exclusiveMaximum": 5, "multipleOf": 0.5}),
        2 => json!({"type": "string", "maxLength": rng.random_range(0..6)}),
        3 => {
            let patterns = ["^[a-f]{2,4}$", "^(on|off)$", "^[0-9]{4}-[0-9][0-9]$"];
            json!({"type": "string", "pattern": patterns[rng.random_range(0..3)]})
        }
        4 => json!({"enum": ["red", 3, null, {"a": [1]}, "\"quoted\""]}),
        5 => json!({"type": "boolean"}),
        6 => json!({"type": "null"}),
        7 => {
            let values = [json!("é"), json!(1.5), json!({"k": []})];
            json!({"const": values[rng.random_range(0..3)]})
        }
        8 => {
            let formats = ["date", "time", "uuid", "ipv4"];
            json!({"type": "string", "format": formats[rng.random_range(0..4)]})
        }
        9 => {
            let least = rng.random_range(0..3);
            json!({"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + 2})
        }
        10 => json!({"anyOf": [schema(rng, depth - 1), schema(rng, depth - 1)]}),
        _ => {
            let names = ["name", "n°", "x\"y", "where", "list"];
            let count = rng.random_range(0..names.len());
            let properties: serde_json::Map<_, _> = names[..count]
                .iter()
                .map(|&name| (name.to_owned(), schema(rng, depth - 1)))
                .collect();
            let required: Vec<_> = names[..count].iter().filter(|_| rng.random_bool(0.7)).collect();
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    }
}

fn of_schema(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
}

fn chat(id: usize, more: Value) -> String {
    let mut body = json!({"messages": [{"role": "user", "content": "?"}], "max_tokens": 300, "temperature": 4.0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request(id, "/v1/chat/completions", body)
}

fn completion(id: usize, more: Value) -> String {
    let mut body = json!({"prompt": "It is", "max_tokens": 300, "temperature": 4.0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request(id, "/v1/completions", body)
}

fn request(id: usize, url: &str, body: Value) -> String {
    json!({"custom_id": id.to_string(), "method": "POST", "url": url, "body": body}).to_string()
}

fn choice(row: &Value) -> &Value {
    assert_eq!(row["error"], Value::Null, "{row}");
    &row["response"]["body"]["choices"][0]
}

#[test]
fn answers_have_the_form_of_their_schemas() {
    let rng = &mut ChaCha8Rng::seed_from_u64(8);
    let schemas: Vec<Value> = (0..300).map(|_| schema(rng, 2)).collect();
    let lines: Vec<String> = schemas
        .iter()
        .enumerate()
        .map(|(id, schema)| {
            let temperature = [0.0, 3.0, 9.0][id % 3];
            let more = json!({"response_format": of_schema(schema), "temperature": temperature, "seed": id});
            match id % 2 {
                0 => completion(id, more),
                _ => chat(id, more),
            }
        })
        .collect();
    let (rows, said) = Place::new(&lines).all(&[]);
    let (mut whole, mut thought) = (0, 0);
    for (id, schema) in schemas.iter().enumerate() {
        let choice = choice(&rows[&(id + 1)]);
        let text = match id % 2 {
            0 => &choice["text"],
            _ => &choice["message"]["content"],
        };
        if choice["finish_reason"] != "stop" {
            assert_eq!(choice["finish_reason"], "length");
            thought += usize::from(text.is_null());
            continue;
        }
        let text = text.as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap_or_else(|why| panic!("{id}: {text:?}: {why}"));
        let validator = jsonschema::options()
            .should_validate_formats(true)
            .build(schema)
            .unwrap();
        assert!(validator.is_valid(&value), "{id}: {value} is not of {schema}");
        whole += 1;
    }
    // The others think for too long, or write a text without an end.
    assert!(whole > 150, "{whole} {thought} {said}");
}

#[test]
fn regular_expressions_grammars_and_choices_hold() {
    let given = [
        json!({"regex": "[a-c]{3}-[0-9]{2}"}),
        json!({"choice": ["yes", "no \"or\" maybe", "é"]}),
        json!({"grammar": "start: \"a\" (\",\" NUMBER)~2\nNUMBER: /[0-9]{1,3}/"}),
        json!({"json": {"type": "integer", "minimum": 3, "maximum": 17}}),
        json!({"json": "{\"enum\": [\"a text of a schema\"]}"}),
    ];
    let lines: Vec<String> = (0..60)
        .map(|id| completion(id, json!({"structured_outputs": given[id % given.len()], "seed": id})))
        .collect();
    let (rows, _) = Place::new(&lines).all(&[]);
    let expected = [
        "^[a-c]{3}-[0-9]{2}$",
        "^(yes|no \"or\" maybe|é)$",
        "^a,[0-9]{1,3},[0-9]{1,3}$",
        "^([3-9]|1[0-7])$",
        "^\"a text of a schema\"$",
    ];
    let mut different = std::collections::BTreeSet::new();
    for (number, row) in &rows {
        let choice = choice(row);
        let text = choice["text"].as_str().unwrap();
        let schema = json!({"pattern": expected[(number - 1) % given.len()]});
        assert!(jsonschema::is_valid(&schema, &json!(text)), "{number}: {text:?}");
        assert_eq!(choice["finish_reason"], "stop", "{number}: {text:?}");
        different.insert(text.to_owned());
    }
    assert!(different.len() > 30, "{different:?}");
}

/// The rows without one have the answers that they have alone.
#[test]
fn rows_without_a_form_are_as_they_are_alone() {
    let temperature = |id: usize| [0.0, 1.0][id % 2];
    let plain = |id: usize| {
        completion(
            id,
            json!({"seed": id, "max_tokens": 20, "temperature": temperature(id)}),
        )
    };
    let format = of_schema(&json!({"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}}));
    let mixed: Vec<String> = (0..24)
        .map(|id| match id % 3 {
            0 => completion(id, json!({"response_format": format, "temperature": temperature(id)})),
            _ => plain(id),
        })
        .collect();
    let (mixed, _) = Place::new(&mixed).all(&[]);
    let (alone, _) = Place::new(&(0..24).map(plain).collect::<Vec<_>>()).all(&[]);
    for number in (1..=24).filter(|number| (number - 1) % 3 != 0) {
        assert_eq!(mixed[&number], alone[&number]);
    }
}

/// What has been thought is free, and what the user sees is of the form, also where the answer goes on with a message.
#[test]
fn a_message_goes_on_as_its_form_says() {
    let format = of_schema(&json!({
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": false
    }));
    let going_on = |id, text: &str| {
        let messages = json!([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]);
        chat(
            id,
            json!({"messages": messages, "continue_final_message": true, "response_format": format, "seed": id}),
        )
    };
    let lines: Vec<String> = (0..8)
        .map(|id| going_on(id, "{\"a\": "))
        .chain([going_on(8, "I say ")])
        .collect();
    let (rows, _) = Place::new(&lines).all(&[]);
    for id in 0..8 {
        let choice = choice(&rows[&(id + 1)]);
        if choice["finish_reason"] == "stop" {
            let text = format!("{{\"a\": {}", choice["message"]["content"].as_str().unwrap());
            let value: Value = serde_json::from_str(&text).unwrap();
            assert!(value["a"].as_u64().unwrap() < 10 && value["b"].is_boolean(), "{text}");
        }
    }
    let why = rows[&9]["error"]["message"].as_str().unwrap();
    assert!(why.contains("does not begin as its response_format says"), "{why}");
}

#[test]
fn what_cannot_be_followed_is_refused_by_name() {
    let schema = |schema: Value| json!({"response_format": of_schema(&schema)});
    let refused = [
        (
            schema(json!({"type": "object", "propertyNames": {"minLength": 3}})),
            "propertyNames",
        ),
        (schema(json!({"type": "bogus"})), "bogus"),
        (
            schema(json!({"const": 9_007_199_254_740_993_u64})),
            "9007199254740993 is a number",
        ),
        (
            schema(json!({"properties": {"a": {"x-guidance": {}}}})),
            "x-guidance is not supported",
        ),
        (
            schema(json!({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1})),
            "exclusiveMinimum 0 is not supported",
        ),
        (
            schema(json!({"type": "integer", "multipleOf": 9_999_991})),
            "multipleOf 9999991 takes too long",
        ),
        (
            schema(json!({"type": "object", "minProperties": 2, "patternProperties": {"^[ab]$": {"const": 1}}})),
            "minProperties 2 is not supported",
        ),
        (schema(json!({"$ref": "#"})), "the JSON schema: there is no such text"),
        (
            schema(json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}, "a~1b": {}}})),
            "$ref \"#/$defs/a~1b\" has signs that are escaped",
        ),
        (
            schema(json!({"$ref": "#/$defs/a%20b", "$defs": {"a b": {}, "a%20b": {}}})),
            "$ref \"#/$defs/a%20b\" has signs that are escaped",
        ),
        (
            json!({"structured_outputs": {"regex": "[^\\s\\S]"}}),
            "structured_outputs.regex: there is no such text",
        ),
        (
            json!({"structured_outputs": {"regex": "a"}, "stop": "a"}),
            "stop is given with a form",
        ),
        (
            json!({"structured_outputs": {"regex": "a"}, "stop_token_ids": [7]}),
            "stop_token_ids is given with a form",
        ),
        (
            json!({"structured_outputs": {"regex": "a"},
                   "tools": [{"type": "function", "function": {"name": "a to=b"}}]}),
            "\"a to=b\" is no name that a header can have",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema is missing",
        ),
        (
            json!({"response_format": {"type": "grammar"}}),
            "response_format.type is \"grammar\"",
        ),
        (json!({"structured_outputs": {"regex": "(["}}), "regex"),
        (json!({"structured_outputs": {"grammar": "begin: \"a\""}}), "start"),
        (
            json!({"structured_outputs": {"choice": []}}),
            "structured_outputs.choice has",
        ),
        (
            json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
            "structured_outputs has several fields, regex, choice",
        ),
        (
            json!({"structured_outputs": {"structural_tag": "a"}}),
            "structural_tag, which is not supported",
        ),
        (
            json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
            "exclude each other",
        ),
        (
            json!({"structured_outputs": {"regex": "a"}, "min_tokens": 2}),
            "min_tokens is given with a form",
        ),
        (
            json!({"structured_outputs": {"regex": "a"}, "ignore_eos": true}),
            "ignore_eos is given with a form",
        ),
    ];
    let lines: Vec<String> = refused
        .iter()
        .enumerate()
        .map(|(id, (more, _))| chat(id, more.clone()))
        .collect();
    let (rows, _) = Place::new(&lines).all(&[]);
    for (id, (_, expected)) in refused.iter().enumerate() {
        let row = &rows[&(id + 1)];
        let why = row["error"]["message"].as_str().unwrap_or_else(|| panic!("{row}"));
        assert!(why.contains(expected), "{why}");
    }
}

#[test]
fn a_choice_may_have_any_characters() {
    let text = "\u{7f}\"\\/\n\u{1}é";
    let (rows, _) = Place::new(&[completion(0, json!({"structured_outputs": {"choice": [text]}}))]).all(&[]);
    assert_eq!(choice(&rows[&1])["text"], text);
}

/// Words about a schema are not followed, nor are formats that JSON Schema does not name.
#[test]
fn what_says_nothing_of_the_answer_is_allowed() {
    let schema = json!({
        "type": "object", "required": ["a", "x-guidance"], "additionalProperties": false, "default": {"a": 1e20},
        "properties": {
            "a": {"type": "string", "format": "password", "maxLength": 2, "examples": [1e18]},
            "x-guidance": {"enum": ["date", {"format": "path"}]},
        },
    });
    let lines: Vec<String> = (0..20)
        .map(|id| completion(id, json!({"response_format": of_schema(&schema), "seed": id})))
        .collect();
    let (rows, _) = Place::new(&lines).all(&[]);
    let mut ended = 0;
    for row in rows.values() {
        let choice = choice(row);
        if choice["finish_reason"] == "stop" {
            let answer: Value = serde_json::from_str(choice["text"].as_str().unwrap()).unwrap();
            assert!(jsonschema::is_valid(&schema, &answer), "{answer}");
            ended += 1;
        }
    }
    assert!(ended > 0);
}

#[test]
fn others_are_read_while_a_form_is_compiled() {
    let texts: Vec<String> = (0..20_000).map(|id| format!("number {id}")).collect();
    let lines = [
        completion(0, json!({"structured_outputs": {"choice": texts}})),
        chat(1, json!({"max_tokens": 1})),
    ];
    let place = Place::new(&lines);
    let (rows, _) = place.all(&[]);
    let text = choice(&rows[&1])["text"].as_str().unwrap();
    assert!(texts.iter().any(|of| of == text), "{text:?}");
    let answers = fs::read_to_string(place.answers()).unwrap();
    let first: Value = serde_json::from_str(answers.lines().next().unwrap()).unwrap();
    assert_eq!(first["custom_id"], "1");
}

/// Whatever ends an answer, the user sees nothing but a beginning of the form.
#[test]
fn an_answer_that_is_cut_has_no_content_but_of_its_form() {
    let lines: Vec<String> = (0..60)
        .map(|id| {
            let form = json!({"structured_outputs": {"regex": "[a-z]{2,30}"}, "max_tokens": 1 + id % 12, "seed": id});
            chat(id, form)
        })
        .collect();
    let (rows, _) = Place::new(&lines).all(&[]);
    let mut seen = 0;
    for (number, row) in &rows {
        let content = &choice(row)["message"]["content"];
        if let Some(text) = content.as_str() {
            seen += 1;
            assert!(
                text.chars().all(|letter| letter.is_ascii_lowercase()),
                "{number}: {text:?}"
            );
        }
    }
    assert!(seen > 0 && seen < 60, "{seen}");
}

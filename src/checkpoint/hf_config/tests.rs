//! One case and more for every field of the tables: what it changes, or in which words it is refused.

use super::*;
use crate::model::Rope;
use serde_json::{Value, json};

/// The configuration of the released 20b model.
fn released() -> Value {
    let types: Vec<_> = (0..24)
        .map(|layer| ["sliding_attention", "full_attention"][layer % 2])
        .collect();
    json!({
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": true,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": types,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": false,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            "quant_method": "mxfp4"
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": false
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": false,
        "transformers_version": "4.55.0.dev0",
        "use_cache": true,
        "vocab_size": 201088
    })
}

/// The model of the released 20b directory.
fn released_model() -> ModelConfig {
    ModelConfig {
        seq_len: 4096,
        context_length: Some(131_072),
        ..ModelConfig::preset_20b()
    }
}

/// A field set to a value, or left out.
enum Edit<'a> {
    Set(&'a str, Value),
    Remove(&'a str),
}
use Edit::{Remove, Set};

fn read(edits: &[Edit]) -> Result<ModelConfig, String> {
    let mut json = released();
    for edit in edits {
        let (path, value) = match edit {
            Set(path, value) => (path, Some(value.clone())),
            Remove(path) => (path, None),
        };
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = if parent.is_empty() {
            &mut json
        } else {
            &mut json[parent]
        };
        let parent = parent.as_object_mut().expect("the parent is an object");
        match value {
            Some(value) => drop(parent.insert(name.into(), value)),
            None => drop(parent.remove(name).expect("the field was there")),
        }
    }
    let Value::Object(object) = json else {
        unreachable!("it is an object")
    };
    config(object)
}

#[track_caller]
fn gives(edits: &[Edit], change: impl FnOnce(&mut ModelConfig)) {
    let mut expected = released_model();
    change(&mut expected);
    assert_eq!(read(edits), Ok(expected));
}

#[track_caller]
fn refused(edits: &[Edit], message: &str) {
    let error = read(edits).expect_err("it is refused");
    assert!(error.contains(message), "{error:?} does not say {message:?}");
}

#[test]
fn the_released_model_is_the_preset() {
    gives(&[], |_| ());
}

/// Every field that the model is made of, with a value of its own, and absent.
#[test]
fn what_the_model_is_made_of_is_taken_or_has_the_references_default() {
    gives(&[Set("vocab_size", json!(1000))], |c| c.vocab_size = 1000);
    gives(&[Set("hidden_size", json!(64))], |c| c.hidden_dim = 64);
    gives(&[Set("intermediate_size", json!(96))], |c| c.intermediate_dim = 96);
    gives(&[Set("num_hidden_layers", json!(2)), Remove("layer_types")], |c| {
        c.n_layers = 2
    });
    gives(&[Remove("num_hidden_layers"), Remove("layer_types")], |c| {
        c.n_layers = 36
    });
    gives(&[Set("num_attention_heads", json!(16))], |c| c.n_attn_heads = 16);
    gives(&[Set("num_key_value_heads", json!(4))], |c| c.n_kv_heads = 4);
    gives(&[Set("num_key_value_heads", Value::Null)], |c| c.n_kv_heads = 64);
    gives(&[Set("head_dim", json!(32))], |c| c.head_dim = 32);
    gives(&[Set("head_dim", Value::Null)], |c| c.head_dim = 45);
    gives(&[Set("num_local_experts", json!(8))], |c| c.n_experts = 8);
    gives(&[Remove("num_local_experts")], |c| c.n_experts = 128);
    gives(&[Remove("num_local_experts"), Set("num_experts", json!(16))], |c| {
        c.n_experts = 16
    });
    gives(&[Set("num_experts", json!(32))], |_| ());
    refused(
        &[Set("num_experts", json!(8))],
        "num_experts is 8 where num_local_experts is 32",
    );
    let two = json!(2);
    gives(
        &[
            Set("num_experts_per_tok", two.clone()),
            Set("experts_per_token", two.clone()),
        ],
        |c| c.experts_per_token = 2,
    );
    refused(
        &[Set("experts_per_token", two)],
        "experts_per_token is 2 where num_experts_per_tok is 4",
    );
    gives(&[Set("max_position_embeddings", json!(1024))], |c| {
        (c.context_length, c.seq_len) = (Some(1024), 1024);
    });
    refused(
        &[Set("initial_context_length", json!(8192))],
        "initial_context_length is 8192 where",
    );
    gives(&[Set("rope_theta", json!(10000))], |c| c.rope_theta = 10_000.0);
    gives(&[Set("swiglu_limit", json!(5))], |c| c.swiglu_limit = 5.0);
    gives(&[Set("sliding_window", json!(64))], |c| c.sliding_window = 64);
    let all = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts_per_tok",
        "experts_per_token",
        "max_position_embeddings",
        "initial_context_length",
        "rope_theta",
        "rope_scaling",
        "sliding_window",
        "layer_types",
        "swiglu_limit",
        "quantization_config",
        "attention_bias",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "architectures",
    ];
    gives(&all.map(Remove), |_| ());
}

#[test]
fn numbers_that_are_none_are_refused_by_name() {
    refused(
        &[Set("hidden_size", json!(-1))],
        "hidden_size is -1; it must be a whole number",
    );
    refused(
        &[Set("hidden_size", json!("64"))],
        "hidden_size is \"64\"; it must be a whole number",
    );
    refused(&[Set("vocab_size", Value::Null)], "vocab_size is null; it must be");
    refused(&[Set("head_dim", json!(64.5))], "head_dim is 64.5; it must be");
    refused(
        &[Set("swiglu_limit", Value::Null)],
        "swiglu_limit is null; it must be a number",
    );
    refused(
        &[Set("rope_theta", json!([1]))],
        "rope_theta is [1]; it must be a number",
    );
    refused(
        &[Set("rope_scaling", json!("yarn"))],
        "rope_scaling is \"yarn\"; it must be an object",
    );
    refused(
        &[Set("rope_scaling/truncate", json!(1))],
        "rope_scaling.truncate is 1; it must be true or false",
    );
    refused(
        &[Set("rope_scaling/rope_type", json!(1))],
        "rope_scaling.rope_type is 1; it must be a text",
    );
    refused(
        &[Set("layer_types", json!("full"))],
        "layer_types is \"full\"; it must be a list",
    );
}

#[test]
fn the_alternation_of_layers_is_the_built_in_one_or_none() {
    let full = json!(vec!["full_attention"; 24]);
    gives(&[Set("layer_types", full.clone())], |c| c.sliding_window = 0);
    gives(&[Set("layer_types", full), Set("sliding_window", Value::Null)], |c| {
        c.sliding_window = 0
    });
    refused(
        &[Set("layer_types", json!(vec!["sliding_attention"; 24]))],
        "layer_types[1] is \"sliding_attention\"; only full_attention is supported there",
    );
    let mut other = vec!["full_attention"; 24];
    other[3] = "chunked_attention";
    refused(
        &[Set("layer_types", json!(other))],
        "layer_types[0] is \"full_attention\"",
    );
    refused(
        &[Set("num_hidden_layers", json!(12))],
        "layer_types has 24 entries for 12 layers",
    );
    refused(
        &[Set("sliding_window", Value::Null)],
        "sliding_window is null where even layers are windowed",
    );
    refused(
        &[Set("sliding_window", json!(0))],
        "sliding_window is 0 where even layers are windowed",
    );
}

/// The words of a refusal of every value that is built in, and no other is refused for it.
#[test]
fn what_is_built_in_is_refused_otherwise() {
    for (field, value, message) in [
        (
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor is 0.5; only 1.0 is supported",
        ),
        (
            "attention_bias",
            json!(false),
            "attention_bias is false; only true is supported",
        ),
        (
            "swiglu_alpha",
            json!(1.5),
            "swiglu_alpha is 1.5; only 1.702 is supported",
        ),
        (
            "hidden_act",
            json!("gelu"),
            "hidden_act is \"gelu\"; only \"silu\" is supported",
        ),
        (
            "rms_norm_eps",
            json!(1e-6),
            "rms_norm_eps is 1e-6; only 1e-5 is supported",
        ),
        (
            "tie_word_embeddings",
            json!(true),
            "tie_word_embeddings is true; only false is supported",
        ),
        (
            "is_encoder_decoder",
            json!(true),
            "is_encoder_decoder is true; only false is supported",
        ),
        (
            "add_cross_attention",
            json!(true),
            "add_cross_attention is true; only false is supported",
        ),
        (
            "chunk_size_feed_forward",
            json!(2),
            "chunk_size_feed_forward is 2; only 0 is supported",
        ),
        (
            "model_type",
            json!("mixtral"),
            "model_type is \"mixtral\"; only \"gpt_oss\" is supported",
        ),
        (
            "architectures",
            json!(["Other"]),
            "architectures is [\"Other\"]; only [\"GptOssForCausalLM\"]",
        ),
        (
            "quantization_config/quant_method",
            json!("fp8"),
            "quantization_config.quant_method is \"fp8\"; only \"mxfp4\"",
        ),
        (
            "rope_scaling/partial_rotary_factor",
            json!(0.5),
            "rope_scaling.partial_rotary_factor is 0.5; only 1.0",
        ),
        // No table has them.
        (
            "num_dense_layers",
            json!(3),
            "num_dense_layers is 3; the field is not known",
        ),
        (
            "quantization_config/group_size",
            json!(64),
            "quantization_config.group_size is 64; the field is not known",
        ),
        (
            "rope_scaling/short_factor",
            json!([1]),
            "rope_scaling.short_factor is [1]; the field is not known",
        ),
    ] {
        refused(&[Set(field, value)], message);
    }
    refused(&[Remove("model_type")], "model_type is missing");
    for (field, value) in [
        ("partial_rotary_factor", json!(1)),
        ("swiglu_alpha", json!(1.7020000219345093)),
        ("rms_norm_eps", json!(9.999999747378752e-06)),
        ("is_encoder_decoder", json!(false)),
        ("add_cross_attention", json!(false)),
        ("chunk_size_feed_forward", json!(0)),
        ("rope_scaling/partial_rotary_factor", json!(1.0)),
    ] {
        gives(&[Set(field, value)], |_| ());
    }
}

#[test]
fn what_changes_no_answer_may_be_anything() {
    for (field, fate) in CONFIG.iter().chain(QUANTIZATION) {
        if matches!(fate, Ignored) {
            let of_quantization = QUANTIZATION.iter().any(|(name, _)| name == field);
            let path = if of_quantization {
                format!("quantization_config/{field}")
            } else {
                field.to_string()
            };
            gives(&[Set(&path, json!({"any": [1, null]}))], |_| ());
        }
    }
}

/// The fields that transformers 4.57 writes beside the released file's, if it writes a configuration in full.
fn written_in_full() -> Value {
    let text = r#"{
        "_name_or_path": "",
        "add_cross_attention": false,
        "bad_words_ids": null,
        "begin_suppress_tokens": null,
        "bos_token_id": null,
        "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": null,
        "decoder_start_token_id": null,
        "diversity_penalty": 0.0,
        "do_sample": false,
        "dtype": null,
        "early_stopping": false,
        "encoder_no_repeat_ngram_size": 0,
        "exponential_decay_length_penalty": null,
        "finetuning_task": null,
        "forced_bos_token_id": null,
        "forced_eos_token_id": null,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "is_decoder": false,
        "is_encoder_decoder": false,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "length_penalty": 1.0,
        "max_length": 20,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beam_groups": 1,
        "num_beams": 1,
        "num_return_sequences": 1,
        "output_attentions": false,
        "output_hidden_states": false,
        "output_scores": false,
        "prefix": null,
        "problem_type": null,
        "pruned_heads": {},
        "remove_invalid_values": false,
        "repetition_penalty": 1.0,
        "return_dict": true,
        "return_dict_in_generate": false,
        "sep_token_id": null,
        "suppress_tokens": null,
        "task_specific_params": null,
        "temperature": 1.0,
        "tf_legacy_loss": false,
        "tie_encoder_decoder": false,
        "tokenizer_class": null,
        "top_k": 50,
        "top_p": 1.0,
        "torchscript": false,
        "typical_p": 1.0,
        "use_bfloat16": false
    }"#;
    serde_json::from_str(text).expect("it is JSON")
}

#[test]
fn a_file_written_in_full_is_the_same_model() {
    let full = written_in_full();
    let of = |fields: &Value| -> Vec<_> {
        let fields = fields.as_object().expect("it is an object").iter();
        fields.map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    let all = of(&full);
    assert_eq!(all.len() + of(&released()).len(), 82);
    let edits: Vec<_> = all.iter().map(|(name, value)| Set(name, value.clone())).collect();
    gives(&edits, |_| ());
    // transformers 4.55 calls the type otherwise.
    let edits: Vec<_> = (all.iter().filter(|(name, _)| name != "dtype"))
        .map(|(name, value)| Set(name, value.clone()))
        .chain([Set("torch_dtype", Value::Null)])
        .collect();
    gives(&edits, |_| ());
    // transformers 5 writes fewer, and the rotary embedding in one place.
    let rope = json!({"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_theta": 150_000.0, "rope_type": "yarn", "truncate": false});
    let five = [
        Set("swiglu_alpha", json!(1.702)),
        Set("rope_parameters", rope),
        Remove("rope_scaling"),
        Remove("rope_theta"),
        Set("_name_or_path", json!("")),
        Set("chunk_size_feed_forward", json!(0)),
        Set("is_encoder_decoder", json!(false)),
        Set("bos_token_id", Value::Null),
        Set("dtype", Value::Null),
        Set("id2label", json!({"0": "LABEL_0", "1": "LABEL_1"})),
        Set("label2id", json!({"LABEL_0": 0, "LABEL_1": 1})),
        Set("output_attentions", json!(false)),
        Set("output_hidden_states", json!(false)),
        Set("problem_type", Value::Null),
        Set("return_dict", json!(true)),
    ];
    gives(&five, |_| ());
}

/// transformers' `GptOssConfig()`, saved in full: it has no model's fields.
#[test]
fn a_file_written_in_full_without_a_model_is_taken() {
    let without_model = [
        Set("architectures", Value::Null),
        Set("eos_token_id", Value::Null),
        Set("pad_token_id", Value::Null),
        Remove("experts_per_token"),
        Remove("initial_context_length"),
        Remove("quantization_config"),
    ];
    let full = written_in_full();
    let rest = (full.as_object().expect("it is an object").iter()).map(|(name, value)| Set(name, value.clone()));
    // Its default is the released 120b model, which transformers 4 and 5.0 give no swiglu_limit.
    let types = &released()["layer_types"];
    let types: Vec<_> = types.as_array().unwrap().iter().cycle().take(36).collect();
    let default = [
        Set("num_hidden_layers", json!(36)),
        Set("num_local_experts", json!(128)),
        Set("layer_types", json!(types)),
        Remove("swiglu_limit"),
    ];
    let edits: Vec<_> = without_model.into_iter().chain(rest).collect();
    gives(&edits, |_| ());
    let mut edits: Vec<_> = edits.into_iter().chain(default).collect();
    gives(&edits, |c| (c.n_layers, c.n_experts) = (36, 128));
    // To transformers 4.55 the context before scaling is all of it.
    edits.push(Remove("rope_scaling/original_max_position_embeddings"));
    gives(&edits, |c| {
        (c.n_layers, c.n_experts) = (36, 128);
        c.initial_context_length = 131_072;
    });
}

/// What is ignored at some values is refused at all others: they might change answers.
#[test]
fn inert_fields_are_refused_at_other_values() {
    let full = written_in_full();
    let mut inert = 0;
    for (field, fate) in CONFIG {
        let Inert(values) = fate else { continue };
        inert += 1;
        let parsed: Vec<Value> = values
            .iter()
            .map(|value| serde_json::from_str(value).unwrap())
            .collect();
        assert!(parsed.contains(&full[field]), "{field}");
        for value in parsed {
            gives(&[Set(field, value)], |_| ());
        }
        for other in [json!(0.75), json!([5]), json!(true), json!("text"), json!({"a": 1})] {
            let message = format!("{field} is {other}; only {} is supported", values.join(" or "));
            refused(&[Set(field, other)], &message);
        }
    }
    assert_eq!(inert, 29);
    for (field, other) in [
        ("top_k", 20),
        ("num_beams", 4),
        ("min_length", 1),
        ("no_repeat_ngram_size", 3),
    ] {
        refused(&[Set(field, json!(other))], &format!("{field} is {other}; only"));
    }
}

#[test]
fn all_that_is_refused_is_said_at_once() {
    let edits = [
        Set("rms_norm_eps", json!(1e-6)),
        Set("temperature", json!(0.6)),
        Set("num_dense_layers", json!(3)),
        Set("clip_qkv", json!(8)),
        Set("hidden_size", json!(-1)),
        Set("vocab_size", json!("many")),
        Set("layer_types", json!([])),
        Set("rope_scaling/factor", json!(0)),
        Set("rope_scaling/beta_slow", json!(-1)),
        Set("rope_scaling/short_factor", json!([1])),
        Set("quantization_config/quant_method", json!("fp8")),
    ];
    let message = read(&edits).expect_err("it is refused");
    for part in [
        "(1) rms_norm_eps is 1e-6; only 1e-5 is supported; (2) ",
        "temperature is 0.6; only 1.0 or null is supported",
        "clip_qkv is 8, num_dense_layers is 3, rope_scaling.short_factor is [1]; these fields are not known",
        "hidden_size is -1; it must be a whole number",
        "vocab_size is \"many\"; it must be a whole number",
        "layer_types has 0 entries for 24 layers",
        "rope_scaling.factor is 0; it must be finite and 1 or more",
        "rope_scaling.beta_slow is -1; it must be finite and above 0",
        "quantization_config.quant_method is \"fp8\"",
    ] {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    assert!(message.contains("(9) ") && !message.contains("(10)"), "{message}");
    // Another model's fields are not listed.
    let other = [Set("model_type", json!("llama")), Set("rms_norm_eps", json!(1e-6))];
    assert_eq!(
        read(&other),
        Err("model_type is \"llama\"; only \"gpt_oss\" is supported".into())
    );
    // Nor are more than anyone reads.
    let many: Vec<_> = (0..1000).map(|i| format!("field_{i:04}")).collect();
    let many: Vec<_> = many.iter().map(|name| Set(name, json!(1))).collect();
    let message = read(&many).expect_err("it is refused");
    assert!(
        message.contains("field_0099 is 1, and 900 more; these fields") && message.len() < 4000,
        "{message}"
    );
}

// The rotary embedding.

#[test]
fn other_rotary_embeddings_are_refused() {
    for kind in ["linear", "dynamic", "llama3", "longrope", "proportional"] {
        let message = format!("rope_scaling.rope_type is {kind:?}; only \"yarn\" and \"default\"");
        refused(&[Set("rope_scaling/rope_type", json!(kind))], &message);
    }
    refused(&[Set("rope_scaling", Value::Null)], "rope_scaling is null");
    refused(
        &[Set("rope_scaling/type", json!("linear"))],
        "rope_scaling.type \"linear\"",
    );
    gives(&[Set("rope_scaling/type", json!("yarn"))], |_| ());
    gives(
        &[
            Remove("rope_scaling/rope_type"),
            Set("rope_scaling/type", json!("yarn")),
        ],
        |_| (),
    );
    // Without a type nothing is scaled.
    refused(
        &[Remove("rope_scaling/rope_type")],
        "rope_scaling.truncate is false where rope_scaling.rope_type is \"default\", or absent",
    );
    refused(
        &[Set(
            "rope_scaling",
            json!({"rope_type": "default", "attention_factor": 2}),
        )],
        "rope_scaling.attention_factor is 2",
    );
    for plain in [
        json!({"rope_type": "default"}),
        json!({}),
        json!({"rope_type": "default", "factor": null}),
    ] {
        gives(
            &[
                Set("rope_scaling", plain),
                Set("initial_context_length", json!(131_072)),
            ],
            |c| (c.rope_scaling_factor, c.initial_context_length) = (1.0, 131_072),
        );
    }
}

#[test]
fn transformers_5_keeps_it_all_in_rope_parameters() {
    let parameters = json!({"rope_type": "yarn", "factor": 16.0, "truncate": false, "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096});
    let change = |c: &mut ModelConfig| (c.rope_scaling_factor, c.rope_theta) = (16.0, 10_000.0);
    let set = || Set("rope_parameters", parameters.clone());
    gives(&[set(), Remove("rope_scaling"), Remove("rope_theta")], change);
    gives(
        &[set(), Set("rope_scaling", Value::Null), Set("rope_theta", json!(10000))],
        change,
    );
    gives(
        &[set(), Set("rope_scaling", parameters.clone()), Remove("rope_theta")],
        change,
    );
    refused(
        &[set(), Remove("rope_theta")],
        "rope_scaling and rope_parameters are both there and differ",
    );
    refused(
        &[set(), Remove("rope_scaling")],
        "rope_parameters.rope_theta is 10000 where rope_theta is 150000",
    );
    gives(&[Set("rope_parameters", Value::Null), Remove("rope_scaling")], |_| ());
    refused(
        &[
            Set("rope_parameters", json!({"full_attention": {}})),
            Remove("rope_scaling"),
        ],
        "rope_parameters.full_attention",
    );
}

/// What YaRN is told beside its factor, as the two numbers that the rotary embedding takes.
#[test]
fn yarns_parameters_are_taken() {
    let ramp = |edits: &[Edit]| {
        read(edits)
            .expect("it is supported")
            .yarn_ramp
            .expect("it is another ramp")
    };
    let near = |found: [f32; 2], expected: [f64; 2]| {
        let differ = found
            .iter()
            .zip(expected)
            .any(|(a, b)| (f64::from(*a) - b).abs() > 1e-5);
        assert!(!differ, "{found:?} instead of {expected:?}");
    };
    near(ramp(&[Set("rope_scaling/truncate", json!(true))]), [8.0, 18.0]);
    near(ramp(&[Remove("rope_scaling/truncate")]), [8.0, 18.0]);
    near(
        ramp(&[Set("rope_scaling/beta_fast", json!(16))]),
        [9.953_828, 17.398_025],
    );
    near(
        ramp(&[Set("rope_scaling/beta_slow", json!(2))]),
        [8.092_779, 15.536_975],
    );
    // Below 202 positions the ramp would begin before the first pair.
    let context = || {
        [
            Set("rope_scaling/original_max_position_embeddings", json!(200)),
            Set("initial_context_length", json!(200)),
        ]
    };
    near(ramp(&context()), [0.0, 9.291_027]);
    assert_eq!(read(&context()).unwrap().initial_context_length, 200);
    gives(
        &[
            Remove("rope_scaling/original_max_position_embeddings"),
            Remove("initial_context_length"),
        ],
        |c| c.initial_context_length = 131_072,
    );
    refused(
        &[Remove("rope_scaling/original_max_position_embeddings")],
        "initial_context_length is 4096 where the context before scaling is 131072",
    );
    gives(
        &[
            Set("rope_scaling/beta_fast", Value::Null),
            Set("rope_scaling/beta_slow", Value::Null),
        ],
        |_| (),
    );
    gives(&[Set("rope_scaling/factor", json!(8))], |c| c.rope_scaling_factor = 8.0);

    let set = |name, value| Set(name, value);
    gives(&[set("rope_scaling/attention_factor", json!(1.5))], |c| {
        c.rope_concentration = Some(1.5)
    });
    gives(
        &[set("rope_scaling/attention_factor", json!(1.3465735902799727))],
        |_| (),
    );
    gives(
        &[
            set("rope_scaling/mscale", json!(0.5)),
            set("rope_scaling/mscale_all_dim", json!(2.0)),
        ],
        |c| c.rope_concentration = Some(0.692_962_1),
    );
    // One of the two alone means nothing, as in the reference.
    gives(&[set("rope_scaling/mscale", json!(0.5))], |_| ());
    for (field, value, message) in [
        (
            "rope_scaling/factor",
            json!(0.5),
            "rope_scaling.factor is 0.5; it must be finite and 1 or more",
        ),
        (
            "rope_scaling/factor",
            Value::Null,
            "rope_scaling.factor is null; it must be a number",
        ),
        (
            "rope_scaling/beta_fast",
            json!(0),
            "rope_scaling.beta_fast is 0; it must be finite and above 0",
        ),
        (
            "rope_scaling/attention_factor",
            json!(-1),
            "rope_scaling.attention_factor is -1; it must be",
        ),
        (
            "rope_scaling/rope_theta",
            json!(1000),
            "rope_scaling.rope_theta is 1000 where rope_theta is 150000",
        ),
    ] {
        refused(&[Set(field, value)], message);
    }
}

/// The frequencies are those that the reference's formula gives in float64.
#[test]
fn the_rotation_turns_as_the_reference_does() {
    let angle = |config: &ModelConfig, pair: usize| {
        let (mut cos, mut sin) = ([0.0; 32], [0.0; 32]);
        Rope::new(config).unwrap().angles(1, &mut cos, &mut sin);
        let concentration = cos[pair].hypot(sin[pair]);
        (f64::from(sin[pair].atan2(cos[pair])), f64::from(concentration))
    };
    let truncated = read(&[Set("rope_scaling/truncate", json!(true))]).unwrap();
    let short = read(&[
        Set("rope_scaling/original_max_position_embeddings", json!(200)),
        Set("initial_context_length", json!(200)),
        Set("rope_scaling/attention_factor", json!(1.5)),
    ])
    .unwrap();
    let plain = read(&[Set("rope_scaling", json!({})), Remove("initial_context_length")]).unwrap();
    for (config, concentration, pairs) in [
        (
            released_model(),
            1.346_573_6,
            [0.225_418, 0.031_705_696, 0.006_794_959_5, 0.000_129_318_7],
        ),
        (
            truncated,
            1.346_573_6,
            [0.225_418, 0.031_620_752, 0.007_015_714, 0.000_227_947_8],
        ),
        (
            short,
            1.5,
            [0.131_403_13, 0.002_156_586_9, 0.000_357_944_65, 0.000_055_597_023],
        ),
        (plain, 1.0, [0.225_418, 0.035_012_598, 0.011_454_227, 0.001_779_104_7]),
    ] {
        for (pair, expected) in [4, 9, 12, 17].into_iter().zip(pairs) {
            let (found, length) = angle(&config, pair);
            assert!(
                (found / expected - 1.0).abs() < 1e-5,
                "pair {pair}: {found} instead of {expected}"
            );
            assert!(
                (length - concentration).abs() < 1e-6,
                "{length} instead of {concentration}"
            );
        }
    }
}

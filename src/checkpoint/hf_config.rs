//! The `config.json` of a Hugging Face directory, read as transformers' `GptOssConfig` reads it, with the same
//! defaults.

#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

use super::MAX_SEQ_LEN;
use super::fields::Fate::{Ignored, Inert, Only, Used};
use super::fields::{Fields, Refusals, Table};
use super::yarn::{Yarn, concentration};
use crate::config::ModelConfig;
use crate::error::shown;

/// Every field that `config.json` may have.
const CONFIG: &Table = &[
    // Dimensions.
    ("vocab_size", Used("201088")),
    ("hidden_size", Used("2880")),
    ("intermediate_size", Used("2880")),
    ("num_hidden_layers", Used("36")),
    ("num_attention_heads", Used("64")),
    // null: as many as query heads.
    ("num_key_value_heads", Used("8")),
    // null: hidden_size / num_attention_heads.
    ("head_dim", Used("64")),
    ("num_local_experts", Used("128")),
    // An alias of num_local_experts.
    ("num_experts", Used("null")),
    ("num_experts_per_tok", Used("4")),
    // Released files repeat num_experts_per_tok here; it must be the same.
    ("experts_per_token", Used("null")),
    // Positions.
    ("max_position_embeddings", Used("131072")),
    // Released files repeat the context length before YaRN's scaling here; it must be the same.
    ("initial_context_length", Used("null")),
    ("rope_theta", Used("150000")),
    ("rope_scaling", Used("null")),
    ("rope_parameters", Used("null")),
    ("partial_rotary_factor", Only("1.0")),
    // Attention.
    ("sliding_window", Used("128")),
    // null: even layers attend to a sliding window, odd layers to all positions. Otherwise this pattern, or all full.
    ("layer_types", Used("null")),
    ("attention_bias", Only("true")),
    // Experts.
    ("swiglu_limit", Used("7.0")),
    ("swiglu_alpha", Only("1.702")),
    ("hidden_act", Only("\"silu\"")),
    // The rest of the mathematics.
    ("rms_norm_eps", Only("1e-5")),
    ("tie_word_embeddings", Only("false")),
    ("is_encoder_decoder", Only("false")),
    ("add_cross_attention", Only("false")),
    ("chunk_size_feed_forward", Only("0")),
    // What the model is. `config` looks at the type before all else.
    ("model_type", Used("null")),
    // null: it was saved without a model.
    ("architectures", Inert(&["[\"GptOssForCausalLM\"]", "null"])),
    ("quantization_config", Used("null")),
    // The tokens that end an answer, if generation_config.json does not say; `generation` reads it.
    ("eos_token_id", Used("null")),
    // Prompts come with their tokens.
    ("bos_token_id", Ignored),
    ("pad_token_id", Ignored),
    ("sep_token_id", Ignored),
    ("decoder_start_token_id", Ignored),
    // How transformers chooses tokens unless its caller or generation_config.json says otherwise. The program's sampler
    // chooses here, and a model that asks for another choice is refused. null leaves it to the caller.
    ("do_sample", Inert(&["false", "null"])),
    ("temperature", Inert(&["1.0", "null"])),
    ("top_k", Inert(&["50", "null"])),
    ("top_p", Inert(&["1.0", "null"])),
    ("typical_p", Inert(&["1.0", "null"])),
    ("num_beams", Inert(&["1", "null"])),
    ("num_beam_groups", Inert(&["1", "null"])),
    ("diversity_penalty", Inert(&["0.0", "null"])),
    ("early_stopping", Inert(&["false", "null"])),
    ("length_penalty", Inert(&["1.0", "null"])),
    ("repetition_penalty", Inert(&["1.0", "null"])),
    ("no_repeat_ngram_size", Inert(&["0", "null"])),
    ("encoder_no_repeat_ngram_size", Inert(&["0", "null"])),
    ("bad_words_ids", Inert(&["null"])),
    ("suppress_tokens", Inert(&["null"])),
    ("begin_suppress_tokens", Inert(&["null"])),
    ("forced_bos_token_id", Inert(&["null"])),
    ("forced_eos_token_id", Inert(&["null"])),
    ("exponential_decay_length_penalty", Inert(&["null"])),
    ("remove_invalid_values", Inert(&["false", "null"])),
    ("min_length", Inert(&["0", "null"])),
    ("num_return_sequences", Inert(&["1", "null"])),
    // The program says how long an answer may become.
    ("max_length", Ignored),
    // What transformers does to the prompt, or sets for it.
    ("prefix", Inert(&["null", "\"\""])),
    ("task_specific_params", Inert(&["null", "{}"])),
    // Parts that the model does not have.
    ("is_decoder", Inert(&["false"])),
    ("cross_attention_hidden_size", Inert(&["null"])),
    ("tie_encoder_decoder", Inert(&["false"])),
    ("pruned_heads", Inert(&["{}", "null"])),
    // Used only in training.
    ("attention_dropout", Ignored),
    ("initializer_range", Ignored),
    ("router_aux_loss_coef", Ignored),
    ("output_router_logits", Ignored),
    ("problem_type", Ignored),
    ("finetuning_task", Ignored),
    ("tf_legacy_loss", Ignored),
    ("id2label", Ignored),
    ("label2id", Ignored),
    // How transformers runs the model, and what else it returns.
    ("torch_dtype", Ignored),
    ("dtype", Ignored),
    ("use_bfloat16", Ignored),
    ("torchscript", Ignored),
    ("use_cache", Ignored),
    ("output_attentions", Ignored),
    ("output_hidden_states", Ignored),
    ("output_scores", Ignored),
    ("return_dict", Ignored),
    ("return_dict_in_generate", Ignored),
    ("attn_implementation", Ignored),
    ("_attn_implementation", Ignored),
    ("_attn_implementation_autoset", Ignored),
    ("experts_implementation", Ignored),
    ("_experts_implementation", Ignored),
    // The origin of the file.
    ("_name_or_path", Ignored),
    ("name_or_path", Ignored),
    ("tokenizer_class", Ignored),
    ("transformers_version", Ignored),
    ("unsloth_fixed", Ignored),
    ("unsloth_version", Ignored),
];

/// Every field of `rope_scaling`, and of `rope_parameters`, its name in transformers 5.
const ROPE: &Table = &[
    // Absent: "default", which is no scaling.
    ("rope_type", Used("null")),
    // The older name of rope_type.
    ("type", Used("null")),
    // If config.json itself has rope_theta as well, both must be the same.
    ("rope_theta", Used("null")),
    ("partial_rotary_factor", Only("1.0")),
    // From here on the fields of YaRN alone; `plain` refuses them.
    ("factor", Used("null")),
    // Absent: max_position_embeddings.
    ("original_max_position_embeddings", Used("null")),
    ("beta_fast", Used("32")),
    ("beta_slow", Used("1")),
    // Whether the ramp's ends are rounded to whole pairs of dimensions.
    ("truncate", Used("true")),
    // Absent: computed from mscale and mscale_all_dim, or without these from factor.
    ("attention_factor", Used("null")),
    ("mscale", Used("null")),
    ("mscale_all_dim", Used("null")),
];

/// The value that `GptOssConfig` uses if neither `rope_scaling` nor `rope_parameters` is there.
const DEFAULT_ROPE: &str = r#"{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": false, "original_max_position_embeddings": 4096}"#;

/// Every field of `quantization_config`. Which tensors are MXFP4 follows from the safetensors files.
const QUANTIZATION: &Table = &[
    ("quant_method", Only("\"mxfp4\"")),
    ("modules_to_not_convert", Ignored),
    ("dequantize", Ignored),
];

/// The table of the fields of one that is an object; `""` is the configuration itself.
pub(super) fn table(of: &str) -> Option<&'static Table> {
    match of {
        "" => Some(CONFIG),
        "rope_scaling" | "rope_parameters" => Some(ROPE),
        "quantization_config" => Some(QUANTIZATION),
        _ => None,
    }
}

/// The configuration that a `config.json` describes, not yet checked.
pub(super) fn config(object: Map<String, Value>) -> Result<ModelConfig, String> {
    // Of another model most fields would be refused; that it is another one says more.
    match object.get("model_type") {
        Some(Value::String(kind)) if kind == "gpt_oss" => {}
        Some(other) => return Err(format!("model_type is {}; only \"gpt_oss\" is supported", shown(other))),
        None => return Err("model_type is missing; it must be \"gpt_oss\"".into()),
    }
    let mut refused = Refusals::default();
    let fields = Fields::new(CONFIG, "", object, &mut refused);
    let model = model(&fields, &mut refused);
    refused.finish(model)
}

/// `None` if a field is refused.
fn model(fields: &Fields, refused: &mut Refusals) -> Option<ModelConfig> {
    let quantization = fields.object_or_null("quantization_config", QUANTIZATION, refused);
    refused.keep(quantization);
    let vocab_size = refused.keep(fields.size("vocab_size"));
    let hidden_dim = refused.keep(fields.size("hidden_size"));
    let intermediate_dim = refused.keep(fields.size("intermediate_size"));
    let n_layers = refused.keep(fields.size("num_hidden_layers"));
    let n_attn_heads = refused.keep(fields.size("num_attention_heads"));
    let n_kv_heads = refused.keep(fields.size_or_null("num_key_value_heads"));
    let head_dim = refused.keep(fields.size_or_null("head_dim"));
    let by_heads = || Some(hidden_dim?.checked_div(n_attn_heads?).unwrap_or(0));
    let head_dim = head_dim.and_then(|given| given.or_else(by_heads));
    let n_experts = refused.keep(experts(fields));
    let experts_per_token = refused.keep(fields.size("num_experts_per_tok"));
    if let Some(experts) = experts_per_token {
        refused.keep(fields.agree("experts_per_token", experts as f64, "num_experts_per_tok"));
    }
    let max_positions = refused.keep(fields.size("max_position_embeddings"));
    let rope = rope(fields, head_dim, max_positions, refused);
    if let Some(rope) = &rope {
        let context = rope.context as f64;
        refused.keep(fields.agree("initial_context_length", context, "the context before scaling"));
    }
    let swiglu_limit = refused.keep(fields.number("swiglu_limit"));
    let sliding_window = sliding_window(fields, n_layers, refused);
    let (max_positions, n_attn_heads, rope) = (max_positions?, n_attn_heads?, rope?);
    Some(ModelConfig {
        vocab_size: vocab_size?,
        hidden_dim: hidden_dim?,
        n_experts: n_experts?,
        experts_per_token: experts_per_token?,
        intermediate_dim: intermediate_dim?,
        n_layers: n_layers?,
        head_dim: head_dim?,
        n_attn_heads,
        n_kv_heads: n_kv_heads?.unwrap_or(n_attn_heads),
        seq_len: max_positions.min(MAX_SEQ_LEN),
        initial_context_length: rope.context,
        context_length: Some(max_positions),
        rope_theta: rope.theta as f32,
        rope_scaling_factor: rope.factor as f32,
        yarn_ramp: rope.ramp,
        rope_concentration: rope.concentration,
        sliding_window: sliding_window?,
        swiglu_limit: swiglu_limit? as f32,
    })
}

/// The number of experts: `num_local_experts`, or its alias `num_experts`.
fn experts(fields: &Fields) -> Result<usize, String> {
    match fields.size_or_null("num_experts")? {
        Some(experts) if !fields.has("num_local_experts") => Ok(experts),
        _ => {
            let experts = fields.size("num_local_experts")?;
            fields.agree("num_experts", experts as f64, "num_local_experts")?;
            Ok(experts)
        }
    }
}

/// The sliding window of the even layers; 0 if all layers attend to all positions.
fn sliding_window(fields: &Fields, n_layers: Option<usize>, refused: &mut Refusals) -> Option<usize> {
    let size = refused.keep(fields.size_or_null("sliding_window"));
    if refused.keep(all_full(fields, n_layers))? {
        return Some(0);
    }
    match size? {
        Some(window) if window > 0 => Some(window),
        window => refused.keep(Err(format!(
            "sliding_window is {} where even layers are windowed; it must be 1 or more, or layer_types all \
             full_attention",
            window.map_or("null".into(), |window| window.to_string())
        ))),
    }
}

/// Whether all layers attend to all positions, and not every other one to a window.
fn all_full(fields: &Fields, n_layers: Option<usize>) -> Result<bool, String> {
    const TYPES: [&str; 2] = ["sliding_attention", "full_attention"];
    let types = match fields.value("layer_types") {
        Value::Null => return Ok(false),
        Value::Array(types) => types,
        other => return Err(fields.wrong("layer_types", &other, "a list")),
    };
    if let Some(n_layers) = n_layers.filter(|&layers| layers != types.len()) {
        return Err(format!("layer_types has {} entries for {n_layers} layers", types.len()));
    }
    if types.iter().all(|found| found == TYPES[1]) {
        return Ok(true);
    }
    let mut layers = types.iter().zip(TYPES.into_iter().cycle()).enumerate();
    match layers.find(|(_, (found, expected))| found != expected) {
        None => Ok(false),
        Some((layer, (found, expected))) => Err(format!(
            "layer_types[{layer}] is {}; only {expected} is supported there, or full_attention everywhere",
            shown(found)
        )),
    }
}

/// The parameters of the rotary embedding.
struct Rope {
    theta: f64,
    factor: f64,
    /// Context length before scaling.
    context: usize,
    ramp: Option<[f32; 2]>,
    concentration: Option<f32>,
}

/// `None` if a field is refused, here or before.
fn rope(
    fields: &Fields,
    head_dim: Option<usize>,
    max_positions: Option<usize>,
    refused: &mut Refusals,
) -> Option<Rope> {
    let found = rope_fields(fields, refused);
    let (name, rope) = refused.keep(found)?;
    let theta = refused.keep(theta(fields, &rope));
    let kind = refused.keep(kind(&rope, name))?;
    match kind.as_str() {
        "yarn" => yarn(&rope, name, theta, head_dim, max_positions, refused),
        "default" => plain(&rope, name, theta, max_positions, refused),
        _ => refused.keep(Err(format!(
            "{name}.rope_type is {kind:?}; only \"yarn\" and \"default\" are supported"
        ))),
    }
}

fn theta(fields: &Fields, rope: &Fields) -> Result<f64, String> {
    match rope.number_or_null("rope_theta")? {
        Some(theta) if !fields.has("rope_theta") => Ok(theta),
        _ => {
            let theta = fields.number("rope_theta")?;
            rope.agree("rope_theta", theta, "rope_theta")?;
            Ok(theta)
        }
    }
}

/// The type of the rotary embedding, which may have an older name, too.
fn kind(rope: &Fields, name: &str) -> Result<String, String> {
    match (rope.text_or_null("rope_type")?, rope.text_or_null("type")?) {
        (Some(a), Some(b)) if a != b => Err(format!("{name}.rope_type is {a:?} and {name}.type {b:?}")),
        (a, b) => Ok(a.or(b).unwrap_or("default".into())),
    }
}

/// The name and the fields of the object that describes the rotary embedding.
fn rope_fields(fields: &Fields, refused: &mut Refusals) -> Result<(&'static str, Fields), String> {
    if let Some(parameters) = fields.object_or_null("rope_parameters", ROPE, refused)? {
        let older = fields.value("rope_scaling");
        if !older.is_null() && older != fields.value("rope_parameters") {
            return Err("rope_scaling and rope_parameters are both there and differ; leave one out".into());
        }
        return Ok(("rope_parameters", parameters));
    }
    if let Some(scaling) = fields.object_or_null("rope_scaling", ROPE, refused)? {
        return Ok(("rope_scaling", scaling));
    }
    if fields.has("rope_scaling") {
        // transformers 4 takes this for no scaling, transformers 5 for its default, which is YaRN.
        return Err(
            "rope_scaling is null, which means different models to different programs; \
             write {\"rope_type\": \"default\"} for no scaling, or leave it out for YaRN as released"
                .into(),
        );
    }
    let object = serde_json::from_str(DEFAULT_ROPE).map_err(|e| e.to_string())?;
    Ok(("rope_scaling", Fields::new(ROPE, "rope_scaling.", object, refused)))
}

/// A rotary embedding without scaling. Refuses the parameters of YaRN.
fn plain(
    rope: &Fields,
    name: &str,
    theta: Option<f64>,
    max_positions: Option<usize>,
    refused: &mut Refusals,
) -> Option<Rope> {
    let of_yarn = ROPE
        .iter()
        .map(|(field, _)| *field)
        .skip_while(|&field| field != "factor");
    let set: Vec<_> = of_yarn
        .filter(|field| rope.has(field) && !rope.value(field).is_null())
        .collect();
    if !set.is_empty() {
        let is = |field: &&str| format!("{name}.{field} is {}", shown(&rope.value(field)));
        return refused.keep(Err(format!(
            "{} where {name}.rope_type is \"default\", or absent, which is no scaling; write \"yarn\" or leave {} out",
            set.iter().map(is).collect::<Vec<_>>().join(", "),
            set.join(", ")
        )));
    }
    Some(Rope {
        theta: theta?,
        factor: 1.0,
        context: max_positions?,
        ramp: None,
        concentration: None,
    })
}

fn yarn(
    rope: &Fields,
    name: &str,
    theta: Option<f64>,
    head_dim: Option<usize>,
    max_positions: Option<usize>,
    refused: &mut Refusals,
) -> Option<Rope> {
    let positive = |field: &str, value: f64| {
        let fits = value.is_finite() && value > 0.0;
        fits.then_some(value)
            .ok_or_else(|| format!("{name}.{field} is {value}; it must be finite and above 0"))
    };
    let number_or = |field: &str, default: f64| Ok(rope.number_or_null(field)?.unwrap_or(default));
    let factor = rope.number("factor").and_then(|factor| {
        let fits = factor.is_finite() && factor >= 1.0;
        fits.then_some(factor)
            .ok_or_else(|| format!("{name}.factor is {factor}; it must be finite and 1 or more"))
    });
    let factor = refused.keep(factor);
    let context = refused.keep(rope.size_or_null("original_max_position_embeddings"));
    let beta = |field: &str, default: f64| number_or(field, default).and_then(|value| positive(field, value));
    let beta_fast = refused.keep(beta("beta_fast", 32.0));
    let beta_slow = refused.keep(beta("beta_slow", 1.0));
    let truncate = refused.keep(rope.flag("truncate"));
    let scales = ["attention_factor", "mscale", "mscale_all_dim"].map(|field| refused.keep(rope.number_or_null(field)));
    let ([Some(attention_factor), Some(mscale), Some(all)], Some(factor)) = (scales, factor) else {
        return None;
    };
    let attention_factor = match (attention_factor, mscale, all) {
        (Some(given), _, _) => refused.keep(positive("attention_factor", given).map(Some)),
        (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => {
            let ratio = concentration(factor, mscale) / concentration(factor, all);
            refused.keep(positive("mscale", ratio).map(Some))
        }
        _ => Some(None),
    };
    let yarn = Yarn {
        head_dim: head_dim?,
        theta: theta?,
        factor,
        context: context?.or(max_positions)?,
        beta_fast: beta_fast?,
        beta_slow: beta_slow?,
    };
    let ends @ [low, high] = yarn.ends();
    let rounded = if truncate? { [low.floor(), high.ceil()] } else { ends };
    let kept = [rounded[0].max(0.0), rounded[1].min(yarn.head_dim as f64 - 1.0)];
    // A concentration that rounds to the eval program's own is left out, so that it is computed as the program does.
    let own = concentration(factor, 1.0) as f32;
    Some(Rope {
        theta: yarn.theta,
        factor,
        context: yarn.context,
        ramp: yarn.ramp(kept, kept == ends),
        concentration: attention_factor?
            .map(|given| given as f32)
            .filter(|&given| given != own),
    })
}

//! The `config.json` of a Hugging Face directory, read as transformers' `GptOssConfig` reads it, with the same
//! defaults.

#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

use super::MAX_SEQ_LEN;
use super::fields::Fate::{Ignored, Only, Used};
use super::fields::{Fields, Table};
use super::yarn::{Yarn, concentration};
use crate::config::ModelConfig;

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
    // What the model is.
    ("model_type", Only("\"gpt_oss\"")),
    ("architectures", Only("[\"GptOssForCausalLM\"]")),
    ("quantization_config", Used("null")),
    // The eval program fixes which tokens end an answer.
    ("bos_token_id", Ignored),
    ("eos_token_id", Ignored),
    ("pad_token_id", Ignored),
    ("sep_token_id", Ignored),
    ("decoder_start_token_id", Ignored),
    // Used only in training.
    ("attention_dropout", Ignored),
    ("initializer_range", Ignored),
    ("router_aux_loss_coef", Ignored),
    ("output_router_logits", Ignored),
    ("problem_type", Ignored),
    ("id2label", Ignored),
    ("label2id", Ignored),
    // How transformers runs the model, and what else it returns.
    ("torch_dtype", Ignored),
    ("dtype", Ignored),
    ("use_cache", Ignored),
    ("output_attentions", Ignored),
    ("output_hidden_states", Ignored),
    ("return_dict", Ignored),
    ("attn_implementation", Ignored),
    ("_attn_implementation", Ignored),
    ("_attn_implementation_autoset", Ignored),
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

/// The configuration that a `config.json` describes, not yet checked.
pub(super) fn config(object: Map<String, Value>) -> Result<ModelConfig, String> {
    let fields = Fields::new(CONFIG, "", object)?;
    if !fields.has("model_type") {
        return Err("model_type is missing; it must be \"gpt_oss\"".into());
    }
    fields.object_or_null("quantization_config", QUANTIZATION)?;
    let hidden_dim = fields.size("hidden_size")?;
    let n_attn_heads = fields.size("num_attention_heads")?;
    let head_dim = match fields.size_or_null("head_dim")? {
        Some(head_dim) => head_dim,
        None => hidden_dim.checked_div(n_attn_heads).unwrap_or(0),
    };
    let n_layers = fields.size("num_hidden_layers")?;
    let experts_per_token = fields.size("num_experts_per_tok")?;
    fields.agree("experts_per_token", experts_per_token as f64, "num_experts_per_tok")?;
    let max_positions = fields.size("max_position_embeddings")?;
    let rope = rope(&fields, head_dim, max_positions)?;
    fields.agree(
        "initial_context_length",
        rope.context as f64,
        "the context before scaling",
    )?;
    Ok(ModelConfig {
        vocab_size: fields.size("vocab_size")?,
        hidden_dim,
        n_experts: experts(&fields)?,
        experts_per_token,
        intermediate_dim: fields.size("intermediate_size")?,
        n_layers,
        head_dim,
        n_attn_heads,
        n_kv_heads: fields.size_or_null("num_key_value_heads")?.unwrap_or(n_attn_heads),
        seq_len: max_positions.min(MAX_SEQ_LEN),
        initial_context_length: rope.context,
        context_length: Some(max_positions),
        rope_theta: rope.theta as f32,
        rope_scaling_factor: rope.factor as f32,
        yarn_ramp: rope.ramp,
        rope_concentration: rope.concentration,
        sliding_window: sliding_window(&fields, n_layers)?,
        swiglu_limit: fields.number("swiglu_limit")? as f32,
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
fn sliding_window(fields: &Fields, n_layers: usize) -> Result<usize, String> {
    const TYPES: [&str; 2] = ["sliding_attention", "full_attention"];
    let types = match fields.value("layer_types") {
        Value::Null => None,
        Value::Array(types) => Some(types),
        other => return Err(fields.wrong("layer_types", &other, "a list")),
    };
    if let Some(types) = types {
        if types.len() != n_layers {
            return Err(format!("layer_types has {} entries for {n_layers} layers", types.len()));
        }
        if types.iter().all(|found| found == TYPES[1]) {
            return Ok(0);
        }
        for (layer, found) in types.iter().enumerate() {
            let expected = TYPES[layer % 2];
            if found != expected {
                return Err(format!(
                    "layer_types[{layer}] is {found}; only {expected} is supported there, or full_attention everywhere"
                ));
            }
        }
    }
    match fields.size_or_null("sliding_window")? {
        Some(window) if window > 0 => Ok(window),
        window => Err(format!(
            "sliding_window is {} where even layers are windowed; it must be 1 or more, or layer_types all \
             full_attention",
            window.map_or("null".into(), |window| window.to_string())
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

fn rope(fields: &Fields, head_dim: usize, max_positions: usize) -> Result<Rope, String> {
    let (name, rope) = rope_fields(fields)?;
    let theta = match rope.number_or_null("rope_theta")? {
        Some(theta) if !fields.has("rope_theta") => theta,
        _ => {
            let theta = fields.number("rope_theta")?;
            rope.agree("rope_theta", theta, "rope_theta")?;
            theta
        }
    };
    let kind = match (rope.text_or_null("rope_type")?, rope.text_or_null("type")?) {
        (Some(a), Some(b)) if a != b => return Err(format!("{name}.rope_type is {a:?} and {name}.type {b:?}")),
        (a, b) => a.or(b).unwrap_or("default".into()),
    };
    match kind.as_str() {
        "yarn" => yarn(&rope, name, theta, head_dim, max_positions),
        "default" => plain(&rope, name, theta, max_positions),
        _ => Err(format!(
            "{name}.rope_type is {kind:?}; only \"yarn\" and \"default\" are supported"
        )),
    }
}

/// The name and the fields of the object that describes the rotary embedding.
fn rope_fields(fields: &Fields) -> Result<(&'static str, Fields), String> {
    let parameters = fields.object_or_null("rope_parameters", ROPE)?;
    if let Some(parameters) = parameters {
        let older = fields.value("rope_scaling");
        if !older.is_null() && older != fields.value("rope_parameters") {
            return Err("rope_scaling and rope_parameters are both there and differ; leave one out".into());
        }
        return Ok(("rope_parameters", parameters));
    }
    if let Some(scaling) = fields.object_or_null("rope_scaling", ROPE)? {
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
    Ok(("rope_scaling", Fields::new(ROPE, "rope_scaling.", object)?))
}

/// A rotary embedding without scaling. Refuses the parameters of YaRN.
fn plain(rope: &Fields, name: &str, theta: f64, max_positions: usize) -> Result<Rope, String> {
    let of_yarn = ROPE.iter().skip_while(|(field, _)| *field != "factor");
    for (field, _) in of_yarn {
        if rope.has(field) && !rope.value(field).is_null() {
            return Err(format!(
                "{name}.{field} is {} where {name}.rope_type is \"default\", or absent, which is no scaling; \
                 write \"yarn\" or leave {field} out",
                rope.value(field)
            ));
        }
    }
    Ok(Rope {
        theta,
        factor: 1.0,
        context: max_positions,
        ramp: None,
        concentration: None,
    })
}

fn yarn(rope: &Fields, name: &str, theta: f64, head_dim: usize, max_positions: usize) -> Result<Rope, String> {
    let at_least = |field: &str, value: f64, least: f64| {
        let fits = value.is_finite() && value >= least;
        let refusal = || format!("{name}.{field} is {value}; it must be finite and {least} or more");
        fits.then_some(value).ok_or_else(refusal)
    };
    let positive = |field: &str, value: f64| {
        let fits = value.is_finite() && value > 0.0;
        fits.then_some(value)
            .ok_or_else(|| format!("{name}.{field} is {value}; it must be finite and above 0"))
    };
    let factor = at_least("factor", rope.number("factor")?, 1.0)?;
    let context = rope
        .size_or_null("original_max_position_embeddings")?
        .unwrap_or(max_positions);
    let beta = |field: &str, default: f64| positive(field, rope.number_or_null(field)?.unwrap_or(default));
    let yarn = Yarn {
        head_dim,
        theta,
        factor,
        context,
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
    };
    let ends @ [low, high] = yarn.ends();
    let rounded = if rope.flag("truncate")? {
        [low.floor(), high.ceil()]
    } else {
        ends
    };
    let kept = [rounded[0].max(0.0), rounded[1].min(head_dim as f64 - 1.0)];
    let scales = [rope.number_or_null("mscale")?, rope.number_or_null("mscale_all_dim")?];
    let attention_factor = match (rope.number_or_null("attention_factor")?, scales) {
        (Some(given), _) => Some(positive("attention_factor", given)?),
        (None, [Some(mscale), Some(all)]) if mscale != 0.0 && all != 0.0 => {
            let ratio = concentration(factor, mscale) / concentration(factor, all);
            Some(positive("mscale", ratio)?)
        }
        _ => None,
    };
    // A concentration that rounds to the eval program's own is left out, so that it is computed as the program does.
    let own = concentration(factor, 1.0) as f32;
    Ok(Rope {
        theta,
        factor,
        context,
        ramp: yarn.ramp(kept, kept == ends),
        concentration: attention_factor.map(|given| given as f32).filter(|&given| given != own),
    })
}

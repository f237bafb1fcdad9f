//! Checkpoints in all formats read back what was written, and malformed ones are refused with helpful errors.

#[path = "common/synthetic.rs"]
mod synthetic;

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use getp::backend::cpu::load;
use getp::checkpoint::{
    BinCheckpoint, CONFIG_BYTES, Checkpoint, Field, PointerCheckpoint, SafetensorsCheckpoint, TensorId, TensorLayout,
    Values, config_from_bytes, config_to_bytes, explain_mapped,
};
use getp::config::ModelConfig;
use getp::error::Error;
use getp::weights::WeightFormat;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use synthetic::{Dense, Directory, Experts, Synthetic, SyntheticCheckpoint, Temperament, write_bin, write_safetensors};
use tempfile::TempDir;

const SEED: u64 = 7;

/// All dimensions differ, so that none can be mistaken for another.
fn tiny() -> ModelConfig {
    ModelConfig {
        vocab_size: 50,
        hidden_dim: 64,
        n_experts: 3,
        experts_per_token: 2,
        intermediate_dim: 96,
        n_layers: 2,
        head_dim: 8,
        n_attn_heads: 4,
        n_kv_heads: 2,
        seq_len: 256,
        ..ModelConfig::preset_20b()
    }
}

fn tiny_bin(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("model.bin");
    write_bin(&path, &tiny(), SEED, Temperament::Tame).expect("the file can be written");
    path
}

fn tiny_hf(dir: &TempDir, shards: usize) -> PathBuf {
    write_safetensors(dir.path(), &tiny(), SEED, Temperament::Tame, shards).expect("the directory can be written");
    dir.path().to_path_buf()
}

fn temp() -> TempDir {
    tempfile::tempdir().expect("there is a place for temporary files")
}

fn bits(checkpoint: &dyn Checkpoint, id: TensorId) -> Vec<u32> {
    let tensor = checkpoint.tensor(id).expect("the model has the tensor");
    assert_eq!([tensor.rows, tensor.cols], id.shape(checkpoint.config()), "{id:?}");
    let values = tensor.to_f32().unwrap();
    assert_eq!(values.len(), tensor.rows * tensor.cols, "{id:?}");
    values.into_iter().map(f32::to_bits).collect()
}

/// The configuration that a directory gives for the same model: it also has the length of the context.
fn in_directory(config: &ModelConfig) -> ModelConfig {
    let length = (config.initial_context_length as f32 * config.rope_scaling_factor) as usize;
    ModelConfig {
        seq_len: length.min(4096),
        context_length: Some(length),
        ..config.clone()
    }
}

/// The same dimensions and the same values to the last bit.
fn assert_same(a: &dyn Checkpoint, b: &dyn Checkpoint) {
    assert_eq!(in_directory(a.config()), in_directory(b.config()));
    for id in TensorId::all(a.config()) {
        assert!(bits(a, id) == bits(b, id), "{id:?} differs");
    }
}

#[track_caller]
fn assert_refused<T>(result: getp::error::Result<T>, needles: &[&str]) {
    let text = result.err().expect("it must be refused").to_string();
    for needle in needles {
        assert!(text.contains(needle), "{text:?} does not say {needle:?}");
    }
    assert!(!text.contains('\n'), "{text:?} is more than one line");
}

// Values.

#[test]
fn every_source_gives_the_same_values() {
    for temperament in [Temperament::Tame, Temperament::Wild] {
        let (bin_dir, one_dir, three_dir) = (temp(), temp(), temp());
        let path = bin_dir.path().join("model.bin");
        write_bin(&path, &tiny(), SEED, temperament).unwrap();
        write_safetensors(one_dir.path(), &tiny(), SEED, temperament, 1).unwrap();
        write_safetensors(three_dir.path(), &tiny(), SEED, temperament, 3).unwrap();
        assert!(one_dir.path().join("model.safetensors").exists());
        assert!(three_dir.path().join("model-00003-of-00003.safetensors").exists());

        let bin = BinCheckpoint::open(&path).unwrap();
        assert_eq!(bin.config(), &tiny());
        assert_same(&bin, &SafetensorsCheckpoint::open(one_dir.path()).unwrap());
        assert_same(&bin, &SafetensorsCheckpoint::open(three_dir.path()).unwrap());
        let synthetic = Synthetic::new(&tiny(), SEED, temperament).unwrap();
        assert_same(&bin, &SyntheticCheckpoint::widened(&synthetic));
        assert_same(&bin, &SyntheticCheckpoint::packed(&synthetic));
    }
}

#[test]
fn other_types_come_back_too() {
    let dir = temp();
    let synthetic = Synthetic {
        dense: Dense::F32,
        ..Synthetic::new(&tiny(), SEED, Temperament::Tame).unwrap()
    };
    synthetic
        .write_directory(dir.path(), Directory::hugging_face(2), &|_| ())
        .unwrap();
    let hf = SafetensorsCheckpoint::open(dir.path()).unwrap();
    assert_eq!(*hf.config(), in_directory(&tiny()));
    assert_same(&hf, &SyntheticCheckpoint::widened(&synthetic));
    assert!(matches!(
        hf.tensor(TensorId::Embedding).unwrap().parts[0].values,
        Values::F32(_)
    ));

    // Only MXFP4 needs whole blocks.
    let config = ModelConfig {
        hidden_dim: 36,
        intermediate_dim: 20,
        ..tiny()
    };
    for experts in [Experts::Bf16, Experts::F32] {
        let synthetic = Synthetic {
            config: config.clone(),
            experts,
            ..synthetic.clone()
        }
        .check()
        .unwrap();
        let path = dir.path().join("model.bin");
        synthetic.write_bin(&path, &|_| ()).unwrap();
        assert_same(
            &BinCheckpoint::open(&path).unwrap(),
            &SyntheticCheckpoint::packed(&synthetic),
        );
    }
    assert_refused(
        Synthetic::new(&config, SEED, Temperament::Tame),
        &["hidden_dim is 36", "multiple of 32"],
    );
}

#[test]
fn models_with_one_of_each_and_without_windows_come_back() {
    let dir = temp();
    let config = ModelConfig {
        n_experts: 1,
        experts_per_token: 1,
        sliding_window: 0,
        ..tiny()
    };
    let config = ModelConfig {
        n_kv_heads: 1,
        n_attn_heads: 1,
        rope_scaling_factor: 1.0,
        n_layers: 1,
        ..config
    };
    write_safetensors(dir.path(), &config, SEED, Temperament::Wild, 1).unwrap();
    let synthetic = SyntheticCheckpoint::new(&config, SEED, Temperament::Wild).unwrap();
    assert_same(&SafetensorsCheckpoint::open(dir.path()).unwrap(), &synthetic);
}

#[test]
fn attention_projections_come_in_three_parts() {
    let dir = temp();
    let hf = SafetensorsCheckpoint::open(tiny_hf(&dir, 1)).unwrap();
    let counts = |id| {
        let tensor = hf.tensor(id).unwrap();
        tensor
            .parts
            .iter()
            .map(|part| (part.rows, part.values.count()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        counts(TensorId::Qkv { layer: 1 }),
        [(32, 32 * 64), (16, 16 * 64), (16, 16 * 64)]
    );
    assert_eq!(counts(TensorId::QkvBias { layer: 1 }), [(1, 32), (1, 16), (1, 16)]);
}

#[test]
fn pointers_give_what_the_file_gives() {
    let dir = temp();
    let path = tiny_bin(&dir);
    let bytes = fs::read(&path).unwrap();
    let (layout, pointers) = pointers_into(&bytes);
    // SAFETY: each pointer points to its array in `bytes`, which outlives the checkpoint.
    let checkpoint = unsafe { PointerCheckpoint::new(tiny(), pointers) }.unwrap();
    assert_same(&checkpoint, &BinCheckpoint::open(&path).unwrap());

    let data = bytes.as_ptr();
    checkpoint.check_range(data, bytes.len() as u64).unwrap();
    assert_refused(
        checkpoint.check_range(data, bytes.len() as u64 - 1),
        &[
            "b_mlp2 inside the mapped file",
            &format!("has {} bytes", layout.in_file(Field::BMlp2).len() - 1),
        ],
    );
    let behind = data.wrapping_add(CONFIG_BYTES + 1);
    assert_refused(
        checkpoint.check_range(behind, u64::MAX),
        &["token_embedding_table", "has 0 bytes"],
    );
}

#[test]
fn files_cut_while_they_are_mapped_are_refused_and_not_read() {
    let last = TensorId::Unembedding;
    let cut = |path: &Path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    };
    let dir = temp();
    let path = tiny_bin(&dir);
    let file = fs::File::open(&path).unwrap();
    // SAFETY: it is cut below, but nothing is read behind that.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let (layout, pointers) = pointers_into(&map);
    let (data, bytes) = (map.as_ptr(), layout.file_bytes() as u64);
    let watching = |descriptor| {
        // SAFETY: the map lives as long.
        let mut checkpoint = unsafe { PointerCheckpoint::new(tiny(), pointers) }?;
        checkpoint.watch(descriptor, data, bytes)?;
        Ok::<_, getp::error::Error>(checkpoint)
    };
    let watched = watching(file.as_raw_fd()).unwrap();
    // The other descriptors are not open, are no file, or are another file: they say nothing about this one.
    let other = fs::File::open(file!()).unwrap();
    let unwatched = [-1, other.as_raw_fd()].map(|descriptor| watching(descriptor).unwrap());
    let bin = BinCheckpoint::open(&path).unwrap();
    assert!(watched.tensor(last).is_ok() && bin.tensor(last).is_ok());
    cut(&path);
    assert_refused(bin.tensor(last), &["model.bin", "truncated"]);
    assert_refused(watched.tensor(last), &["truncated"]);
    assert!(unwatched.iter().all(|checkpoint| checkpoint.tensor(last).is_ok()));

    let directory = temp();
    let hf = SafetensorsCheckpoint::open(tiny_hf(&directory, 1)).unwrap();
    cut(&directory.path().join("model.safetensors"));
    assert_refused(hf.tensor(last), &["model.safetensors", "truncated"]);
}

#[test]
fn a_null_pointer_is_refused_by_name() {
    let dir = temp();
    let bytes = fs::read(tiny_bin(&dir)).unwrap();
    let (_, mut pointers) = pointers_into(&bytes);
    pointers[Field::BRouter as usize] = std::ptr::null();
    // SAFETY: all but the NULL point to their arrays in `bytes`.
    let checkpoint = unsafe { PointerCheckpoint::new(tiny(), pointers) };
    assert_refused(checkpoint, &["b_router is NULL"]);
}

fn pointers_into(bytes: &[u8]) -> (TensorLayout, [*const u8; Field::COUNT]) {
    let layout = TensorLayout::new(tiny()).unwrap();
    let mut pointers = [std::ptr::null(); Field::COUNT];
    for field in Field::IN_FILE_ORDER {
        pointers[field as usize] = bytes[layout.in_file(field)].as_ptr();
    }
    (layout, pointers)
}

#[test]
fn layers_and_experts_beyond_the_model_are_refused() {
    let dir = temp();
    let bin = BinCheckpoint::open(tiny_bin(&dir)).unwrap();
    let hf = SafetensorsCheckpoint::open(tiny_hf(&dir, 1)).unwrap();
    for checkpoint in [&bin as &dyn Checkpoint, &hf] {
        assert_refused(
            checkpoint.tensor(TensorId::Sinks { layer: 2 }),
            &["attn_sinks", "no layer 2"],
        );
        assert_refused(
            checkpoint.tensor(TensorId::Mlp1 { layer: 1, expert: 3 }),
            &["w_mlp1", "expert 3"],
        );
        assert_refused(
            checkpoint.tensor(TensorId::Mlp2 {
                layer: usize::MAX,
                expert: 0,
            }),
            &["w_mlp2"],
        );
    }
}

// The layout of a `.bin` file.

#[test]
fn the_file_lies_as_the_eval_program_reads_it() {
    let layout = TensorLayout::new(ModelConfig::preset_20b()).unwrap();
    assert_eq!(layout.in_file(Field::TokenEmbeddingTable).start, 60);
    assert_eq!(layout.in_file(Field::Out).start, 60 + 4 * 201_088 * 2880);
    assert_eq!(layout.in_file(Field::RmsAttnW).start, 60 + 8 * 201_088 * 2880);
    assert_eq!(layout.file_bytes(), 83_659_028_796);
    let (field, bytes) = layout.in_array(TensorId::Mlp1 { layer: 23, expert: 31 }).unwrap();
    assert_eq!(field, Field::WMlp1);
    assert_eq!(bytes.end, 24 * 32 * 5760 * 2880 * 4);
}

#[test]
fn the_header_comes_back() {
    let bytes = config_to_bytes(&ModelConfig::preset_20b());
    assert_eq!(bytes[..8], [0x80, 0x11, 0x03, 0, 0x40, 0x0b, 0, 0]);
    assert_eq!(bytes[44..48], 150_000f32.to_le_bytes());
    assert_eq!(config_from_bytes(&bytes).unwrap(), ModelConfig::preset_20b());
}

// Malformed `.bin` files.

/// The file with one field of its header changed.
fn with_field(dir: &TempDir, index: usize, value: i32) -> PathBuf {
    let path = tiny_bin(dir);
    let mut bytes = fs::read(&path).unwrap();
    bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn files_of_the_wrong_length_are_refused() {
    let dir = temp();
    let path = tiny_bin(&dir);
    let whole = fs::read(&path).unwrap();
    let needed = format!("where {} are needed", whole.len());
    for len in [60, 61, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        assert_refused(
            BinCheckpoint::open(&path),
            &["model.bin", &format!("has {len} bytes"), &needed],
        );
    }
    fs::write(&path, "").unwrap();
    assert_refused(
        BinCheckpoint::open(&path),
        &["model.bin: it is an empty file; a model is"],
    );
    for len in [1, 59] {
        fs::write(&path, &whole[..len]).unwrap();
        assert_refused(
            BinCheckpoint::open(&path),
            &[&format!("has {len} bytes where 60 are needed")],
        );
    }
    fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    assert_refused(
        BinCheckpoint::open(&path),
        &[&format!("has {} bytes", whole.len() + 1), &needed],
    );
    assert_refused(
        BinCheckpoint::open(dir.path().join("none.bin")),
        &["none.bin", "No such file"],
    );
    assert_refused(BinCheckpoint::open(dir.path()), &[&dir.path().display().to_string()]);
}

#[test]
fn wrong_dimensions_are_refused_by_name() {
    let fields = [
        "vocab_size",
        "hidden_dim",
        "n_experts",
        "experts_per_token",
        "intermediate_dim",
        "n_layers",
        "head_dim",
        "n_attn_heads",
        "n_kv_heads",
        "seq_len",
        "initial_context_length",
    ];
    let dir = temp();
    for (index, field) in fields.into_iter().enumerate() {
        for value in [i32::MIN, -1, 0, i32::MAX] {
            let needle = format!("model.bin: config: {field} is {value};");
            assert_refused(BinCheckpoint::open(with_field(&dir, index, value)), &[&needle]);
        }
    }
    assert_refused(
        BinCheckpoint::open(with_field(&dir, 13, -1)),
        &["sliding_window is -1", "not be negative"],
    );
    let infinite = f32::INFINITY.to_bits() as i32;
    assert_refused(
        BinCheckpoint::open(with_field(&dir, 11, infinite)),
        &["rope_theta is inf"],
    );
}

#[test]
fn dimensions_whose_product_overflows_are_refused() {
    let large = 1 << 24;
    let config = ModelConfig {
        n_layers: large,
        n_experts: large,
        intermediate_dim: large,
        ..tiny()
    };
    assert_refused(TensorLayout::new(config.clone()), &["w_mlp1 overflows"]);
    let dir = temp();
    let path = dir.path().join("model.bin");
    fs::write(&path, config_to_bytes(&config)).unwrap();
    assert_refused(BinCheckpoint::open(&path), &["w_mlp1 overflows"]);
    let config = ModelConfig {
        hidden_dim: large,
        head_dim: large,
        n_attn_heads: large,
        n_kv_heads: large,
        ..tiny()
    };
    assert_refused(TensorLayout::new(config), &["w_qkv overflows"]);
}

// Malformed Hugging Face directories.

fn edit_json(path: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

/// The directory's error after a change of its `config.json`.
#[track_caller]
fn assert_config_refused(field: &str, value: serde_json::Value, needles: &[&str]) {
    let dir = temp();
    let path = tiny_hf(&dir, 1);
    edit_json(&path.join("config.json"), |json| {
        *json.pointer_mut(field).expect("the field is there") = value;
    });
    assert_refused(SafetensorsCheckpoint::open(&path), needles);
}

#[test]
fn wrong_configurations_are_refused() {
    use serde_json::json;
    assert_config_refused("/hidden_size", json!(-1), &["config.json", "hidden_size is -1"]);
    assert_config_refused("/hidden_size", json!(0), &["hidden_dim is 0"]);
    assert_config_refused(
        "/hidden_size",
        json!(72),
        &["is BF16 [50, 64]; BF16 or F32 [50, 72] is needed"],
    );
    assert_config_refused(
        "/model_type",
        json!("mixtral"),
        &["config.json: model_type is \"mixtral\""],
    );
    assert_config_refused("/num_local_experts", json!(1 << 25), &["n_experts is 33554432"]);
}

#[test]
fn experts_that_are_no_blocks_are_refused() {
    let dir = temp();
    let config = ModelConfig {
        hidden_dim: 72,
        ..tiny()
    };
    let synthetic = Synthetic {
        config,
        experts: Experts::Bf16,
        ..Synthetic::new(&tiny(), SEED, Temperament::Tame).unwrap()
    };
    let form = Directory::hugging_face(1);
    synthetic.write_directory(dir.path(), form, &|_| ()).unwrap();
    SafetensorsCheckpoint::open(dir.path()).expect("bfloat16 needs no blocks");
    edit_tensors(dir.path(), SINGLE, |tensors| {
        let name = "model.layers.0.mlp.experts.gate_up_proj";
        tensors.remove(name).expect("the tensor was there");
        for (end, shape) in [("_blocks", vec![3, 192, 2, 16]), ("_scales", vec![3, 192, 2])] {
            let bytes = shape.iter().product();
            tensors.insert(
                format!("{name}{end}"),
                TensorView::new(Dtype::U8, shape, &ZEROS[..bytes]).unwrap(),
            );
        }
    });
    assert_refused(
        SafetensorsCheckpoint::open(dir.path()),
        &["hidden_dim is 72", "multiple of 32"],
    );
}

/// Files with more tensors than `config.json` describes belong to another model.
#[test]
fn tensors_the_model_has_no_use_for_are_refused() {
    let dir = temp();
    let path = tiny_hf(&dir, 1);
    edit_tensors(&path, SINGLE, |tensors| {
        let extra = TensorView::new(Dtype::BF16, vec![8], &ZEROS[..16]).unwrap();
        tensors.insert("model.layers.0.self_attn.q_norm.weight".into(), extra);
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["tensor model.layers.0.self_attn.q_norm.weight is no part of the model"],
    );
    let dir = temp();
    let path = tiny_hf(&dir, 2);
    edit_json(&path.join("config.json"), |json| {
        json["num_hidden_layers"] = 1.into();
        json["layer_types"] = serde_json::json!(["sliding_attention"]);
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["tensor model.layers.1.", "is no part of the model"],
    );
}

#[test]
fn originals_are_the_same_model() {
    for shards in [1, 3] {
        let dir = temp();
        let synthetic = Synthetic::new(&tiny(), SEED, Temperament::Wild).unwrap();
        synthetic
            .write_directory(dir.path(), Directory::original(shards), &|_| ())
            .unwrap();
        let original = SafetensorsCheckpoint::open(dir.path()).unwrap();
        assert_eq!(*original.config(), in_directory(&tiny()));
        assert_same(&original, &SyntheticCheckpoint::widened(&synthetic));
    }
}

#[test]
fn originals_configurations_are_taken_or_refused() {
    let dir = temp();
    let synthetic = Synthetic::new(&tiny(), SEED, Temperament::Wild).unwrap();
    synthetic
        .write_directory(dir.path(), Directory::original(1), &|_| ())
        .unwrap();
    let json = dir.path().join("config.json");
    let whole = fs::read(&json).unwrap();
    let with = |field: &str, value: serde_json::Value| {
        fs::write(&json, &whole).unwrap();
        edit_json(&json, |json| json[field] = value);
        SafetensorsCheckpoint::open(dir.path())
    };
    type Change = fn(&mut ModelConfig);
    let changes: [(&str, serde_json::Value, Change); 9] = [
        ("experts_per_token", 1.into(), |c| c.experts_per_token = 1),
        ("swiglu_limit", 5.into(), |c| c.swiglu_limit = 5.0),
        ("sliding_window", 0.into(), |c| c.sliding_window = 0),
        ("rope_theta", 200_000.into(), |c| c.rope_theta = 200_000.0),
        ("initial_context_length", 2048.into(), |c| {
            (c.initial_context_length, c.context_length) = (2048, Some(65_536));
        }),
        ("rope_scaling_factor", 1.into(), |c| {
            (c.rope_scaling_factor, c.context_length) = (1.0, Some(4096));
        }),
        ("rope_scaling_factor", 8.into(), |c| {
            (c.rope_scaling_factor, c.context_length) = (8.0, Some(32_768));
        }),
        ("rope_ntk_alpha", 2.into(), |c| {
            c.yarn_ramp = Some([1.011_597_4, 1.942_122])
        }),
        ("rope_ntk_beta", 16.into(), |c| {
            c.yarn_ramp = Some([1.244_228_5, 2.174_753])
        }),
    ];
    for (field, value, change) in changes {
        let mut expected = in_directory(&tiny());
        change(&mut expected);
        assert_eq!(*with(field, value).unwrap().config(), expected, "{field}");
    }
    assert_refused(
        with("rope_ntk_gamma", 2.into()),
        &["rope_ntk_gamma is 2; the field is not known"],
    );
    assert_refused(
        with("head_dim", "8".into()),
        &["head_dim is \"8\"; it must be a whole number"],
    );
    assert_refused(
        with("num_hidden_layers", 1.into()),
        &["tensor block.1.", "is no part of the model"],
    );
    assert_refused(
        with("num_experts", 4.into()),
        &["block.0.mlp.gate.weight is BF16 [3, 64]"],
    );
    // The reference asserts as much.
    assert_refused(
        with("initial_context_length", 100.into()),
        &["initial_context_length 100", "from -0.2", "must lie between 0 and 3"],
    );
    fs::write(&json, &whole).unwrap();
    edit_json(&json, |json| {
        for field in ["rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta"] {
            json.as_object_mut().unwrap().remove(field);
        }
    });
    assert_refused(SafetensorsCheckpoint::open(dir.path()), &["model_type is missing"]);
}

#[test]
fn tensors_in_two_files_are_refused() {
    let dir = temp();
    let synthetic = Synthetic::new(&tiny(), SEED, Temperament::Wild).unwrap();
    synthetic
        .write_directory(dir.path(), Directory::original(2), &|_| ())
        .unwrap();
    fs::copy(
        dir.path().join("model--00002-of-00002.safetensors"),
        dir.path().join("copy.safetensors"),
    )
    .unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(dir.path()),
        &["and in another file of the directory"],
    );
}

/// Experts in bfloat16 and float32, transposed, as transformers saves a model that it has dequantized or trained.
#[test]
fn plain_experts_are_the_same_model() {
    let made = |experts| Synthetic {
        experts,
        ..Synthetic::new(&tiny(), SEED, Temperament::Wild).unwrap()
    };
    for (experts, dequantized) in [(Experts::Mxfp4, true), (Experts::Bf16, false), (Experts::F32, false)] {
        let dir = temp();
        let synthetic = made(experts);
        let form = Directory {
            dequantized,
            ..Directory::hugging_face(2)
        };
        synthetic.write_directory(dir.path(), form, &|_| ()).unwrap();
        let hf = SafetensorsCheckpoint::open(dir.path()).unwrap();
        let tensor = hf.tensor(TensorId::Mlp1 { layer: 0, expert: 1 }).unwrap();
        assert!(matches!(tensor.parts[0].values, Values::Columns(_)));
        let value_bytes = if experts == Experts::F32 { 4 } else { 2 };
        assert_eq!(tensor.len_bytes(), value_bytes * 192 * 64);
        assert_same(&hf, &SyntheticCheckpoint::widened(&synthetic));
    }
}

/// The bytes of a layer's packed matrices, and their formats.
fn packed(checkpoint: &dyn Checkpoint, layer: usize) -> Vec<(WeightFormat, Vec<u8>)> {
    let (weights, _) = load(checkpoint).expect("the weights can be packed");
    let layer = &weights.layers[layer];
    [&layer.qkv, &layer.attn_out, &layer.router, &layer.mlp1, &layer.mlp2]
        .map(|matrix| (matrix.format, matrix.bytes.to_vec()))
        .into()
}

/// A model is packed to the same bytes from every file format, also where bfloat16 values turn out to be exact in
/// MXFP4.
#[test]
fn every_form_of_a_model_is_packed_the_same() {
    let dir = temp();
    let synthetic = Synthetic::new(&tiny(), SEED, Temperament::Wild).unwrap();
    let expected = packed(&BinCheckpoint::open(tiny_bin_of(&synthetic, &dir)).unwrap(), 1);
    assert_eq!(expected[3].0, WeightFormat::Mxfp4);
    let dequantized = Directory {
        dequantized: true,
        ..Directory::hugging_face(1)
    };
    for form in [Directory::hugging_face(1), Directory::original(1), dequantized] {
        let dir = temp();
        synthetic.write_directory(dir.path(), form, &|_| ()).unwrap();
        let found = packed(&SafetensorsCheckpoint::open(dir.path()).unwrap(), 1);
        assert!(found == expected, "{form:?}");
    }
    let synthetic = Synthetic {
        experts: Experts::Bf16,
        ..synthetic
    };
    let dir = temp();
    synthetic.write_directory(dir.path(), dequantized, &|_| ()).unwrap();
    let found = packed(&SafetensorsCheckpoint::open(dir.path()).unwrap(), 1);
    assert_eq!(found[3].0, WeightFormat::Bf16);
}

fn tiny_bin_of(synthetic: &Synthetic, dir: &TempDir) -> PathBuf {
    let path = dir.path().join("model.bin");
    synthetic.write_bin(&path, &|_| ()).expect("the file can be written");
    path
}

#[test]
fn plain_experts_of_another_shape_are_refused() {
    let dir = temp();
    let form = Directory {
        dequantized: true,
        ..Directory::hugging_face(1)
    };
    let synthetic = Synthetic::new(&tiny(), SEED, Temperament::Wild).unwrap();
    synthetic.write_directory(dir.path(), form, &|_| ()).unwrap();
    edit_tensors(dir.path(), SINGLE, |tensors| {
        let name = "model.layers.1.mlp.experts.down_proj";
        let rows_first = TensorView::new(Dtype::BF16, vec![3, 64, 96], &ZEROS[..3 * 64 * 96 * 2]).unwrap();
        tensors.insert(name.into(), rows_first).expect("the tensor was there");
    });
    assert_refused(
        SafetensorsCheckpoint::open(dir.path()),
        &["down_proj is BF16 [3, 64, 96]; BF16 or F32 [3, 96, 64] is needed"],
    );
}

/// The error names what was given instead of a model.
#[test]
fn mix_ups_are_named() {
    let dir = temp();
    let path = tiny_hf(&dir, 1);
    let file = path.join("model.safetensors");
    assert_refused(
        BinCheckpoint::open(&file),
        &[
            "model.safetensors: it is a safetensors file",
            "directory with config.json",
        ],
    );
    let config = path.join("config.json");
    assert_refused(BinCheckpoint::open(&config), &["it is a JSON file"]);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 13761300984\n";
    fs::write(&file, pointer).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["model.safetensors", "git lfs pull"],
    );
    fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
    assert_refused(BinCheckpoint::open(&file), &["it is a GGUF file"]);

    fs::remove_file(&file).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["there is no model.safetensors in it"],
    );
    for (name, why) in [
        ("pytorch_model.bin", "PyTorch"),
        ("model.gguf", "GGUF"),
        ("original/config.json", "its directory original can be opened"),
        ("adapter_config.json", "merge it into its base model"),
    ] {
        let other = path.join(name);
        fs::create_dir_all(other.parent().unwrap()).unwrap();
        fs::write(other, b"PK\x03\x04 archive/data.pkl").unwrap();
        assert_refused(
            SafetensorsCheckpoint::open(&path),
            &["there is no model.safetensors in it", why],
        );
    }
    fs::remove_file(config).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["there is no config.json in it", "merge it into its base model"],
    );
}

/// A file that is no model is named, and what it seems to be instead of what its first bytes say as numbers.
#[test]
fn files_that_are_no_model_are_named() {
    let dir = temp();
    let path = dir.path().join("model.bin");
    let html = [&b"<!DOCTYPE html><html><body>Not found</body></html>"[..], &[b'\n'; 40]].concat();
    let metal = [&b"GPT-OSS v1.0"[..], &[0; 244]].concat();
    let random: Vec<u8> = (0_u32..256)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let vocabulary = [3_u32, 0, 1].map(u32::to_le_bytes).concat();
    let vocabulary = [&vocabulary[..], b"a", &[0; 4], &[2, 0, 0, 0], b"bc"].concat();
    for (bytes, needle) in [
        (&html[..], "model.bin: it is a web page"),
        (&metal, "model.bin: it is the release's model for Metal"),
        (&vocabulary, "model.bin: it is a vocabulary"),
        (&random, "model.bin: it is no model, or a damaged one (config: "),
    ] {
        fs::write(&path, bytes).unwrap();
        assert_refused(
            BinCheckpoint::open(&path),
            &[needle, "a model is the evaluation program's .bin file"],
        );
    }
    // The same for a file that the program has mapped.
    fs::write(&path, &metal).unwrap();
    let file = fs::File::open(&path).unwrap();
    // SAFETY: nobody changes the file.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let error = || config_from_bytes(map.first_chunk().unwrap()).unwrap_err();
    let explained = |descriptor, error| Err::<(), _>(explain_mapped(descriptor, map.as_ptr(), error));
    let name = path.display().to_string();
    assert_refused(explained(file.as_raw_fd(), error()), &[&name, "model for Metal"]);
    let null = Error::Null("w_qkv");
    assert_refused(explained(file.as_raw_fd(), null), &["w_qkv is NULL"]);
    let other = fs::File::open(file!()).unwrap();
    for descriptor in [-1, other.as_raw_fd()] {
        assert_refused(explained(descriptor, error()), &[&error().to_string()]);
    }
    // What a directory needs beside its weights is named, too.
    let dir = temp();
    let path = tiny_hf(&dir, 2);
    for name in ["model.safetensors.index.json", "config.json"] {
        fs::write(path.join(name), &html).unwrap();
        assert_refused(
            SafetensorsCheckpoint::open(&path),
            &[name, "it is a web page", "fetch it again"],
        );
    }
}

#[test]
fn garbage_is_refused() {
    let dir = temp();
    let path = tiny_hf(&dir, 1);
    let file = path.join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    let header_bytes = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let refused = |bytes: &[u8], needles: &[&str]| {
        fs::write(&file, bytes).unwrap();
        assert_refused(
            SafetensorsCheckpoint::open(&path),
            &[&["model.safetensors"], needles].concat(),
        );
    };
    refused(&[], &["it is an empty file"]);
    refused(&whole[..7], &["shorter than a safetensors header"]);
    refused(&whole[..8 + header_bytes - 1], &["exceed the file"]);
    refused(&[0xff; 100], &["18446744073709551615 bytes exceed the file"]);
    refused(
        &whole[..whole.len() - 1],
        &[&format!("where {} are needed", whole.len())],
    );
    refused(
        &[&whole[..], &[0]].concat(),
        &[&format!("where {} are needed", whole.len())],
    );
    let mut garbled = whole.clone();
    garbled[8..24].fill(b'x');
    refused(&garbled, &["wrong header: expected value"]);
    garbled[8..24].fill(0xff);
    refused(&garbled, &["wrong header"]);
    refused(&with_header("[]"), &["wrong header"]);
    let size = u64::MAX / 8;
    let huge = |i: u64| {
        let (start, end) = (i * size, (i + 1) * size);
        format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#)
    };
    let tensors: Vec<String> = (0..8).map(huge).collect();
    refused(&with_header(&format!("{{{}}}", tensors.join(","))), &["are needed"]);
    refused(
        &with_header(&format!("{{{}}}", huge(0).replace("[0,", "[8,"))),
        &["invalid offset"],
    );
    refused(
        &with_header(&format!("{{{}}}", huge(0).replace("U8", "F64"))),
        &["wrong header"],
    );

    fs::remove_file(&file).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["there is no model.safetensors in it"],
    );
    fs::write(path.join("config.json"), "{").unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["config.json", "EOF while parsing"],
    );
    assert_refused(
        SafetensorsCheckpoint::open(path.join("none")),
        &["none/config.json", "No such file"],
    );
}

/// The file of a directory that has only one.
const SINGLE: &str = "model.safetensors";

/// Bytes for tensors whose values do not matter.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// A safetensors file of a header and nothing else.
fn with_header(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}

/// Rewrites one of the directory's files with other tensors.
fn edit_tensors(path: &Path, file: &str, edit: impl FnOnce(&mut HashMap<String, TensorView<'_>>)) {
    let file = path.join(file);
    let bytes = fs::read(&file).unwrap();
    let mut tensors: HashMap<String, TensorView<'_>> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(n, t)| (n.to_string(), t))
        .collect();
    edit(&mut tensors);
    safetensors::serialize_to_file(tensors, None, &file).unwrap();
}

#[test]
fn tensors_of_the_wrong_type_or_shape_are_refused() {
    let refused = |name: &str, dtype: Dtype, shape: &[usize], needles: &[&str]| {
        let dir = temp();
        let path = tiny_hf(&dir, 1);
        edit_tensors(&path, SINGLE, |tensors| {
            let bytes = dtype.bitsize() / 8 * shape.iter().product::<usize>();
            let wrong = TensorView::new(dtype, shape.to_vec(), &ZEROS[..bytes]).unwrap();
            tensors.insert(name.into(), wrong).expect("the tensor was there");
        });
        assert_refused(
            SafetensorsCheckpoint::open(&path),
            &[&["model.safetensors", name], needles].concat(),
        );
    };
    refused(
        "model.embed_tokens.weight",
        Dtype::F16,
        &[50, 64],
        &["is F16 [50, 64]; BF16 or F32 [50, 64]"],
    );
    refused(
        "model.norm.weight",
        Dtype::BF16,
        &[1, 64],
        &["[1, 64]; BF16 or F32 [64] is needed"],
    );
    refused(
        "model.layers.1.self_attn.k_proj.weight",
        Dtype::BF16,
        &[15, 64],
        &["[15, 64]", "[16, 64]"],
    );
    refused(
        "model.layers.0.self_attn.v_proj.bias",
        Dtype::U8,
        &[16],
        &["is U8 [16]"],
    );
    refused(
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        Dtype::I8,
        &[3, 192, 2, 16],
        &["U8 [3, 192, 2, 16]"],
    );
    refused(
        "model.layers.0.mlp.experts.down_proj_scales",
        Dtype::U8,
        &[3, 64, 2],
        &["U8 [3, 64, 3] is needed"],
    );
    refused(
        "model.layers.1.mlp.experts.down_proj_bias",
        Dtype::BF16,
        &[2, 64],
        &["[3, 64] is needed"],
    );
}

#[test]
fn missing_tensors_and_shards_are_refused() {
    let dir = temp();
    let path = tiny_hf(&dir, 1);
    let name = "model.layers.1.self_attn.sinks";
    edit_tensors(&path, SINGLE, |tensors| {
        tensors.remove(name).expect("the tensor was there");
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["tensor model.layers.1.self_attn.sinks is missing"],
    );

    let dir = temp();
    let path = tiny_hf(&dir, 2);
    let index = path.join("model.safetensors.index.json");
    let whole = fs::read(&index).unwrap();
    edit_json(&index, |json| {
        json["weight_map"]
            .as_object_mut()
            .unwrap()
            .remove(name)
            .expect("the tensor was there");
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &[name, "is in model-00002-of-00002.safetensors, but not in the index"],
    );
    edit_json(&index, |json| {
        json["weight_map"][name] = "model-00001-of-00002.safetensors".into()
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &[
            name,
            "is in model-00002-of-00002.safetensors, where the index places it in model-00001-of",
        ],
    );
    edit_json(&index, |json| {
        json["weight_map"][name] = "model-00002-of-00002.safetensors".into();
        json["weight_map"]["model.layers.2.self_attn.sinks"] = "model-00001-of-00002.safetensors".into();
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["model.layers.2.self_attn.sinks is not in model-00001-of-00002.safetensors, where it should be"],
    );
    edit_json(&index, |json| json["weight_map"][name] = "../model.safetensors".into());
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["\"../model.safetensors\" is not a file name"],
    );
    fs::write(&index, "{}").unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["index.json", "missing field `weight_map`"],
    );
    fs::write(&index, whole).unwrap();
    fs::remove_file(path.join("model-00002-of-00002.safetensors")).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["model-00002-of-00002.safetensors", "No such file"],
    );
}

/// All tensors of all shards are looked at, as those of a single file are.
#[test]
fn tensors_that_the_index_does_not_name_are_refused() {
    let shard = "model-00002-of-00002.safetensors";
    for extra in ["model.layers.0.self_attn.q_norm.weight", "model.lm_head.weight"] {
        let dir = temp();
        let path = tiny_hf(&dir, 2);
        edit_tensors(&path, shard, |tensors| {
            let tensor = TensorView::new(Dtype::BF16, vec![8], &ZEROS[..16]).unwrap();
            tensors.insert(extra.into(), tensor);
        });
        assert_refused(
            SafetensorsCheckpoint::open(&path),
            &[
                "index.json",
                &format!("tensor {extra} is in {shard}, but not in the index"),
            ],
        );
        // Named by the index, it is still no part of the model.
        edit_json(&path.join("model.safetensors.index.json"), |json| {
            json["weight_map"][extra] = shard.into();
        });
        assert_refused(SafetensorsCheckpoint::open(&path), &[extra, "is no part of the model"]);
    }
    // One that is in two shards.
    let dir = temp();
    let path = tiny_hf(&dir, 2);
    edit_tensors(&path, shard, |tensors| {
        let tensor = TensorView::new(Dtype::BF16, vec![50, 64], &ZEROS[..50 * 64 * 2]).unwrap();
        tensors.insert("lm_head.weight".into(), tensor);
    });
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &[
            "tensor lm_head.weight is in model-00002-of",
            "the index places it in model-00001-of",
        ],
    );
}

/// A directory may hold one model, not another's shards as well: which is read would differ between programs.
#[test]
fn shards_beside_those_that_are_read_are_refused() {
    for (shards, beside) in [
        (2, "model-00003-of-00003.safetensors"),
        (2, "model.safetensors"),
        (1, "model-00001-of-00002.safetensors"),
        (1, "model--00001-of-00007.safetensors"),
    ] {
        let dir = temp();
        let path = tiny_hf(&dir, shards);
        let list = if shards == 2 {
            "model.safetensors.index.json"
        } else {
            "model.safetensors"
        };
        // Other files are not a model's shards.
        fs::write(path.join("adapter_model.safetensors"), "").unwrap();
        SafetensorsCheckpoint::open(&path).expect("the shards are those of the index");
        fs::write(path.join(beside), "").unwrap();
        assert_refused(
            SafetensorsCheckpoint::open(&path),
            &[&format!("{beside} is there beside {list}, which does not name it")],
        );
    }
}

/// The maker's files can be read by whom the process's umask lets read them.
#[test]
fn safetensors_files_have_the_mode_of_others() {
    use std::os::unix::fs::PermissionsExt;
    let dir = temp();
    let path = tiny_hf(&dir, 2);
    let mode = |name: &str| fs::metadata(path.join(name)).unwrap().permissions().mode();
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        assert_eq!(mode(shard), mode("config.json"), "{shard}");
    }
}

/// Opens the file with each byte of its header changed, one at a time. Nothing panics, and what opens goes to `judge`,
/// with the changed file. Returns how many opened.
fn open_corrupted<T>(
    file: &Path,
    header_bytes: usize,
    open: impl Fn() -> getp::error::Result<T>,
    judge: impl Fn(T, &[u8]),
) -> usize {
    let whole = fs::read(file).unwrap();
    let mut opened = 0;
    for at in 0..header_bytes {
        let mut corrupted = whole.clone();
        for byte in [whole[at] ^ 1, whole[at] ^ 0x80, b'9'] {
            corrupted[at] = byte;
            fs::write(file, &corrupted).unwrap();
            match open() {
                Ok(checkpoint) => {
                    judge(checkpoint, &corrupted);
                    opened += 1;
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
    fs::write(file, whole).unwrap();
    opened
}

/// What has no checksum cannot know that it was changed. But it is refused, or is the model that the changed file
/// describes: every number that was read is the file's, and every value where it was.
#[test]
fn corrupted_headers_are_refused_or_mean_what_they_say() {
    let dir = temp();
    let config = ModelConfig {
        n_layers: 1,
        n_experts: 1,
        experts_per_token: 1,
        ..tiny()
    };
    let bin = dir.path().join("model.bin");
    write_bin(&bin, &config, SEED, Temperament::Tame).unwrap();
    let values = SyntheticCheckpoint::new(&config, SEED, Temperament::Tame).unwrap();
    let opened = open_corrupted(
        &bin,
        CONFIG_BYTES,
        || BinCheckpoint::open(&bin),
        |checkpoint, file| {
            // Of a single number changed, none that counts values can be right.
            let c = checkpoint.config();
            let word = |index: usize| u32::from_le_bytes(*file[4 * index..].first_chunk().unwrap());
            let expected = ModelConfig {
                seq_len: word(9) as usize,
                initial_context_length: word(10) as usize,
                rope_theta: f32::from_bits(word(11)),
                rope_scaling_factor: f32::from_bits(word(12)),
                sliding_window: word(13) as usize,
                swiglu_limit: f32::from_bits(word(14)),
                ..config.clone()
            };
            assert_eq!(*c, expected);
            TensorId::all(c).for_each(|id| assert_eq!(bits(&checkpoint, id), bits(&values, id), "{id:?}"));
        },
    );
    assert!((20..100).contains(&opened), "{opened}");

    write_safetensors(dir.path(), &config, SEED, Temperament::Tame, 1).unwrap();
    let open = || SafetensorsCheckpoint::open(dir.path());
    let json = dir.path().join("config.json");
    let opened = open_corrupted(&json, fs::read(&json).unwrap().len(), open, |checkpoint, file| {
        let json: serde_json::Value = serde_json::from_slice(file).expect("it was read");
        let size = |name: &str| json[name].as_u64().expect("a size") as usize;
        let number = |name: &str| json[name].as_f64().expect("a number") as f32;
        let rope = &json["rope_scaling"];
        assert_eq!(rope["rope_type"], "yarn");
        let expected = ModelConfig {
            seq_len: size("max_position_embeddings").min(4096),
            context_length: Some(size("max_position_embeddings")),
            initial_context_length: size("initial_context_length"),
            rope_theta: number("rope_theta"),
            rope_scaling_factor: rope["factor"].as_f64().expect("a number") as f32,
            sliding_window: size("sliding_window"),
            swiglu_limit: number("swiglu_limit"),
            // Of other ends and rounding.
            yarn_ramp: checkpoint.config().yarn_ramp,
            ..config.clone()
        };
        assert_eq!(*checkpoint.config(), expected);
        let as_released = rope["beta_fast"] == 32.0 && rope["beta_slow"] == 1.0 && rope["truncate"] == false;
        assert_eq!(checkpoint.config().yarn_ramp.is_none(), as_released, "{rope}");
    });
    assert!((20..600).contains(&opened), "{opened}");

    let unchanged = SafetensorsCheckpoint::open(dir.path()).unwrap();
    open_corrupted(&dir.path().join("model.safetensors"), 600, open, |checkpoint, _| {
        assert_same(&checkpoint, &unchanged)
    });
}

// The maker.

fn mean_and_std(values: &[f32]) -> (f64, f64) {
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / values.len() as f64;
    (mean, variance.sqrt())
}

#[test]
fn operations_keep_unit_scale() {
    // Widths that are not powers of two, so that a scale alone cannot hit the deviation.
    let config = ModelConfig {
        hidden_dim: 2880,
        intermediate_dim: 1120,
        vocab_size: 200,
        n_layers: 1,
        ..tiny()
    };
    let calm = [(Temperament::Wild, 1.0, 1.0), (Temperament::Tame, 0.5, 0.25)];
    for (temperament, qkv, out) in calm {
        let model = SyntheticCheckpoint::new(&config, SEED, temperament).unwrap();
        for (id, expected) in [
            (TensorId::Embedding, 1.0),
            (TensorId::Unembedding, 4.0 / 2880f64.sqrt()),
            (TensorId::Router { layer: 0 }, 1.0 / 2880f64.sqrt()),
            (TensorId::Qkv { layer: 0 }, qkv / 2880f64.sqrt()),
            (TensorId::AttnOut { layer: 0 }, out / 32f64.sqrt()),
            (TensorId::Mlp1 { layer: 0, expert: 2 }, 1.0 / 2880f64.sqrt()),
            (TensorId::Mlp2 { layer: 0, expert: 2 }, out / 1120f64.sqrt()),
        ] {
            let (mean, std) = mean_and_std(&model.tensor(id).unwrap().to_f32().unwrap());
            assert!(
                (std / expected - 1.0).abs() < 0.05,
                "{temperament:?} {id:?}: {std} instead of {expected}"
            );
            assert!(mean.abs() < 0.03 * expected, "{temperament:?} {id:?}: mean {mean}");
        }
    }
}

#[test]
fn tensors_differ_and_depend_on_the_seed_but_not_on_the_layer_count() {
    let shallow = SyntheticCheckpoint::new(&tiny(), SEED, Temperament::Tame).unwrap();
    let deep = SyntheticCheckpoint::new(&ModelConfig { n_layers: 5, ..tiny() }, SEED, Temperament::Tame).unwrap();
    let other = SyntheticCheckpoint::new(&tiny(), SEED + 1, Temperament::Tame).unwrap();
    let mut seen: HashMap<Vec<u32>, TensorId> = HashMap::new();
    for id in TensorId::all(&tiny()) {
        let values = bits(&shallow, id);
        assert_eq!(values, bits(&deep, id), "{id:?}");
        assert_ne!(values, bits(&other, id), "{id:?}");
        let before = seen.insert(values, id);
        assert!(before.is_none(), "{id:?} is {before:?}");
    }
}

/// The seeds of a fuzz target, by name; these names and no others.
fn seeds<const N: usize>(target: &str, names: [&str; N]) -> [(PathBuf, Vec<u8>); N] {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let entries = fs::read_dir(&dir)
        .unwrap()
        .map(|seed| seed.unwrap().file_name().into_string().unwrap());
    let mut found: Vec<_> = entries.collect();
    found.sort();
    assert_eq!(found, names, "{}", dir.display());
    names.map(|name| (dir.join(name), fs::read(dir.join(name)).unwrap()))
}

/// The fuzzer starts from files and directories that open.
#[test]
fn seeds_of_the_fuzzer_are_models() {
    for (path, seed) in seeds("checkpoint_safetensors", ["indexed", "original", "plain", "transposed"]) {
        let dir = temp();
        let mut rest = &seed[..];
        for name in ["config.json", "model.safetensors.index.json"] {
            let (bytes, behind) = rest.split_first_chunk().unwrap();
            let (file, behind) = behind.split_at(u16::from_le_bytes(*bytes).into());
            if !file.is_empty() {
                fs::write(dir.path().join(name), file).unwrap();
            }
            rest = behind;
        }
        fs::write(dir.path().join("model.safetensors"), rest).unwrap();
        SafetensorsCheckpoint::open(dir.path()).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    }
    for (path, _) in seeds("checkpoint_bin", ["mxfp4", "two_layers"]) {
        BinCheckpoint::open(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    }
}

// What the directory says of answers.

/// The answer to a request of the model at `path` whose fields are at their defaults but for `change`, and how it ends.
fn answer(path: &Path, change: impl Fn(&mut getp::abi::batch::Request)) -> (Vec<i32>, i32) {
    use getp::abi::{batch::*, event::*, model::*};
    use std::ptr::{null, null_mut};
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let prompt = [1, 2, 3];
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let model = getp_model_open(path.as_ptr(), null());
        let batch = getp_batch_open(model, null());
        assert!(!batch.is_null());
        let mut request: Request = std::mem::zeroed();
        getp_request_init_sized(&mut request, size_of::<Request>());
        (request.prompt, request.prompt_length, request.seed) = (prompt.as_ptr(), prompt.len(), 5);
        change(&mut request);
        assert_eq!(getp_batch_submit(batch, &request, null_mut()), 0);
        let mut event = null();
        assert_eq!(getp_batch_next(batch, 60.0, &mut event), 0);
        let told = &*event;
        let answer = std::slice::from_raw_parts(told.tokens, told.count).to_vec();
        let end = told.end;
        getp_event_free(event);
        getp_batch_close(batch);
        getp_model_close(model);
        (answer, end)
    }
}

/// What `getp_model_defaults` gives: the ends, the most tokens, temperature and top-p.
fn defaults(path: &Path) -> (Vec<i32>, usize, f32, f32) {
    use getp::abi::model::*;
    use std::ptr::{null, null_mut};
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let model = getp_model_open(path.as_ptr(), null());
        let mut read: Defaults = std::mem::zeroed();
        assert!(getp_model_defaults_sized(model, &mut read, size_of::<Defaults>() - 1) < 0);
        assert!(getp_model_defaults_sized(model, null_mut(), size_of::<Defaults>()) < 0);
        assert_eq!(getp_model_defaults_sized(model, &mut read, size_of::<Defaults>()), 0);
        let ends = std::slice::from_raw_parts(read.ends, read.end_count).to_vec();
        getp_model_close(model);
        (ends, read.max_tokens, read.temperature, read.topp)
    }
}

#[test]
fn requests_take_what_the_directory_says() {
    use getp::abi::event::{GETP_END_LENGTH, GETP_END_TOKEN};
    use getp::abi::options::GETP_ON;
    let dir = temp();
    let path = tiny_hf(&dir, 1);
    let greedy = |request: &mut getp::abi::batch::Request| (request.temperature, request.max_tokens) = (0.0, 40);
    let (whole, end) = answer(&path, greedy);
    assert_eq!((whole.len(), end), (40, GETP_END_LENGTH));
    assert_eq!(
        answer(&path, |request| request.max_tokens = 40),
        (whole.clone(), GETP_END_LENGTH)
    );
    assert_eq!(defaults(&path), (vec![199_999, 200_002], 0, 0.0, 1.0));

    let file = path.join("generation_config.json");
    let ending = whole[5];
    let sampled = r#""do_sample": true, "temperature": 12, "top_p": 0.875, "max_new_tokens": 7"#;
    std::fs::write(&file, format!("{{{sampled}, \"eos_token_id\": [{ending}, 49999]}}")).unwrap();
    assert_eq!(defaults(&path), (vec![ending, 49_999], 7, 12.0, 0.875));
    let first = whole.iter().position(|&token| token == ending).unwrap();
    assert_eq!(answer(&path, greedy), (whole[..=first].to_vec(), GETP_END_TOKEN));
    let unending = |request: &mut getp::abi::batch::Request| {
        greedy(request);
        request.ignore_end = GETP_ON;
    };
    assert_eq!(answer(&path, unending), (whole.clone(), GETP_END_LENGTH));
    let (drawn, _) = answer(&path, |request| request.ignore_end = GETP_ON);
    let said = |request: &mut getp::abi::batch::Request| {
        (request.temperature, request.topp, request.max_tokens) = (12.0, 0.875, 7);
        request.ignore_end = GETP_ON;
    };
    assert_eq!(answer(&path, said).0, drawn);
    assert!(drawn.len() == 7 && drawn != whole[..7], "{drawn:?}");

    // What that file does not name, config.json may.
    std::fs::write(&file, "{}").unwrap();
    let config = path.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(
        &config,
        text.replacen('{', &format!("{{\"eos_token_id\": {ending},"), 1),
    )
    .unwrap();
    assert_eq!(answer(&path, greedy), (whole[..=first].to_vec(), GETP_END_TOKEN));
    std::fs::write(&config, text.replacen('{', "{\"eos_token_id\": \"x\",", 1)).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["eos_token_id is \"x\"", "config.json"],
    );
    std::fs::write(&config, text).unwrap();
    std::fs::write(&file, r#"{"temperature": "hot"}"#).unwrap();
    assert_refused(
        SafetensorsCheckpoint::open(&path),
        &["temperature is \"hot\"", "generation_config.json"],
    );
}

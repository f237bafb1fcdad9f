//! Prints single steps, kernel by kernel: decoding in the middle of W2's sequences, and prompts.

use crate::layer::STEP_LAUNCHES;
use crate::model::{LAUNCH, Layer, Model, Timed};
use getp::backend::gpu::shapes::Product;
use getp::backend::gpu::stage::bucket;

/// Keys of a row in the middle of a sequence of 32 + 992 tokens.
const KEYS: usize = 528;

/// Seconds of a layer, and of the rest of a step.
struct Parts {
    layer: f64,
    rest: f64,
}

/// Steps of the whole model on one device.
pub fn print_steps(model: &Model<'_>) {
    for rows in [1, 2, 4, 8, 16, 32, 64, 256, 890, 1024, 1536] {
        println!("20b, {rows} rows");
        let [step, least] = step(model, rows).map(|parts| model.config.n_layers as f64 * parts.layer + parts.rest);
        println!(
            "    a step {:.1} ms: {:.0} tok/s a device; at least {:.1} ms",
            step * 1e3,
            rows as f64 / step,
            least * 1e3
        );
    }
}

/// The 120b on a group of devices, cut as the library cuts it. A step has as many rows as there is memory for, of
/// sequences of 32 + 992 tokens, which take half of what one of the model's length does; at most `most_rows`.
pub fn print_group(model: &Model<'_>, devices: usize, most_rows: usize) {
    let sizes = (1..=most_rows / 16).rev().map(|n| 16 * n);
    let cut = |rows: usize| model.kind().cut(devices, rows, (rows * devices).div_ceil(2));
    let (rows, cut) = sizes
        .filter_map(|rows| Some((rows, cut(rows)?)))
        .next()
        .expect("the model fits");
    let layers: Vec<_> = cut.iter().map(|layers| layers.len()).collect();
    let plural = if devices == 1 { "" } else { "s" };
    println!("120b on {devices} device{plural}: layers {layers:?}, each a micro-batch of {rows} rows");
    let hop = model.hop(rows);
    let [slowest, least] = step(model, rows).map(|parts| {
        let stages = layers.iter().enumerate().map(|(stage, &layers)| {
            let is_last = stage + 1 == devices;
            layers as f64 * parts.layer + if is_last { parts.rest } else { hop }
        });
        stages.fold(0.0, f64::max)
    });
    let tokens_a_second = rows as f64 / slowest;
    println!(
        "    the slowest stage {:.1} ms: {tokens_a_second:.0} tok/s a group, {:.0} on eight devices; at least {:.1} ms",
        slowest * 1e3,
        tokens_a_second * 8.0 / devices as f64,
        least * 1e3
    );
}

/// A step of prompts, each with so many rows: where they begin, and behind 7,680 positions of each.
pub fn print_prompts(model: &Model<'_>) {
    const CHUNKS: usize = 16;
    const ROWS: usize = 512;
    let rows = CHUNKS * ROWS;
    println!("20b, {rows} rows of prompts, chunks of {ROWS}");
    let layer = model.layer(bucket(rows, usize::MAX), rows);
    print_products(&layer.products);
    print_launches(&layer);
    println!(
        "    attention's loop {:>31.0} % of the peak",
        model.prompts_share() * 100.0
    );
    let config = model.config;
    for position in [0, 7680] {
        let chunks = [(position, ROWS); CHUNKS];
        let (full, windowed) = (
            model.prompts(&chunks, None),
            model.prompts(&chunks, Some(config.sliding_window)),
        );
        let attention = (full + windowed) / 2.0;
        let step = config.n_layers as f64 * (layer.seconds() + attention) + STEP_LAUNCHES as f64 * LAUNCH;
        println!(
            "    from position {position}: attention {:.0} us, with a window {:.0} us; a step {:.1} ms: {:.0} tok/s",
            full * 1e6,
            windowed * 1e6,
            step * 1e3,
            rows as f64 / step
        );
    }
}

/// The times of a layer and of the rest of a step, and what both take at least.
fn step(model: &Model<'_>, rows: usize) -> [Parts; 2] {
    let bucket = bucket(rows, usize::MAX);
    let layer = model.layer(bucket, rows);
    let head = model.product(Product::Greedy, bucket, &[rows]);
    print_products(layer.products.iter().chain([&head]));
    let keys = (KEYS + KEYS.min(model.config.sliding_window)) as f64 / 2.0;
    let cache = model.reading(rows as f64 * keys);
    println!("    keys and values {:>27.0} us", cache * 1e6);
    print_launches(&layer);
    [
        Parts {
            layer: layer.seconds() + cache,
            rest: head.seconds + STEP_LAUNCHES as f64 * LAUNCH,
        },
        Parts {
            layer: layer.least() + cache,
            rest: head.least,
        },
    ]
}

fn print_products<'a>(products: impl IntoIterator<Item = &'a Timed>) {
    for timed in products {
        println!(
            "    {:<34} {:>8.0} us  {:>3.0} % of the peak; dies read for {:.0} us",
            timed.kernel,
            timed.seconds * 1e6,
            timed.share * 100.0,
            timed.reading * 1e6
        );
    }
}

fn print_launches(layer: &Layer) {
    println!("    other bytes {:>31.0} us", layer.other * 1e6);
    println!(
        "    {:>2} launches {:>29.0} us",
        layer.launches,
        layer.launches as f64 * LAUNCH * 1e6
    );
}

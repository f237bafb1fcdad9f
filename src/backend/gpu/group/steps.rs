//! How many rows a step of a device alone has where the user has not said.
//!
//! In a step each decoding sequence has a row, and prompts have all others. A step costs the reading of its weights
//! once, and a time for each row, of a prompt or not. So the fewest steps are the cheapest, and as many rows of prompts
//! as have room go beside the decoding ones. Keeping prompts back wins nothing: with 2,304 rows a card gives 3.4 %
//! fewer tokens of long prompts with long answers than with 16,384.
//!
//! On an H100 20b's weights take as long as 410 rows of prompts: 4.8 % of a step of 8,192 rows, and 2.4 % of one of
//! 16,384. With these, workloads of prompts and of long contexts give 1.4 to 2.5 % more tokens a second; with 32,768
//! rows no more than that, with 4,096 up to 6 % less than with 8,192. What a longer step costs is memory for its
//! activations, which the KV cache would have: it is made where that is no greater a share than what prompts gain.
//! (`benches/record/h100/2026-11-27.md` has the measurements.)

use super::demand::Demand;
use crate::backend::gpu::catalogue::Elements;
use crate::backend::gpu::stage::Common;
use crate::backend::gpu::target::Target;
use crate::config::ModelConfig;
use crate::options::{Options, StepLimits};

/// Rows of a long step.
const LONG: usize = 16_384;
/// A long step's activations may take one in so many bytes of what is left for the KV cache.
const ONE_IN: u64 = 40;

/// The options of a replica on one device with so many bytes free beside its weights: with long steps, unless the user
/// has set a step's length or the KV cache's size, if the kernels take them and the memory is there.
pub fn with_length(
    options: &Options,
    config: &ModelConfig,
    target: &Target,
    elements: Elements,
    free_bytes: u64,
) -> Options {
    let long = Options {
        step_tokens: Some(LONG),
        ..options.clone()
    };
    let bytes = |options: &Options| {
        let common = Common::new(config, options, elements, 1);
        let demand = Demand {
            common: &common,
            target,
        };
        demand.workspace_bytes(&(0..config.n_layers), 0)
    };
    let limits = long.step_limits(StepLimits::GPU);
    let pays = options.step_tokens.is_none()
        && options.kv_mb == 0
        && limits.max_batch <= LONG
        && target.supports(config, &limits).is_ok()
        && (bytes(&long) - bytes(options)) * ONE_IN <= free_bytes;
    if pays { long } else { options.clone() }
}

/// The same of a device with so many bytes free before the weights are there.
pub fn with_length_foreseen(
    options: &Options,
    config: &ModelConfig,
    target: &Target,
    elements: Elements,
    free_bytes: u64,
) -> Options {
    let common = Common::new(config, options, elements, 1);
    let demand = Demand {
        common: &common,
        target,
    };
    let weights = demand.weight_bytes(&(0..config.n_layers));
    with_length(options, config, target, elements, free_bytes.saturating_sub(weights))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::group::fit::cards;

    /// Whether steps are long on a card.
    fn is_long(card: &str, config: &ModelConfig, options: &Options) -> bool {
        let of_name = cards().into_iter().find(|(there, _)| there.name == card);
        let (card, family) = of_name.expect("a card");
        let target = Target {
            family,
            multiprocessors: card.multiprocessors,
        };
        let with_length = with_length_foreseen(options, config, &target, Elements::F16, card.mib << 20);
        let step_tokens = with_length.step_limits(StepLimits::GPU).step_tokens;
        assert!(step_tokens == LONG || with_length.step_tokens == options.step_tokens);
        step_tokens == LONG
    }

    #[test]
    fn steps_are_long_where_the_kv_cache_keeps_its_room() {
        let (of_20b, of_120b) = (ModelConfig::preset_20b(), ModelConfig::preset_120b());
        let options = Options::default();
        for (card, for_20b, for_120b) in [("H100", true, false), ("H200", true, true), ("MI300X", true, true)] {
            assert_eq!(is_long(card, &of_20b, &options), for_20b, "20b, {card}");
            assert_eq!(is_long(card, &of_120b, &options), for_120b, "120b, {card}");
        }
    }

    #[test]
    fn what_the_user_has_set_stays() {
        let config = ModelConfig::preset_20b();
        let set = |change: fn(&mut Options)| {
            let mut options = Options::default();
            change(&mut options);
            is_long("H100", &config, &options)
        };
        assert!(set(|_| ()));
        assert!(set(|options| options.max_batch = Some(2_000)));
        assert!(!set(|options| options.max_batch = Some(LONG + 1)));
        assert!(!set(|options| options.step_tokens = Some(8_192)));
        assert!(!set(|options| options.kv_mb = 40_000));
    }
}

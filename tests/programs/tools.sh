#!/usr/bin/env bash
# The tools in examples/, by the profile TOOLS_PROFILE: `dev` where many checks run, which then share one build with
# every feature.
. "$(dirname "$0")/lib.sh"
options=(--locked --profile "${TOOLS_PROFILE:?}")
if [[ $TOOLS_PROFILE == dev ]]; then
    find_toolchains
    options+=(--features "${features:?}")
fi
"${CARGO:-cargo}" build "${options[@]}" --examples

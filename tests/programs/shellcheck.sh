#!/usr/bin/env bash
# All scripts, by shellcheck; .shellcheckrc says what it may not say.
. "$(dirname "$0")/lib.sh"
need shellcheck "apt-get install shellcheck"
shellcheck .ci/run packaging/*.sh tests/programs/*.sh

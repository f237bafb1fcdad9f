# What a user and a developer run. Everything made goes to build/ and Cargo's target folder.
#
#   make run        builds the library and runs the eval program with it on a few prompts
#   make mlperf     MLPerf's LoadGen drives the library with a tiny model, in the scenarios Offline and Server
#   make check      what to run while working: format, lints, documentation, the fast tests; installs what they need
#   make install    builds the library and installs it under PREFIX; make uninstall takes it away
#   make deb        builds Debian's packages of the library
#   make test       installs what is missing (make setup), then every check below; each can be run alone
#
# PROMPTS, RUN_STEPS and FUZZ_SECONDS may be set, and CARGO_TARGET_DIR in the environment; for make install also
# FEATURES, PREFIX, LIBDIR, INCLUDEDIR and DESTDIR.

PROMPTS ?= c_examples/prompts.txt
RUN_STEPS ?= 48
FUZZ_SECONDS ?= 6

# `make install FEATURES=hip DESTDIR=root PREFIX=/usr LIBDIR=/usr/lib/x86_64-linux-gnu`
FEATURES ?=
DESTDIR ?=
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include

# checks.sh begins at both ends. What compiles for Cargo's debug folder is in the front, where it waits for nobody; the
# back begins with what has folders of its own.
QUICK_CHECKS := check-format check-lints test-rust
CHECKS := $(QUICK_CHECKS) test-text test-simt test-amd test-gpu test-mpi test-miri \
    test-hosts test-memory test-valgrind test-out-of-memory mlperf test-sanitizers test-c test-install test-threads fuzz

CARGO ?= cargo
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
BUILD := $(abspath build)
RELEASE := $(TARGET)/release
# Users' tools are made with the library they run; the checks take those that `cargo test` has made.
TOOLS_PROFILE ?= release
TOOLS := $(TARGET)/$(if $(filter dev,$(TOOLS_PROFILE)),debug,$(TOOLS_PROFILE))/examples
ALL_TOOLS := $(addprefix $(TOOLS)/,$(basename $(notdir $(wildcard examples/*))))
# For the scripts in tests/programs and packaging.
export TOOLS_PROFILE TARGET BUILD TOOLS FUZZ_SECONDS FEATURES DESTDIR PREFIX LIBDIR INCLUDEDIR

TOKENIZER_SOURCES := examples/export_tokenizer.rs
MODEL_SOURCES := examples/make_model.rs $(TOKENIZER_SOURCES) \
    $(wildcard tests/common/*.rs tests/common/synthetic/*.rs)

# The dimensions leave every width another one, the window smaller than the prompts, and a vocabulary whose logits
# fit a file. The tiny model is small enough for valgrind and for a file of seeds.
small_MODEL := --vocab 4096 --hidden 256 --intermediate 192 --layers 4 --head-dim 32 --heads 8 --kv-heads 2
tiny_MODEL := --vocab 512 --n-experts 4 --experts-per-token 2 --window 8 --seq-len 256
small_TOKENIZER := --first 4096
tiny_TOKENIZER := --first 512

run:
	@tests/programs/setup.sh run
	@$(MAKE) --no-print-directory programs 7m-model
	tests/programs/run.sh $(PROMPTS) $(RUN_STEPS)

mlperf:
	@tests/programs/setup.sh mlperf
	@$(MAKE) --no-print-directory library tiny-model
	tests/programs/mlperf.sh

check:
	@tests/programs/setup.sh check
	@tests/programs/checks.sh $(QUICK_CHECKS)

test: setup
	@TOOLS_PROFILE=dev tests/programs/checks.sh $(CHECKS)

# What is installed, in Cargo's target folder; `make install` makes it if it is not there or older than a source.
installable:
	packaging/install.sh build

install:
	packaging/install.sh install

uninstall:
	packaging/install.sh uninstall

deb:
	packaging/debian.sh

# What the checks need and is not here.
setup:
	@tests/programs/setup.sh test

check-format:
	$(CARGO) fmt --check
	$(CARGO) fmt --check --manifest-path fuzz/Cargo.toml
	tests/programs/format.sh

# Where test-gpu runs, too, it looks at all targets, with every feature. An archive without members: lints link nothing,
# so that libFuzzer need not be compiled for them.
check-lints:
	$(CARGO) clippy --locked $(if $(filter dev,$(TOOLS_PROFILE)),--lib,--all-targets) -- -D warnings
	mkdir -p $(BUILD) && printf '!<arch>\n' >$(BUILD)/libunlinked.a
	CUSTOM_LIBFUZZER_PATH=$(BUILD)/libunlinked.a $(CARGO) clippy --locked --all-targets \
	    --manifest-path fuzz/Cargo.toml --target-dir $(TARGET) -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps
	tests/programs/shellcheck.sh

test-rust:
	tests/programs/rust.sh

# The checkpoint's own tokenizer and conversations, against tiktoken and openai-harmony.
test-text: $(BUILD)/tokenizer.json 7m-directory
	tests/programs/text.sh

# The GPU engine on a SIMT machine emulated on the CPU.
test-simt: tiny-model
	tests/programs/simt.sh

# What the compilers made of the kernels, and the GPUs' runtimes without a GPU.
test-gpu:
	tests/programs/gpu.sh

# The same, and all of AMD's targets by older compilers and NVIDIA's sm_89, too: what to run where kernels have changed.
test-gpu-all:
	tests/programs/gpu.sh all

# AMD's machine code on an emulator; test-amd-all runs all of the GPU backend's tests on it, too, which takes long.
test-amd: tiny-model
	tests/programs/amd.sh

test-amd-all: tiny-model
	tests/programs/amd.sh all

# Several processes behind one queue, under each MPI.
test-mpi: tiny-model
	tests/programs/mpi.sh

test-c: programs tiny-model small-model 7m-model
	tests/programs/warnings.sh
	tests/programs/golden.sh
	tests/programs/drop_in.sh
	tests/programs/faults.sh

# Programs elsewhere that find the installed library, also those that an older one was linked with.
test-install: library tiny-model
	tests/programs/install.sh
	tests/programs/abi.sh
	tests/programs/deb.sh

# What later versions are compared with, of the version that is released.
keep-abi: library
	tests/programs/abi.sh keep

# What host programs do to the library: they fork, end in the middle, lose their readers.
test-hosts: library tiny-model
	tests/programs/hosts.sh

# Races between threads.
test-threads:
	tests/programs/threads.sh

# What the compiler may take for granted and the code does not keep, where there is a Miri.
test-miri:
	tests/programs/miri.sh

test-sanitizers: programs tiny-model
	tests/programs/sanitizers.sh

test-valgrind: programs tiny-model
	tests/programs/valgrind.sh

test-memory: programs $(BUILD)/small-tokenizer.bin
	tests/programs/memory.sh

test-out-of-memory: programs tiny-model
	tests/programs/out_of_memory.sh $(tiny_MODEL)

fuzz:
	tests/programs/fuzz.sh

# ---------------------------------------------------------------------------
# What they need

library:
	$(CARGO) build --release --locked --lib

# Cargo is not asked while the tools are newer than what they are made of: it would also make libgetp.so again where a
# check has just built it with other features.
$(ALL_TOOLS) &: $(shell find src examples tests/common -name '*.rs')
	tests/programs/tools.sh
	touch $(ALL_TOOLS)

# Checks that run at the same time may both want these; one makes them.
programs: library
	mkdir -p $(BUILD)
	flock $(BUILD)/programs.lock $(MAKE) -C c_examples GETP_LIB_DIR=$(RELEASE) BUILD=$(BUILD)

small-model tiny-model: %-model: $(BUILD)/%.bin $(BUILD)/%-tokenizer.bin
7m-model: $(BUILD)/7m.bin $(BUILD)/tokenizer.bin

# A file is whole or not there, whoever else makes it and whatever is interrupted.
$(BUILD)/%-tokenizer.bin: $(TOKENIZER_SOURCES) Makefile | $(ALL_TOOLS)
	mkdir -p $(BUILD)
	$(TOOLS)/export_tokenizer $($*_TOKENIZER) $@.$$$$ && mv $@.$$$$ $@

$(BUILD)/tokenizer.bin $(BUILD)/tokenizer.json: $(BUILD)/tokenizer.%: $(TOKENIZER_SOURCES) | $(ALL_TOOLS)
	mkdir -p $(BUILD)
	$(TOOLS)/export_tokenizer $@.$$$$.$* && mv $@.$$$$.$* $@

# A directory as the released ones are. The config.json is the last that is there.
7m-directory: $(BUILD)/7m/config.json

$(BUILD)/7m/config.json: $(MODEL_SOURCES) | $(ALL_TOOLS)
	rm -rf $(@D) $(@D).$$$$ && mkdir -p $(BUILD)
	$(TOOLS)/make_model --format safetensors --tokenizer $(@D).$$$$ && mv $(@D).$$$$ $(@D) && touch $@

$(BUILD)/%.bin: $(MODEL_SOURCES) Makefile | $(ALL_TOOLS)
	mkdir -p $(BUILD)
	$(TOOLS)/make_model $($*_MODEL) $@.$$$$ && mv $@.$$$$ $@

clean:
	rm -rf $(BUILD)

.PHONY: run check test installable install uninstall deb setup $(CHECKS) test-amd-all test-gpu-all keep-abi library \
    programs 7m-model 7m-directory small-model tiny-model clean

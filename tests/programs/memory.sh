#!/usr/bin/env bash
# A checkpoint larger than the memory there is can be packed and run: its pages are read once and given back.
. "$(dirname "$0")/lib.sh"

# The file has 1.4 GB, its exact copy 0.2 GB.
limit=$((400 << 20))
group=
remove_group() {
    test -z "$group" || rmdir "$group"
    rm -rf "$scratch"
}
trap remove_group EXIT

make_group() {
    local root=/sys/fs/cgroup file=memory.max
    test -d $root/memory && root=$root/memory file=memory.limit_in_bytes
    group=$root/getp-test-$$
    { mkdir "$group" && echo $limit >"$group/$file"; } 2>/dev/null && return
    rmdir "$group" 2>/dev/null || true
    group=
    return 1
}

if ! make_group; then
    echo "SKIPPED: no cgroup can be made here; run as root with a writable /sys/fs/cgroup" |
        tee "${SKIPPED:-/dev/null}"
    exit 0
fi
"$TOOLS/make_model" "$scratch/large.bin" --vocab 4096 --layers 6 --hidden 768 --intermediate 768 2>/dev/null
size=$(stat -c %s "$scratch/large.bin")
((size > limit)) || fail "the checkpoint has only $size bytes"
quietly "a checkpoint of $((size >> 20)) MiB within $((limit >> 20)) MiB" \
    bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' - "$group" \
    env GETP_KV_MB=16 "$BUILD/batch" "$scratch/large.bin" "$BUILD/small-tokenizer.bin" c_examples/prompts.txt 32

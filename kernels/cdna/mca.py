#!/usr/bin/env python3
"""Resources of the GEMM and attention kernels, and how busy llvm-mca sees the matrix core in their inner loops.

    kernels/cdna/mca.py [--arch gfx90a] [file.hip ...]

Prints a markdown table: for every kernel its registers, LDS and occupancy (waves per SIMD); for its innermost loops the
bytes read from memory per 16x16x16 that an MFMA multiplies (gfx950's multiply two), and the share of the loop's issue
slots (4 clocks) in which the matrix core works. A kernel of several tiles has a loop and a line for each.

llvm-mca simulates one wave alone and knows neither LDS nor memory latency: a second wave fills the slots that the first
leaves empty. Waits count as one issue slot here, since llvm-mca would make a wait for LDS a wait for loads from memory,
too; tests/loads_in_flight.rs checks waits. Attention's loops branch where maxima grow or keys are masked. Of the paths
through such a loop the one with the most MFMAs is taken, and of those the shortest, on which neither happens.
Exits with 1 if a kernel uses scratch, spills or AGPRs.
"""
import argparse, json, os, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FILES = ["mlp1.hip", "mlp2.hip", "dense.hip", "unembed.hip", "exact.hip"]
FILES += ["attention_decode.hip", "attention_prefill.hip"]
CLANG = os.environ.get("AMD_CLANG", "clang-22")
MCA = os.environ.get("LLVM_MCA", "llvm-mca-22")
RUN_SLOTS = {"gfx90a": 8, "gfx942": 4, "gfx950": 2}      # of a 16x16x16 by the fastest MFMA
ITERATIONS = 20
MOST_WAYS = 10000
LOADED = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "ubyte": 1}


def made_sources():
    """Where the build writes what it makes of the catalogue: the products' kernels, and catalogue.h."""
    command = ["cargo", "check", "--locked", "--lib", "--quiet", "--message-format=json"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    messages = (json.loads(line) for line in run.stdout.splitlines())
    ours = [m["out_dir"] for m in messages if m["reason"] == "build-script-executed" and ROOT in m["package_id"]]
    return os.path.join(ours[0], "kernels", "cdna")


def assembly(file, arch, made):
    here = os.path.join(HERE, file)
    source = here if os.path.exists(here) else os.path.join(made, file)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.s")
        flags = f"-x hip -std=c++17 --cuda-device-only --no-gpu-bundle-output --offload-arch={arch} -O3 -nogpulib " \
                "-nogpuinc -mcode-object-version=5 -S"
        folders = ["-I" + os.path.join(ROOT, "kernels"), "-I" + made]
        subprocess.run([CLANG, *flags.split(), *folders, source, "-o", out], check=True)
        return open(out).read()


def resources(text):
    """{kernel: {key: number}} from the code object's metadata."""
    kernels = {}
    for entry in text[text.index("amdhsa.kernels:"):].split("\n  - ")[1:]:
        name = re.search(r"\.name:\s+(\w+)", entry)
        if name:
            kernels[name[1]] = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)\s*\n", entry)}
    return kernels


def basic_blocks(text, kernel):
    """[(label, instructions without the branch, (kind, target) of the branch)], in their order."""
    body = text[text.index(f"\n{kernel}:"):]
    body = body[:body.index(".Lfunc_end")]
    blocks, label, block = [], None, []
    for line in body.split("\n"):
        line = line.split(";")[0].strip()
        start = re.match(r"(\.LBB\w+):", line)
        branch = re.match(r"(s_c?branch)\w*\s+(\S+)", line)
        if start or branch:
            blocks.append((label, block, branch and branch.groups()))
            label, block = start and start[1], []
        elif line and not line.startswith(".") and not line.endswith(":"):
            block.append(line)
    return blocks + [(label, block, None)]


def mfmas(instructions):
    return sum("v_mfma" in i for i in instructions)


def runs(instructions):
    """How many runs of 16 along K its MFMAs multiply."""
    return sum(int(k) // 16 for k in re.findall(r"v_mfma_f32_16x16x(16|32)", "\n".join(instructions)))


def ways_round(blocks, head):
    """The ways through blocks from number `head` on that come back to it, none twice through a block."""
    number = {label: i for i, (label, _, _) in enumerate(blocks) if label}
    ways = [([head], blocks[head][1])]
    while ways:
        path, instructions = ways.pop()
        kind, target = blocks[path[-1]][2] or (None, None)
        next_blocks = [number[target]] if target in number else []
        if kind != "s_branch" and path[-1] + 1 < len(blocks):
            next_blocks.append(path[-1] + 1)
        for i in next_blocks:
            if i == head:
                yield instructions
            elif i > head and i not in path:
                ways.append((path + [i], instructions + blocks[i][1]))


def inner_loops(text, kernel):
    """The loops that hold MFMAs: those without a branch inside, or else the best way round the innermost."""
    blocks = basic_blocks(text, kernel)
    loops = [block for label, block, branch in blocks if mfmas(block) and branch and branch[1] == label]
    if loops:
        return loops
    heads = {i for i, (label, _, _) in enumerate(blocks) if any(b[2] and b[2][1] == label for b in blocks[i:])}
    for head in sorted(heads, reverse=True):               # loops within loops: the innermost begin last
        ways = [way for way in islice(ways_round(blocks, head), MOST_WAYS) if mfmas(way)]
        if ways:
            return [max(ways, key=lambda way: (mfmas(way), -len(way)))]
    return []


def loaded_bytes(loop):
    kinds = (re.match(r"global_load_(\w+)", i) for i in loop)
    return sum(64 * LOADED[k[1]] for k in kinds if k)


def cycles(loop, arch):
    slots = ["s_nop 0" if i.startswith("s_waitcnt") else i for i in loop]
    run = subprocess.run([MCA, "-mtriple=amdgcn", f"-mcpu={arch}", f"-iterations={ITERATIONS}"],
                         input="\n".join(slots) + "\n", capture_output=True, text=True, check=True)
    return int(re.search(r"Total Cycles:\s+(\d+)", run.stdout)[1]) / ITERATIONS


def waves_per_simd(r):
    registers = 512 // (-(-(r["vgpr_count"]) // 8) * 8)
    waves = r["max_flat_workgroup_size"] / 64
    blocks = 65536 // r["group_segment_fixed_size"] if r["group_segment_fixed_size"] else 99
    return min(8, registers, int(blocks * waves / 4))


def tokens(kernel, loop):
    """A tile's loop has three slabs of 8 runs per 16 tokens and term; a stream has 16 tokens; attention 0."""
    name = re.search(r"x(\d)_n(\d+)$", kernel)
    if not name:
        return 0
    terms, tile = name.groups()
    streams = terms == "1" and tile == "16"
    return 16 if streams else runs(loop) // (24 * int(terms)) * 16


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--arch", default="gfx90a")
    options.add_argument("files", nargs="*", default=FILES)
    options = options.parse_args()
    print(f"| kernel ({options.arch}) | VGPR | LDS | waves a SIMD | tokens | bytes a 16x16x16 | MFMA share |")
    print("|---|---|---|---|---|---|---|")
    bad, made = [], made_sources()
    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(lambda f: assembly(f, options.arch, made), options.files):
            for kernel, r in resources(text).items():
                if r["agpr_count"] or r["private_segment_fixed_size"] or r["vgpr_spill_count"] or r["sgpr_spill_count"]:
                    bad.append(kernel)
                for loop in sorted(inner_loops(text, kernel), key=lambda l: -tokens(kernel, l)):
                    count = runs(loop)
                    share = count * RUN_SLOTS[options.arch] / cycles(loop, options.arch)
                    lds, each = r["group_segment_fixed_size"], loaded_bytes(loop) / count
                    print(f"| {kernel} | {r['vgpr_count']} | {lds} | {waves_per_simd(r)} "
                          f"| {tokens(kernel, loop) or '-'} | {each:.0f} | {share:.2f} |", flush=True)
    for kernel in bad:
        print(f"{kernel}: scratch, spills or AGPRs", file=sys.stderr)
    return bool(bad)


sys.exit(main())

#!/usr/bin/env python3
"""The pictures of the documents, made from what the code says.

    docs/pictures.py           writes the SVG files in docs/
    docs/pictures.py --check   fails if one of them is not what it would write

Sizes are the constants of kernels/args.h and the 20b of src/config.rs. Layouts are drawn by the functions that compute
them in kernels/gpu/gpu.h and kernels/wire.h, evaluated here. The rooms' order is ARCHITECTURE.md's, which
tests/rooms.rs holds the source to; arrows are paths that begin with `crate::`. Steps are placed in time by the loop of
src/engine/run.rs (submit what has room, wait for the oldest, commit) and the depth of src/backend/gpu/stage.rs.
"""
import glob
import os
import re
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))


# ---------------------------------------------------------------------------------------------- what the code says


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def found(pattern, path, flags=0):
    """What a pattern finds in a file, which must have it: a picture is not drawn from what is not there any more."""
    match = re.search(pattern, read(path), flags)
    assert match, f"{path} has nothing like {pattern}"
    return match


CONSTANTS = {name: int(value) for name, value in re.findall(r"^  ([A-Z0-9_]+) = (\d+),", read("kernels/args.h"), re.M)}


def preset(field):
    """A number of the 20b model."""
    body = found(r"fn preset_20b\(\).*?\n    \}\n", "src/config.rs", re.S).group()
    return int(re.search(rf"\b{field}: ([\d_]+)", body).group(1).replace("_", ""))


def c_function(path, name, scope):
    """A function of integers from a header, to be called from here; `scope` has the names that it uses."""
    text = rf"HOST_DEV \w+ {name}\(([^)]*)\)(?: const)? \{{(.*?)\}}"
    parameters, body = found(text, path, re.S).groups()
    names = [parameter.split()[-1] for parameter in parameters.split(",") if parameter.strip()]
    body = re.sub(r"\((?:i64|int|unsigned)\)", "", body).replace("/", "//")
    *assignments, result = [statement.strip() for statement in body.split(";") if statement.strip()]

    def call(*arguments):
        local = {**CONSTANTS, **scope, **dict(zip(names, arguments))}
        for assignment in assignments:
            for part in re.split(r", (?=\w+ = )", re.sub(r"^const \w+ ", "", assignment)):
                target, expression = part.split(" = ", 1)
                local[target] = eval(expression, {}, local)
        return eval(result.removeprefix("return "), {}, local)

    return call


def rooms():
    """The lines of the rooms, and which room uses which, as far as it does not follow from what that one uses."""
    block = found(r"\n### Order of the rooms\n.*?```text\n(.*?)```", "ARCHITECTURE.md", re.S).group(1)
    lines = [line.split() for line in block.strip().split("\n")]
    names = {name for line in lines for name in line}
    uses = {name: set() for name in names}
    for path in sorted(glob.glob("src/**/*.rs", recursive=True)):
        room = path.split("/")[1].removesuffix(".rs")
        if room not in names or os.path.basename(path) == "tests.rs":
            continue
        text = re.sub(r"//.*", "", read(path).split("\n#[cfg(test)]\nmod tests {")[0])
        for path_or_group in re.findall(r"\bcrate::(\w+|\{[^;]*?\})", text):
            uses[room] |= set(re.findall(r"\w+", path_or_group)) & names - {room}

    def below(name):
        return uses[name].union(*(below(other) for other in uses[name]))

    arrows = []
    for name in sorted(names):
        further = set().union(*(below(other) for other in uses[name]))
        arrows += [(name, other) for other in sorted(uses[name] - further)]
    return lines, arrows


# ---------------------------------------------------------------------------------------------- drawing

INK, GREY, PALE, WHITE = "#1f2933", "#7b8794", "#e4e7eb", "#ffffff"
BLUE, GREEN, ORANGE, PURPLE = "#bcd7f5", "#c3e6cb", "#fbdcb2", "#dcd0f2"
# Eight shades for the eight pieces of a row.
SHADES = ["#dbeafe", "#bfdbfe", "#bbf7d0", "#d9f99d", "#fef08a", "#fed7aa", "#fecaca", "#e9d5ff"]


def escaped(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class Picture:
    """An SVG file. Coordinates are whole numbers, so that the file is the same on every machine."""

    def __init__(self, width, height, title):
        self.size = width, height
        self.parts = []
        self.text(24, 34, title, size=18, weight="bold")

    def box(self, x, y, width, height, fill=WHITE, stroke=INK, dash=""):
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{stroke}"{dashed}/>'
        )

    def text(self, x, y, text, size=13, anchor="start", fill=INK, weight="normal"):
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
            f'font-weight="{weight}">{escaped(text)}</text>'
        )

    def lines_of_text(self, x, y, pitch, texts, size=12, fill=INK, last=None):
        """Texts below each other; `last` is the colour of the last one, if it has its own."""
        for number, text in enumerate(texts, 1):
            own = last if last and number == len(texts) else fill
            self.text(x, y + pitch * (number - 1), text, size, fill=own)

    def label(self, x, y, width, height, text, fill=WHITE, size=13, stroke=INK, dash=""):
        """A box with a text in its middle."""
        self.box(x, y, width, height, fill, stroke, dash)
        self.text(x + width // 2, y + height // 2 + size * 7 // 20, text, size, "middle")

    def line(self, *points, stroke=INK, dash="", arrow=False):
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        head = ' marker-end="url(#head)"' if arrow else ""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}"{dashed}{head}/>')

    def curve(self, x1, y1, x2, y2, stroke=GREY):
        middle = (y1 + y2) // 2
        self.parts.append(
            f'<path d="M{x1},{y1} C{x1},{middle} {x2},{middle} {x2},{y2}" fill="none" stroke="{stroke}" '
            f'marker-end="url(#head)"/>'
        )

    def span(self, x1, x2, y, text):
        """A measure from x1 to x2."""
        self.line((x1, y - 4), (x1, y + 4), stroke=GREY)
        self.line((x2, y - 4), (x2, y + 4), stroke=GREY)
        self.line((x1, y), (x2, y), stroke=GREY)
        self.text((x1 + x2) // 2, y - 6, text, 12, "middle", GREY)

    def svg(self):
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
        )
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Verdana, Arial, sans-serif">'
        )
        ground = f'<rect width="{width}" height="{height}" fill="{WHITE}"/>'
        made = "<!-- Made by docs/pictures.py; do not edit. -->"
        return "\n".join([begin, made, head, ground, *self.parts, "</svg>\n"])


# ---------------------------------------------------------------------------------------------- the pictures


def picture_of_rooms():
    lines, arrows = rooms()
    picture = Picture(1180, 90 + 96 * len(lines), "Rooms: each uses what stands above it")
    place = {}
    for row, line in enumerate(lines):
        # A room stands below what it uses.
        def wanted(name):
            above = [place[other][0] for user, other in arrows if user == name and other in place]
            return sum(above) // len(above) if above else 0

        ordered = sorted(line, key=lambda name: (wanted(name), line.index(name))) if row else line
        gap = 1140 // len(ordered)
        for column, name in enumerate(ordered):
            place[name] = 20 + gap * column + gap // 2, 64 + 96 * row
    for user, other in arrows:
        (x1, y1), (x2, y2) = place[user], place[other]
        picture.curve(x1, y1, x2, y2 + 32)
    for name, (x, y) in place.items():
        width = 8 * len(name) + 22
        picture.label(x - width // 2, y, width, 30, name, BLUE)
    note = "Arrows lead to what a room uses; those that follow from others are left out."
    picture.text(24, picture.size[1] - 16, note, 12)
    return picture


def swizzle_grid(picture, x, y, rows, piece_at, names):
    """Rows of eight places; `piece_at(row, place)` is the piece that lies there."""
    for place in range(8):
        picture.text(x + 44 * place + 22, y - 8, str(place), 12, "middle", GREY)
    for row in range(rows):
        picture.text(x - 10, y + 26 * row + 18, names(row), 12, "end", GREY)
        for place in range(8):
            piece = piece_at(row, place)
            picture.label(x + 44 * place, y + 26 * row, 44, 26, str(piece), SHADES[piece], 12)


def inverse(index, row):
    """Which piece of eight elements lies at each place of a row of 64, by the index of its first element."""
    at = {index(row, 8 * piece) // 8 % 8: piece for piece in range(8)}
    return lambda place: at[place]


def picture_of_slab():
    slab, hidden = CONSTANTS["SLAB"], preset("hidden_dim")
    slabs = -(-hidden // slab)
    index = c_function("kernels/gpu/gpu.h", "tiled_index", {})
    rows = 128
    picture = Picture(1100, 440, f"Tiled activations: {hidden} elements of a row are {slabs} slabs of {slab}")
    # The whole buffer, slab after slab.
    for column, number in enumerate([0, 1, 2, None, slabs - 1]):
        x = 40 + 84 * column
        if number is None:
            picture.text(x + 38, 150, "...", 20, "middle")
            continue
        picture.label(x, 90, 76, 110, f"slab {number}", BLUE if number != 1 else ORANGE)
        picture.text(x + 38, 220, f"from {index(0, slab * number, rows) * 2:,}", 11, "middle", GREY)
    picture.line((28, 92), (28, 198), stroke=GREY, arrow=True)
    picture.text(24, 82, f"[slabs][rows][{slab}] of 16 bits; here {rows} rows", 12)
    picture.text(24, 240, "bytes; slabs lie one after the other", 12, fill=GREY)
    picture.lines_of_text(24, 284, 22, [
        f"A row has {2 * slab} bytes of a slab: eight pieces of 16 bytes.",
        "A run of rows of one slab is contiguous: Hopper fetches it",
        "by one bulk copy, CDNA copies it to LDS unchanged.",
        "Threads that read one piece of eight rows meet eight places,",
        "so no two of them the same banks of shared memory.",
        "`exact` has two or three such buffers, a term each.",
    ], size=13)
    swizzle_grid(picture, 640, 90, 10, lambda row, place: inverse(lambda r, k: index(r, k, rows), row)(place),
                 lambda row: f"row {row}")
    picture.text(640, 62, "Slab 1: 16 bytes at each place of a row", 12)
    picture.text(640, 376, "numbers: pieces of the row, each of 8 elements along K", 12)
    picture.text(640, 396, "every eight rows, 1,024 bytes, the pattern begins anew", 12)
    return picture


def picture_of_page():
    page, dim, heads = CONSTANTS["KV_PAGE"], preset("head_dim"), preset("n_kv_heads")
    window = preset("sliding_window")
    index = c_function("kernels/gpu/gpu.h", "kv_index", {})
    half = index(page - 1, 0, dim) // dim + 1
    part = half * dim * 2
    picture = Picture(1100, 540, f"KV cache: a page has {page} positions of one layer")
    picture.text(24, 76, f"One page of `fast` (16 bits): {heads} key heads, {heads * 2 * part:,} bytes", 13)
    for head in range(heads):
        x = 24 + 66 * head
        picture.label(x, 90, 33, 60, "K", ORANGE if head == 1 else BLUE)
        picture.label(x + 33, 90, 33, 60, "V", GREEN)
        picture.text(x + 33, 168, f"head {head}", 11, "middle", GREY)
    padding = found(r"fn kv_head_padding\(&self\) -> usize \{\s*(\d+)", "src/backend/gpu/family/cdna.rs").group(1)
    picture.lines_of_text(24, 192, 16, [
        f"K: {page} rows of {dim} elements, {part:,} bytes; V: as many. On CDNA {padding} bytes lie between",
        "heads, or those read together would meet on the same memory channels.",
    ], fill=GREY)
    swizzle_grid(picture, 720, 92, 10, lambda row, place: inverse(lambda r, d: index(r, d, dim), row)(place),
                 lambda row: f"position {row}")
    picture.text(720, 64, "K of head 1: 16 bytes at each place of a row", 12)
    picture.text(720, 378, "numbers: pieces of a key, each of 8 dims", 12)
    # A sequence's tables.
    picture.text(24, 262, "A sequence's pages (example: it is at position 300)", 13)
    full, ring = [17, 4, 9, 30, 12], [6, 21, 2]
    for number, at in enumerate(full):
        picture.label(24 + 96 * number, 290, 90, 28, f"page {at}", PURPLE)
        picture.text(69 + 96 * number, 284, f"{number * page} to {number * page + page - 1}", 11, "middle", GREY)
    picture.text(24, 340, f"full layers: position p is in tables[full + p / {page}]", 12)
    for number in range(len(full)):
        kept = number > len(full) - 1 - len(ring)
        picture.label(24 + 96 * number, 380, 90, 28, f"page {ring[number % len(ring)]}", PURPLE if kept else PALE,
                      stroke=INK if kept else GREY, dash="" if kept else "4 3")
    picture.text(24, 374, "dashed: overwritten since", 11, fill=GREY)
    for line, text in enumerate([
        f"sliding window ({window} positions): tables[window + p / {page} % window_pages], a ring",
        "as long as the window and the chunk that is being written need",
        "A block of the scheduler is the page of one number in all layers of its kind, and in all stages of a",
        "group.",
    ]):
        picture.text(24, 430 + 20 * line + 16 * (line // 2), text, 12)
    return picture


def picture_of_wire_tile():
    cols, rows, block = preset("hidden_dim"), CONSTANTS["WIRE_ROWS"], CONSTANTS["MXFP4_BLOCK"]
    path = "kernels/wire.h"
    scope = {"cols": cols}
    for name in ["row_codes", "row_scales"]:
        scope[name] = c_function(path, name, dict(scope))
    code, scale, tile = (c_function(path, name, scope) for name in ["code", "scale", "tile_bytes"])
    picture = Picture(1100, 430, f"Wire format: a tile of {rows} rows of MXFP4, {cols} values each")
    width, x, y = 1040, 24, 84
    codes = width * scale(0, 0) // tile()
    picture.label(x, y, codes, 70, f"codes of {rows} rows, {scope['row_codes']():,} bytes each", BLUE)
    picture.label(x + codes, y, width - codes, 70, "scales", ORANGE)
    picture.text(x, y + 88, str(code(0, 0)), 12, "start", GREY)
    picture.text(x + codes, y + 88, f"{scale(0, 0):,}", 12, "end", GREY)
    picture.text(x + width, y + 88, f"{tile():,}", 12, "end", GREY)
    picture.text(x, 70, "bytes of a tile, to scale; a matrix is tile after tile, the last one filled up with zeros", 12)
    picture.text(x, 216, f"The codes of row 1 begin at {code(1, 0):,}, its {scope['row_scales']()} scales at "
                         f"{scale(1, 0):,}.")
    # A block.
    picture.text(x, 262, f"A block: {block} values along K in {block // 2} bytes of codes, and one byte of scale", 13)
    for number in range(block // 2):
        at = x + 56 * number
        low = [k for k in range(block) if code(0, k) == number]
        picture.label(at, 280, 28, 30, str(low[1]), SHADES[1], 12)
        picture.label(at + 28, 280, 28, 30, str(low[0]), SHADES[0], 12)
        picture.text(at + 28, 328, f"byte {code(0, low[0])}", 11, "middle", GREY)
    picture.label(x + 56 * (block // 2) + 24, 280, 84, 30, "scale", ORANGE, 12)
    picture.text(x + 56 * (block // 2) + 66, 328, f"at {scale(0, 0):,}", 11, "middle", GREY)
    picture.text(x, 360, "numbers: k of the code, E2M1; an even k is in the byte's low half. The scale, E8M0, is a "
                         "power of two.", 12)
    picture.text(x, 392, f"Tiles of BF16 and float32 are row-major: {rows} rows of {2 * cols:,} or {4 * cols:,} bytes. "
                         "A device's pack kernels", 12, fill=GREY)
    picture.text(x, 408, "rearrange tiles to the layout that its products read.", 12, fill=GREY)
    return picture


def simulate(stages, steps, plan, commit, stage_time, hop):
    """When what happens, by the loop of src/engine/run.rs over a replica of so many stages."""
    depth = stages + int(found(r"depth: stages \+ (\d+)", "src/backend/gpu/stage.rs").group(1))
    found(r"self\.submit\(\)\?;.*self\.in_flight\.collect\(\)\?;.*self\.commit\(", "src/engine/run.rs", re.S)
    now, submitted, ends = 0, 0, []
    free = [0] * stages
    host, devices = [], []
    for collected in range(steps):
        while submitted < steps and submitted - collected < depth:
            host.append((now, now + plan, "plan", submitted))
            now += plan
            # The devices compute steps of different sequences; those of the step `stages` before come again.
            at = max(now, ends[submitted - stages] if submitted >= stages else 0)
            for stage in range(stages):
                begin = max(at, free[stage])
                free[stage] = begin + stage_time
                devices.append((stage, begin, free[stage], submitted))
                at = free[stage] + hop
            ends.append(free[-1])
            submitted += 1
        now = max(now, ends[collected])
        host.append((now, now + commit, "commit", collected))
        now += commit
    return depth, host, devices, ends


def lanes(picture, x, y, scale, host, devices, names, tints):
    """A lane for the host and one a stage."""
    for lane, name in enumerate(["host", *names]):
        picture.text(x - 12, y + 54 * lane + 24, name, 13, "end")
    for begin, end, what, step in host:
        fill = WHITE if what == "plan" else tints[step % len(tints)]
        width = (end - begin) * scale
        picture.label(x + begin * scale, y, width, 36, f"{what[0].upper()}{step}" if width > 20 else "", fill, 11)
    for stage, begin, end, step in devices:
        fill = tints[step % len(tints)]
        picture.label(x + begin * scale, y + 54 * (stage + 1), (end - begin) * scale, 36, f"step {step}", fill)


def picture_of_steps():
    depth, host, devices, ends = simulate(1, 5, 3, 3, 20, 0)
    picture = Picture(1140, 380, f"A GPU has {depth} steps in flight: what the host does is hidden behind a step")
    x, y, scale = 100, 110, 9
    lanes(picture, x, y, scale, host, devices, ["device"], [BLUE, ORANGE, GREEN, PURPLE])
    # The device's tokens go to the next step, and to the host.
    for step in range(3):
        end = x + ends[step] * scale
        way = (end - 14, y + 90), (end - 14, y + 112), (end + 14, y + 112), (end + 14, y + 92)
        picture.line(*way, stroke=GREY, arrow=True)
    picture.text(x + ends[0] * scale - 14, y + 132, "tokens stay on the device: the next step embeds them", 12)
    commit = next(begin for begin, _, what, step in host if what == "commit" and step == 0)
    picture.line((x + ends[0] * scale, y + 54), (x + commit * scale + 10, y + 38), stroke=GREY, arrow=True)
    picture.text(24, 80, "P1 is planned before step 0 has its tokens: the plan names slots, not tokens.", 12)
    picture.lines_of_text(24, y + 172, 24, [
        "P: the host plans a step and queues it. C: it takes the step's tokens, ends answers and starts requests.",
        "That a token ends its answer is known at C, one step late: the row that the next step computes for it is",
        "dropped. Its KV blocks are given to others at once, since steps run in order.",
        "Lengths are an example, not measured.",
    ], last=GREY)
    return picture


def picture_of_group():
    stages = 3
    depth, host, devices, _ = simulate(stages, 9, 1, 1, 8, 1)
    title = f"A group of {stages} devices: {depth} steps in flight, a stage each and one that waits"
    picture = Picture(1140, 450, title)
    x, y, scale = 130, 100, 9
    layers = preset("n_layers") // stages
    names = [f"layers {layers * stage} to {layers * (stage + 1) - 1}" for stage in range(stages)]
    lanes(picture, x, y, scale, host, devices, names, [BLUE, ORANGE, GREEN])
    picture.text(24, 76, f"Sequences take turns, a colour each: those of step 0 come again in step {stages}, which "
                         "begins with the tokens that step 0 has found.", 12)
    picture.lines_of_text(24, y + 246, 22, [
        "Host: white, it plans a step and queues it on all stages; coloured, it takes the tokens of one.",
        "Between two stages the rows of the residual stream hop to the next device, in a stream of their own: a",
        "stage waits for a hop only if it has nothing else to do. The last stage writes tokens to pinned memory,",
        "where the first reads them.",
        "Lengths are an example, not measured.",
    ], last=GREY)
    return picture


def picture_of_attention():
    unit, group, span = CONSTANTS["ATTENTION_UNIT"], CONSTANTS["ATTENTION_GROUP"], CONSTANTS["ATTENTION_SPAN"]
    keys = 2500
    units = -(-keys // unit)
    title = f"Attention's sums: units of {unit} keys, groups of {group} units, spans of {span}, by position"
    picture = Picture(1140, 540, title)
    x, wide = 24, 54
    picture.text(24, 76, f"A row that sees {keys:,} keys. Each unit is summed on its own; groups, spans and the row "
                         "fold sums in order.", 12)
    below = {}
    for number in range(units):
        at = x + wide * number
        picture.label(at, 320, wide - 6, 36, str(number), BLUE)
        below[number] = at + (wide - 6) // 2
    picture.text(x, 374, f"unit 0: keys 0 to {unit - 1}", 11, "start", GREY)
    for name, run, y, colour in [("group", group, 240, GREEN), ("span", span, 160, ORANGE)]:
        middle = {}
        for number in range(-(-units // run)):
            own = [at for first, at in below.items() if first // run == number]
            centre = (own[0] + own[-1]) // 2
            picture.label(centre - 44, y, 88, 36, f"{name} {number}", colour)
            for at in own:
                picture.line((at, y + 80), (centre, y + 36), stroke=GREY)
            middle[number * run] = centre
        below = middle
    tops = list(below.values())
    row = (tops[0] + tops[-1]) // 2
    picture.label(row - 60, 92, 120, 32, "the row", PURPLE)
    for at in tops:
        picture.line((at, 160), (row, 124), stroke=GREY)
    picture.text(24, 404, "A row may be one work item or several, of a span, a group or a unit each:", 12)
    for line, run in enumerate([span, group, 1]):
        y = 416 + 30 * line
        for first in range(0, units, run):
            count = min(run, units - first)
            picture.box(x + wide * first, y, wide * count - 6, 20, PURPLE)
    picture.text(24, 524, "Each item stores its sum, and the last to finish folds them: the tree, and so every bit, is "
                          "the same.", 12)
    return picture


def picture_of_product():
    tile = found(
        r"many\(ATTN_OUT, 128, (\d+), &\[128\], (\d+), Own\)", "kernels/hopper/catalogue.rs"
    )
    warpgroups, blocks = int(tile.group(1)), int(tile.group(2))
    shared = int(found(r"const ALL_SHARED: usize = (\d+) \* 1024;", "kernels/hopper/catalogue.rs").group(1)) * 1024
    weight_bytes = warpgroups * blocks * 64 * CONSTANTS["W16_SLAB_BYTES"]
    stage_bytes = weight_bytes + 128 * CONSTANTS["SLAB"] * 2
    stages = shared // stage_bytes
    # The order is that of HandedByThread (hopper/handed.h); the lengths are made up.
    before, issue, latency, multiply, steps = 18, 1, 9, 5, 11
    slabs = preset("n_attn_heads") * preset("head_dim") // CONSTANTS["SLAB"]
    copies, products, free, issued, done = [], [], [0] * stages, 0, 0
    for step in range(min(stages, steps)):
        copies.append([step, issued, None])
        issued += issue
    issued = before
    for step in range(steps):
        begin = max(issued, free[step % stages])
        if step >= stages:
            copies.append([step, begin, None])
        copies[step][2] = begin
        issued = begin + issue
        full = max(copies[step][1:]) + latency
        done = max(done, full) + multiply
        products.append((step, done - multiply, done))
        free[step % stages] = done
    title = f"A product on Hopper: {stages} stages of {stage_bytes:,} bytes in turn"
    picture = Picture(1140, 280 + 50 * stages, title)
    x, y, scale = 150, 72, 10
    picture.text(x - 12, y + 24, "predecessor", 13, "end")
    picture.label(x, y, before * scale, 30, "computes", PALE)
    end = x + (before + 1) * scale
    picture.line((x + before * scale, y - 8), (x + before * scale, y + 94 + 50 * stages), stroke=GREY, dash="4 3")
    for stage in range(stages):
        top = y + 48 + 50 * stage
        picture.text(x - 12, top + 24, f"stage {stage}", 13, "end")
        for step, weights, tokens in copies:
            if step % stages != stage:
                continue
            _, begin, finish = products[step]
            picture.box(x + weights * scale, top, (begin - weights) * scale, 16, BLUE)
            picture.box(x + tokens * scale, top + 16, (begin - tokens) * scale, 16, ORANGE)
            picture.label(x + begin * scale, top, (finish - begin) * scale, 32, str(step), GREEN)
    top = y + 48 + 50 * stages
    picture.text(x - 12, top + 24, "wgmma", 13, "end")
    for step, begin, finish in products:
        picture.label(x + begin * scale, top, (finish - begin) * scale, 32, str(step), GREEN)
    picture.text(x + done * scale + 10, top + 22, f"... {slabs - 1}")
    picture.label(end, y, 290, 30, "the next kernel may start its prologue", WHITE, 12, GREY, "4 3")
    picture.lines_of_text(24, top + 70, 22, [
        "Blue: a slab's weights, 64 along K, are on their way or in the stage. Orange: its tokens. Green: multiplied.",
        "Weights do not depend on the predecessor: those of the first stages are requested before it ends, tokens",
        "after. From then on a producer's bulk copies fill a stage as soon as the consumers have released it.",
        f"Stages are attn_out's for a tile of 128 tokens, of {slabs} slabs; lengths are an example, not measured.",
    ], last=GREY)
    return picture


PICTURES = {
    "product": picture_of_product,
    "rooms": picture_of_rooms,
    "steps": picture_of_steps,
    "group": picture_of_group,
    "page": picture_of_page,
    "slab": picture_of_slab,
    "wire": picture_of_wire_tile,
    "attention": picture_of_attention,
}


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    stale = []
    for name, picture in PICTURES.items():
        path, svg = f"docs/{name}.svg", picture().svg()
        if not check:
            with open(path, "w", encoding="utf-8") as file:
                file.write(svg)
        elif not os.path.exists(path) or read(path) != svg:
            stale.append(path)
    if stale:
        sys.exit(f"not what the code says: {', '.join(stale)}; docs/pictures.py makes them anew")


main()

#!/usr/bin/env python3
"""What documents and comments refer to is there, and the documents' lines are short.

- A document's lines have at most 120 characters and no blanks at their end. Tables, code blocks (what a program has
  printed) and lines that a URL makes long may be longer.
- Links between documents lead to a file or a folder that is there, and those to a heading (`file.md#heading`) to one
  that the file has. Links to the web are not followed.
- Some have a limit of words, so that they can be read in the time that they are meant for.
- Files that a document or a comment names are there: `batch/output.rs` is if a path ends so. Records of benches name
  what there was.
"""
import os
import re
import subprocess
import sys

WIDTH = 120
# Words of 20 minutes, 220 a minute, and of 10.
MOST_WORDS = {"ARCHITECTURE.md": 4400, "README.md": 2300}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAME = re.compile(r"(?<![\w/.$*{}~-])((?:[\w-]+/)*[\w-]+\.(?:rs|hip|h|cpp|c|py|sh|md|toml|svg))\b(?![(./])")
COMMENT = {
    "rs": r"//.*", "h": r"//.*|^\s*(?:/\*|\*).*", "hip": r"//.*", "cpp": r"//.*", "c": r"//.*|^\s*(?:/\*|\*).*",
    "sh": r"^\s*#.*", "py": r"^\s*#.*",
}
# Files of other projects and systems, and one that the build makes.
ELSEWHERE = {
    "run.cpp", "tokenizer.cpp", "src/run.cpp", "src/tokenizer.cpp", "src/getp/run.cpp", "src/getp/eval.cpp",
    "getp-csrc/getp_run.cpp", "export_tokenizer_bin.py", "llama.cpp", "llama-vocab.cpp", "cuda.h", "hip_runtime_api.h",
    "catalogue.h", "cdna/mlp1.hip",
}


def blanked(match):
    """The empty lines of what is taken out, so that lines keep their numbers."""
    return re.sub(r"[^\n]", "", match.group())


def without_code(text):
    """A document without its code blocks: those between fences, and those of four blanks behind an empty line."""
    return re.sub(r"(?<=\n\n)(?: {4}.*\n|\n)+", blanked, FENCE.sub(blanked, text))


def faults_of_lines(text):
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            yield number, "blanks at the end"
    for number, line in enumerate(without_code(text).split("\n"), 1):
        if len(line) > WIDTH and not line.startswith("|") and not re.search(r"https?://\S{60}", line):
            yield number, f"{len(line)} characters"


def faults_of_length(path, text):
    words = sum(1 for word in text.split() if re.search(r"\w", word))
    most = MOST_WORDS.get(path, words)
    if words > most:
        yield 1, f"{words} words, and {most} are the most"


def anchors(path):
    """The headings of a document as GitHub names them."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub(blanked, read(path)), re.MULTILINE):
        text_alone = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text_alone.lower()).replace(" ", "-")
        count = sum(1 for other in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", other))
        found.append(f"{name}-{count}" if count else name)
    return found


def fault_of_link(path, link):
    if re.match(r"[a-z]+:", link):
        return None
    file, _, anchor = link.partition("#")
    target = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
    if not os.path.exists(target):
        return f"{link}: there is no {target}"
    if anchor and anchor not in anchors(target):
        return f"{link}: {target} has no such heading"
    return None


def faults_of_links(path, text):
    # A span of code may have brackets.
    prose = re.sub(r"`[^`]*`", blanked, without_code(text))
    for match in LINK.finditer(prose):
        if fault := fault_of_link(path, match.group(1)):
            yield prose.count("\n", 0, match.start()) + 1, fault


def faults_of_names(path, text, files):
    spans = COMMENT.get(path.rpartition(".")[2], r"`[^`\n]+`")
    for match in re.finditer(spans, text, re.MULTILINE):
        for name in NAME.findall(match.group()):
            # NAME.rs stands for any file.
            known = name in ELSEWHERE or re.search(r"[A-Z]{4}", name)
            if not known and not any(f"/{file}".endswith(f"/{name}") for file in files):
                yield text.count("\n", 0, match.start()) + 1, f"there is no {name}"


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def main():
    files = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    faults = 0
    for path in files:
        ending = path.rpartition(".")[2]
        if ending != "md" and ending not in COMMENT:
            continue
        text, found = read(path), []
        if ending == "md":
            found += [*faults_of_lines(text), *faults_of_length(path, text), *faults_of_links(path, text)]
        if not path.startswith("benches/record/"):
            found += faults_of_names(path, text, files)
        for number, fault in sorted(found):
            print(f"{path}:{number}: {fault}", file=sys.stderr)
        faults += len(found)
    sys.exit(min(faults, 1))


main()

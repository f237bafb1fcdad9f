#!/usr/bin/env python3
"""The documents: no line is longer than 120 characters or ends in a blank, and every link leads somewhere.

    tests/programs/documents.py FILE.md...

Tables, code blocks (what a program has printed) and lines that a URL makes long may be longer. Links to a file or a
folder of the repository must lead to one that is there, and those to a heading (`file.md#heading`) to one that the file
has. Links to the web are not followed.
"""
import os
import re
import sys

WIDTH = 120
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


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


def anchors(path):
    """The headings of a document as GitHub names them."""
    with open(path, encoding="utf-8") as file:
        text = FENCE.sub(blanked, file.read())
    found = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
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


def main():
    faults = 0
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for number, fault in sorted([*faults_of_lines(text), *faults_of_links(path, text)]):
            print(f"{path}:{number}: {fault}", file=sys.stderr)
            faults += 1
    sys.exit(min(faults, 1))


main()

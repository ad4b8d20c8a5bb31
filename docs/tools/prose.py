"""Report the length and the style of sentences in pages and Python files: `python docs/tools/prose.py FILE...`.

The report helps with editing and is not a test: a listed sentence may be good, and a sentence that is not listed may be bad.
`--sample N --seed S` prints N random sentences from all files, so that each can be judged by itself.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

LONG: Final = 30

# Habits that make technical English hard to read, each with a regular expression that finds most cases.
HABITS: Final = {
    "noun clause": r"\b[Ww]hat (?:\w+ ){0,4}(?:is|are|has|have|does)\b(?!\?)",
    "pronoun without a noun": r"\b(?:those (?:that|of|which)|one of both|that of|which of (?:two|both))\b",
    "own": r"\bof (?:one's|its|their|your) own\b",
    "says, told": r"\b(?:is|are) told\b|\bsays? (?:so|that|what|who)\b",
    "odd word": r"\b(?:beside|dear|alike|in vain|nobody|so many|goes? on|lies?)\b",
    "None:": r"\bNone: ",
}


class Sentence(NamedTuple):
    """A sentence with its file and line."""

    file: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        """The number of words. A code span counts as one word."""
        return len(re.sub(r"`[^`]*`", "x", self.text).split())

    @property
    def habits(self) -> list[str]:
        """The names of the habits in this sentence."""
        return [name for name, pattern in HABITS.items() if re.search(pattern, self.text)]


def paragraphs(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) for each paragraph of prose on a page, or of docstrings and messages in a Python file."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 5:
                for part in re.split(r"\n\s*\n|\n(?=\s*[\w., ]{1,40}:\s)", node.value):
                    yield node.lineno, " ".join(part.split())
        return
    # A code fence, a table, a heading or the next list item ends a paragraph.
    text = re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), source, flags=re.M | re.S)
    number, lines = 1, [""]
    for at, line in enumerate([*text.splitlines(), ""], 1):
        begins = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if begins or not line.strip() or re.match(r"[|#<!]", line):
            yield number, " ".join(lines)
            number, lines = at, []
        if line.strip() and not re.match(r"[|#<!]", line):
            lines.append(line.strip().removeprefix("- "))


def sentences(file: Path) -> list[Sentence]:
    """The sentences in a file that have at least four words."""
    found = [
        Sentence(file, line, text.strip())
        for line, paragraph in paragraphs(file)
        for text in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"'])", paragraph)
    ]
    return [sentence for sentence in found if sentence.words > 3]


def main() -> None:
    """Print a report with one line per file, or print a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--list", action="store_true", help="also print the sentences that have a habit or are too long"
    )
    parser.add_argument("--sample", type=int, help="print this number of sentences instead of the report")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    given = parser.parse_args()
    by_file = {file: sentences(file) for file in given.files}
    every = [sentence for found in by_file.values() for sentence in found]
    if given.sample is not None:
        for sentence in random.Random(given.seed).sample(every, min(given.sample, len(every))):
            print(f"{sentence.file}:{sentence.line}: {sentence.text}")
        return
    for name, found in [*((str(file), found) for file, found in by_file.items()), ("all", every)]:
        habits = [sentence for sentence in found if sentence.habits]
        long = [sentence for sentence in found if sentence.words > LONG]
        mean = sum(sentence.words for sentence in found) / max(1, len(found))
        print(
            f"{name}: {len(found)} sentences of {mean:.0f} words, {len(habits)} with a habit, {len(long)} of more than {LONG} words"
        )
        if given.list and name != "all":
            for sentence in {*habits, *long}:
                print(f"  {sentence.line}: {', '.join(sentence.habits) or 'long'}: {sentence.text}")


if __name__ == "__main__":
    main()

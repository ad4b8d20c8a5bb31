"""The fenced blocks of a page, with the comments before them. docs/design/house.md lists the comments."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTES = ("file", "diff", "output", "exit", "raises", "mesh", "processes")


@dataclass(frozen=True)
class Block:
    """One fenced block. `page` is relative to the repository's root; `line` is the line of the block's first text."""

    page: str
    line: int
    language: str
    text: str
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The block's name in the table of blocks that are not run: its page and its first line of text."""
        first = next((line.strip() for line in self.text.splitlines() if line.strip()), "")
        return f"{self.page}: {first}"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def sides(block: Block) -> dict[str, str]:
    """The two files of a ```diff block that shows all of their lines, by the names in its note: before and after."""
    before, after = block.notes["diff"].split()
    lines = [(line[:1] or " ", line[1:] + "\n") for line in block.text.splitlines()]
    return {
        name: "".join(line for sign, line in lines if sign != other)
        for name, other in ((before, "+"), (after, "-"))
    }


def pages() -> list[str]:
    """README and every page of docs/, relative to the repository's root."""
    found = [path for path in sorted(DOCS.rglob("*.md")) if "tools" not in path.relative_to(DOCS).parts]
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in found)]


def blocks(page: str, text: str | None = None) -> list[Block]:
    """All fenced blocks of a page, in order. Raises ValueError for a misspelt or misplaced comment."""
    lines = ((ROOT / page).read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    notes: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.strip():
            continue
        comment = re.fullmatch(r"<!--\s*(\w+)(?::\s*(.*?))?\s*-->", line.strip())
        if comment:
            if comment[1] not in NOTES:
                raise ValueError(f"{page}:{at}: no such comment: {line.strip()}; known: {', '.join(NOTES)}")
            notes[comment[1]] = comment[2] or ""
            continue
        fence = re.match(r"(\s*)(`{3,}|~{3,})\s*([\w+-]*)", line)
        if fence is None:
            if notes:
                raise ValueError(f"{page}:{at}: a comment for a block, and no block after it")
            continue
        start = at
        while at < len(lines) and lines[at].strip() != fence[2]:
            at += 1
        indent = len(fence[1])
        body = "\n".join(
            each[indent:] if each[:indent].isspace() or not indent else each for each in lines[start:at]
        )
        at += 1
        found.append(Block(page, start + 1, fence[3], body, notes))
        notes = {}
    return found


def llama(folder: Path) -> None:
    """Make the folder that pages call Llama-3.2-1B, with the sizes of configs/quickstart.toml, which completes the pages' partial configs."""
    sizes = {
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
    }
    sizes |= {"num_key_value_heads": "num_kv_heads", "intermediate_size": "intermediate_size"}
    model = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())["model"]
    (folder / "Llama-3.2-1B").mkdir(exist_ok=True)
    said = {"model_type": "llama", "vocab_size": 256}
    said |= {theirs: model[ours] for theirs, ours in sizes.items()}
    (folder / "Llama-3.2-1B" / "tokenizer.json").write_text("{}")
    (folder / "Llama-3.2-1B" / "config.json").write_text(json.dumps(said))

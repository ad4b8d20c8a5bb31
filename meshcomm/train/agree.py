"""Before the first step: do all ranks train the same thing, and how many share this host?"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from meshcomm.config import Config
from meshcomm.config.write import key_path, whole_toml
from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.layout.sizes import fold, ranks_text
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Sections, sections
from meshcomm.train.data import Corpus, load
from meshcomm.train.exchange import bytes_of_every_rank, is_first, rows_of_every_rank
from meshcomm.train.metrics import check_folder

_BYTES = 16
# The sections and the data.
_COMPARED = 5
# Settings that an error lists.
_SHOWN = 8


@dataclass(frozen=True)
class Facts:
    """What the ranks agreed on."""

    sections: Sections
    corpus: Corpus
    ranks_here: int
    """Ranks of the mesh on this rank's host, itself included."""


def agree(mesh: Mesh, config: Config) -> Facts:
    """Check the configuration, load the data, and compare both with every other rank.

    Called by: every rank of the mesh.
    Raises:    on every rank where one of them cannot start: its own error on that rank, and
               TrainingError naming it on the others; TrainingError naming the settings that
               differ with both values, or the ranks whose data differ from what most ranks have. `data.files` and `train.out`
               may differ: hosts have different folders.
    """
    failure: MeshcommError | None = None
    digests = [bytes(_BYTES)] * _COMPARED
    try:
        known = sections(mesh, config)
        corpus = load(known.data)
        if is_first(mesh):
            check_folder(Path(known.train.out))
        digests = [*map(_digest, known), corpus.digest[:_BYTES]]
    except MeshcommError as error:
        # The others are told before this rank gives up: nobody waits for it in vain.
        failure = error
    host = hashlib.sha256(platform.node().encode()).digest()[:_BYTES]
    mine = torch.frombuffer(bytearray(b"".join([host, *digests])), dtype=torch.uint8)
    table = rows_of_every_rank(mesh, mine.to(mesh.device)).cpu().unflatten(1, (-1, _BYTES))
    if failure is not None:
        raise failure
    columns = [[bytes(cell.tolist()) for cell in column] for column in table.unbind(1)]
    ranks = [int(rank) for rank in mesh.layout.ranks.flat]
    _compare_ready(ranks, columns[-1])
    if any(len(set(column)) > 1 for column in columns[1:-1]):
        # Every rank sees the same table, so all of them come here.
        texts = bytes_of_every_rank(mesh, _text(known).encode())
        raise _differing(ranks, [json.loads(text) for text in texts])
    _compare_data(ranks, columns[-1])
    return Facts(known, corpus, columns[0].count(host))


def _settings(section: object) -> dict[str, Any]:
    """A section as plain data, without what may differ between hosts."""
    assert isinstance(section, BaseModel)
    return section.model_dump(mode="json", exclude={"files", "out"})


def _digest(section: object) -> bytes:
    return hashlib.sha256(json.dumps(_settings(section)).encode()).digest()[:_BYTES]


def _text(known: Sections) -> str:
    return json.dumps({name: _settings(section) for name, section in known._asdict().items()})


def _compare_ready(ranks: list[int], found: list[bytes]) -> None:
    without = [rank for rank, digest in zip(ranks, found, strict=True) if not any(digest)]
    if without:
        raise TrainingError(
            f"rank {fold(sorted(without))} could not start the training",
            given=f"{len(ranks) - len(without)} of {len(ranks)} ranks are ready",
            expected="all of them",
            hint="see the error of that rank",
        )


def _differing(ranks: list[int], settings: list[dict[str, Any]]) -> TrainingError:
    """Every field that differs, with the value of most ranks and those of the others."""
    lines: list[str] = []
    keys: list[str] = []
    odd: set[int] = set()
    flat = [dict(_fields(each)) for each in settings]
    for key in dict.fromkeys(key for each in flat for key in each):
        values: dict[str, list[int]] = {}
        for rank, each in zip(ranks, flat, strict=True):
            values.setdefault(whole_toml(each.get(key)), []).append(rank)
        if len(values) > 1:
            common = max(values, key=lambda value: len(values[value]))
            others = {value: sorted(of) for value, of in values.items() if value != common}
            keys.append(key)
            odd.update(rank for of in others.values() for rank in of)
            said = ", ".join(f"{ranks_text(of)} = {value}" for value, of in others.items())
            lines.append(f"{key}: {said}, the others {common}")
    more = f" and {len(keys) - _SHOWN} more settings" if len(keys) > _SHOWN else ""
    return TrainingError(
        f"ranks disagree on {', '.join(keys[:_SHOWN])}{more}: "
        f"{ranks_text(sorted(odd))} against the other {len(ranks) - len(odd)}",
        given="\n".join(lines[:_SHOWN]),
        expected="the same on every rank",
        hint=f"start {ranks_text(sorted(odd))} with the configuration of the others",
    )


def _fields(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """The innermost settings, by dotted key."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _fields(inner, (*path, key))
    else:
        yield key_path(path), value


def _compare_data(ranks: list[int], found: list[bytes]) -> None:
    (common, count), *others = Counter(found).most_common()
    if others:
        odd = sorted(rank for rank, value in zip(ranks, found, strict=True) if value != common)
        raise TrainingError(
            f"ranks disagree on the training data: rank {fold(odd)} against the other {count}",
            given="SHA-256 "
            + ", ".join(f"{value.hex()[:8]} on {n}" for value, n in [(common, count), *others]),
            expected="the same on every rank",
            hint="name files that are equal on every host in data.files; the default, the sources of "
            "Python's standard library, differs between Python versions",
        )

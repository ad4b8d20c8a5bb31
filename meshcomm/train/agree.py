"""Before the first step: do all ranks train the same thing, and how many share this host?"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from meshcomm.config import Config
from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Sections, sections
from meshcomm.train.data import Corpus, load
from meshcomm.train.exchange import is_first, rows_of_every_rank
from meshcomm.train.metrics import check_folder

_BYTES = 16
_COMPARED = ("[parallel]", "[model]", "[data]", "[train]", "the training data")


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
               TrainingError naming it on the others; TrainingError naming the ranks whose
               settings or data differ from what most ranks have. `data.files` and `train.out`
               may differ: hosts have different folders.
    """
    failure: MeshcommError | None = None
    digests = [bytes(_BYTES)] * len(_COMPARED)
    try:
        known = sections(mesh, config)
        corpus = load(known.data)
        if is_first(mesh):
            check_folder(Path(known.train.out))
        digests = [*map(_settings, known), corpus.digest[:_BYTES]]
    except MeshcommError as error:
        # The others are told before this rank gives up: nobody waits for it in vain.
        failure = error
    host = hashlib.sha256(platform.node().encode()).digest()[:_BYTES]
    mine = torch.frombuffer(bytearray(b"".join([host, *digests])), dtype=torch.uint8)
    table = rows_of_every_rank(mesh, mine.to(mesh.device)).cpu().unflatten(1, (-1, _BYTES))
    if failure is not None:
        raise failure
    columns = [[bytes(cell.tolist()) for cell in column] for column in table.unbind(1)]
    _compare([int(rank) for rank in mesh.layout.ranks], columns[1:])
    return Facts(known, corpus, columns[0].count(host))


def _settings(section: object) -> bytes:
    assert hasattr(section, "model_dump_json")
    text: str = section.model_dump_json(exclude={"files", "out"})
    return hashlib.sha256(text.encode()).digest()[:_BYTES]


def _compare(ranks: list[int], columns: list[list[bytes]]) -> None:
    without = [rank for rank, found in zip(ranks, columns[-1], strict=True) if not any(found)]
    if without:
        raise TrainingError(
            f"rank {fold(sorted(without))} could not start the training",
            given=f"{len(ranks) - len(without)} of {len(ranks)} ranks are ready",
            expected="all of them",
            hint="see the error of that rank",
        )
    for what, found in zip(_COMPARED, columns, strict=True):
        (common, count), *others = Counter(found).most_common()
        if others:
            odd = sorted(rank for rank, value in zip(ranks, found, strict=True) if value != common)
            raise TrainingError(
                f"ranks disagree on {what}: rank {fold(odd)} against the other {count}",
                given="SHA-256 "
                + ", ".join(f"{value.hex()[:8]} on {n}" for value, n in [(common, count), *others]),
                expected="the same on every rank",
                hint="one configuration for all ranks"
                if what.startswith("[")
                else "name files that are equal on every host in data.files; the default, the sources of "
                "Python's standard library, differs between Python versions",
            )

"""A kind of model for a Trainer, beside its program in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshcomm.mesh import Mesh
from tests.oracles.kind import Kind


@dataclass(frozen=True)
class Case:
    """A kind of model for a Trainer.

    given: what the Trainer is given; by default, the module as an object. refused: for each mesh, words of the error.
    micro: samples of a microbatch on one rank. train: more settings of [train]. on_mesh: makes what the Trainer is given, in
    place of `given`, for a program that calls the mesh itself. loss: on a mesh, if it communicates. seq_len: the length of axis 1
    of hidden states, which context divides.
    """

    kind: Kind
    given: Callable[[], Any] | None = None
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    micro: int = 2
    train: dict[str, Any] = field(default_factory=dict)
    on_mesh: Callable[[Mesh], Any] | None = None
    loss: Callable[[Mesh], Any] | None = None
    seq_len: int = 8

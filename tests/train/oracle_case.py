"""A kind of model for a Trainer, with its program in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshcomm.mesh import Mesh
from tests.oracles.kind import Kind


@dataclass(frozen=True)
class Case:
    """A kind of model for a Trainer.

    given: makes the model for the Trainer; by default, the module as an object. refused: for each mesh, words of the error.
    micro: samples of a microbatch on one rank. train: more settings of [train]. on_mesh: replaces `given` in a program that calls
    the mesh itself. loss: makes a loss that communicates on a mesh. seq_len: the length of axis 1 of hidden states, which context
    divides.
    """

    kind: Kind
    given: Callable[[], Any] | None = None
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    micro: int = 2
    train: dict[str, Any] = field(default_factory=dict)
    on_mesh: Callable[[Mesh], Any] | None = None
    loss: Callable[[Mesh], Any] | None = None
    seq_len: int = 8

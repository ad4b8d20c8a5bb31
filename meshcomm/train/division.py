"""Who writes which parts of a state: planned by all ranks together, and kept while nothing changes.

Planning costs more than copying what is written: every rank describes all that it has, hears all
others, and computes who writes what several of them have. Names, shapes and placements seldom change
from one save to the next, so only what did is planned again.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from meshcomm.mesh import Mesh
from meshcomm.train.exchange import bytes_of_every_rank, is_first
from meshcomm.train.saved import unpickle

_TOKEN = 8
_ALL = bytes(32)


@final
class Division:
    """Which parts of a state this rank writes, and the metadata of the whole. One for all saves of a run."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._place = [int(rank) for rank in mesh.layout.ranks.flat].index(mesh.rank)
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._items: list[WriteItem] = []
        self._described: dict[str, Any] = {}

    def exchange(self, state: Mapping[str, Tensor]) -> Heard:
        """What every rank has, or what has changed since the last save; for `divide`.

        state: as in `sharded.write`.
        Called by: every rank. Two gathers per dim, four where ranks find other things changed.
        """
        kinds = {name: _kind(tensor) for name, tensor in state.items()}
        changed = None
        if kinds.keys() == self._kinds.keys():
            changed = [name for name, kind in kinds.items() if kind != self._kinds[name]]
        # Forgotten until it is divided: where that fails, nothing is known.
        self._kinds = {}
        digest = _ALL if changed is None else hashlib.sha256(repr(sorted(changed)).encode()).digest()
        heard = self._say(digest, state if changed is None else {name: state[name] for name in changed})
        if any(found != digest for found in heard.digests):
            changed = None
            heard = self._say(_ALL, state)
        heard.kinds, heard.changed = kinds, changed
        return heard

    def divide(self, heard: Heard) -> tuple[list[WriteItem], Metadata]:
        """What this rank writes, and the metadata that goes beside what all ranks write.

        Every rank computes this from the same list, so nobody has to send it out.
        Raises: what kept this rank from saying what it has; ValueError or AssertionError where the
                ranks' states do not go together.
        """
        if heard.error is not None:
            raise heard.error
        planner = _planner()
        plans = [unpickle(plan) if plan else SavePlan([]) for plan in heard.plans]
        shares, metadata = planner.create_global_plan(plans)
        items, described = list(shares[self._place].items), dict(metadata.state_dict_metadata)
        if heard.changed is not None:
            again = set(heard.changed)
            items += [item for item in self._items if item.index.fqn not in again]
            described = {**self._described, **described}
        self._kinds, self._items, self._described = heard.kinds, items, described
        # A copy, as the writer adds to the metadata which file has what.
        return items, Metadata(dict(described))

    def _say(self, digest: bytes, state: Mapping[str, Tensor]) -> Heard:
        error: Exception | None = None
        mine = b""
        try:
            planner = _planner()
            planner.set_up_planner(dict(state), None, is_first(self._mesh))
            mine = pickle.dumps(planner.create_local_plan())
        except Exception as caught:
            # The others are not left waiting; `divide` raises it.
            error = caught
        said = bytes_of_every_rank(self._mesh, os.urandom(_TOKEN) + digest + mine)
        start = _TOKEN + len(digest)
        return Heard(
            said[0][:_TOKEN].hex(),
            [text[_TOKEN:start] for text in said],
            [text[start:] for text in said],
            error,
        )


@dataclass
class Heard:
    """What the ranks said to each other.

    token: the same on every rank, and another each time.
    """

    token: str
    digests: list[bytes]
    plans: list[bytes]
    error: Exception | None
    kinds: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    changed: list[str] | None = None


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor that its plan depends on."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        return (tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh, local.shape)
    return (tensor.dtype, tensor.shape)

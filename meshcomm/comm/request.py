"""One call of a collective: its arguments, and the results of each stage from the check to the finished result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final, Protocol, final

from torch import Tensor

from meshcomm.collectives import ALL_TO_ALL, SCATTER, Call, Collective
from meshcomm.comm.caller import Caller
from meshcomm.errors import MeshcommError
from meshcomm.transport import P2P


class Algorithm(Protocol):
    """An algorithm, used instead of the backend's, that reduces a flat tensor in place."""

    @property
    def name(self) -> str: ...

    def run(self, comm: Any, flat: Tensor, op: str) -> None: ...


# Marks an option that may differ between ranks, or that agree.py compares by itself.
_OWN: Final = {"own": True}
# The fields that the fast path supports. All other fields that a caller can set are options.
_KNOWN: Final = ("comm", "row", "x", "async_op", "op", "root", "axis", "concat", "out")


@final
@dataclass(slots=True, eq=False)
class Request:
    """One call of a collective. Each stage takes the request and adds results.

    | stage  | file          | adds |
    |---|---|---|
    | check  | check_call.py | source, axes counted from the front, plain splits, problem |
    | agree  | agree.py      | whether the other ranks make the same call; sizes, and the slice of a scatter |
    | load   | wire.py       | call, arrived |
    | start  | wire.py       | the Works |
    | finish | wire.py       | the result |

    The fields up to `out` are supported by the fast path of Communicator.collective. Later fields are options: a call
    with any option goes through all stages, and ranks must agree on the option unless it is marked as `_OWN`.

    concat:   the axis that an all_to_all joins. axis: the axis that an all_to_all splits; the only axis of other calls.
    uneven:   whether the size of `axis` may differ between ranks. input_split_sizes: the size of `axis` sent to each coord;
              output_split_sizes: the size received from each coord, if known.
    packed:   the facts of the tensors that x packs, while calls are compared.

    source:   x, with the axis to split or join; None on ranks that contribute nothing.
    problem:  an error on this rank only, raised after the other ranks have received their part of the call.
    header:   for a scatter, the shape of a slice as a message.
    sizes:    the size received from each coord, if the sizes differ.
    call:     the call for the transport. arrived: the buffer of the result before reordering.
    direct:   whether `arrived` is the final result buffer.
    repeatable: whether calls of this kind can be prepared for the fast path.
    """

    comm: Caller
    row: Collective
    x: Any = None
    async_op: bool = False
    op: Any = None
    root: int = -1
    axis: int = 0
    concat: int = 0
    out: Tensor | None = None

    factor: Any = field(default=None, metadata=_OWN)
    uneven: bool = field(default=False, metadata=_OWN)
    input_split_sizes: Sequence[int] | None = field(default=None, metadata=_OWN)
    output_split_sizes: Sequence[int] | None = field(default=None, metadata=_OWN)
    algorithm: Algorithm | None = field(default=None, metadata=_OWN)
    packed: dict[str, Any] | None = field(default=None, metadata=_OWN)

    source: Tensor | None = field(default=None, init=False)
    problem: MeshcommError | None = field(default=None, init=False)
    header: Tensor | None = field(default=None, init=False)
    sizes: list[int] | None = field(default=None, init=False)
    call: Call | list[P2P] | None = field(default=None, init=False)
    arrived: Tensor | None = field(default=None, init=False)
    direct: bool = field(default=False, init=False)
    repeatable: bool = field(default=False, init=False)

    def where(self) -> str:
        """Return the beginning of an error about the call."""
        return self.comm.where(self.row.name)

    @property
    def name(self) -> str:
        """The name under which the call is recorded, compared and counted. Each algorithm has its own name."""
        return self.row.name if self.algorithm is None else f"{self.row.name} by {self.algorithm.name}"

    @property
    def options(self) -> dict[str, object]:
        """The options of this call that must be equal on all ranks."""
        kind: Any = type(self)
        return {name: getattr(self, name) for name in _compared(kind)}

    @property
    def gets(self) -> bool:
        """Whether this rank has a result."""
        return self.row.root != "dst" or self.root == self.comm.coord

    @property
    def common(self) -> Tensor | None:
        """This rank's tensor, if all ranks contribute tensors of the same kind; None for a scatter or a barrier."""
        return None if self.row is SCATTER else self.source

    @property
    def differs(self) -> bool:
        """Whether the sizes of parts may differ from rank to rank."""
        return self.uneven or self.input_split_sizes is not None

    @property
    def joined(self) -> int:
        """The axis along which parts are joined."""
        return self.concat if self.row is ALL_TO_ALL else self.axis

    @property
    def target(self) -> Tensor | None:
        """The caller's tensor that becomes the result; None if the result is new."""
        return self.x if self.row.in_place and self.row.root != "dst" else self.out


@cache
def _compared(kind: Any) -> list[str]:
    """Return the options on which ranks must agree, including options that a subclass adds."""
    given = (each for each in fields(kind) if each.init and each.name not in _KNOWN)
    return [each.name for each in given if "own" not in each.metadata]

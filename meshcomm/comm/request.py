"""A collective on its way: what its caller asks for, what is known after the checks, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from meshcomm.collectives import ALL_TO_ALL, SCATTER, Call, Collective
from meshcomm.errors import MeshcommError
from meshcomm.transport import P2P


class Algorithm(Protocol):
    """An algorithm, used instead of the backend's, that reduces a flat tensor in place."""

    @property
    def name(self) -> str: ...

    def run(self, comm: Any, flat: Tensor, op: str) -> None: ...


# Marks an option that may differ between ranks, or that facts.py compares by itself.
_OWN: Final = {"own": True}


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What a call takes beyond the arguments of `Request`. A call with options goes through all stages, and ranks must agree
    on each option that is not marked as `_OWN`.

    uneven:   whether the size of `axis` may differ between ranks. input_split_sizes: the size of `axis` sent to each coord;
              output_split_sizes: the size received from each coord, if known.
    packed:   the facts of the tensors that x packs, while calls are compared.
    """

    factor: Any = field(default=None, metadata=_OWN)
    uneven: bool = field(default=False, metadata=_OWN)
    input_split_sizes: Sequence[int] | None = field(default=None, metadata=_OWN)
    output_split_sizes: Sequence[int] | None = field(default=None, metadata=_OWN)
    algorithm: Algorithm | None = field(default=None, metadata=_OWN)
    packed: dict[str, Any] | None = field(default=None, metadata=_OWN)

    def compared(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks."""
        return {name: getattr(self, name) for name in _compared(type(self))}


@cache
def _compared(kind: Any) -> list[str]:
    return [each.name for each in fields(kind) if "own" not in each.metadata]


NO_OPTIONS: Final = Options()


class Request(NamedTuple):
    """A call as its caller asks for it.

    axis, concat: the axes that an all_to_all splits and joins. All other calls have one axis, `axis`.
    """

    row: Collective
    x: Any
    async_op: bool = False
    op: Any = None
    root: int = -1
    axis: int = 0
    concat: int = 0
    out: Tensor | None = None
    options: Options = NO_OPTIONS

    @property
    def name(self) -> str:
        """The name under which the call is recorded, compared and counted. Each algorithm has its own name."""
        algorithm = self.options.algorithm
        return self.row.name if algorithm is None else f"{self.row.name} by {algorithm.name}"


class Checked(NamedTuple):
    """A call that this rank may make, if the other ranks make the same one.

    source:   x, with the axis to split or join; None on ranks that contribute nothing.
    axis, concat: counted from the front.
    sends, expects: the split sizes of an all_to_all, one for each coord.
    gets:     whether this rank has a result.
    problem:  an error on this rank only, raised after the other ranks have received their part of the call.
    """

    request: Request
    gets: bool
    source: Tensor | None = None
    axis: int = 0
    concat: int = 0
    sends: list[int] | None = None
    expects: list[int] | None = None
    problem: MeshcommError | None = None

    @property
    def common(self) -> Tensor | None:
        """This rank's tensor, if all ranks contribute tensors of the same kind; None for a scatter or a barrier."""
        return None if self.request.row is SCATTER else self.source

    @property
    def differs(self) -> bool:
        """Whether the sizes of parts may differ from rank to rank."""
        return self.request.options.uneven or self.sends is not None

    @property
    def joined(self) -> int:
        """The axis along which parts are joined."""
        return self.concat if self.request.row is ALL_TO_ALL else self.axis


class Loaded(NamedTuple):
    """A call that can be started.

    call:     for the transport, or the messages that take its place.
    arrived:  the buffer that the call fills; None if this rank receives nothing.
    result:   makes the result from this buffer.
    target:   the caller's tensor that becomes the result; None if the result is new.
    repeatable: whether calls of this kind can be prepared for the fast path.
    nbytes:   the bytes to count, if the sizes of other ranks matter.
    """

    checked: Checked
    call: Call | list[P2P]
    arrived: Tensor | None
    result: Callable[[Tensor], Tensor]
    target: Tensor | None
    problem: MeshcommError | None
    repeatable: bool = False
    nbytes: int | None = None

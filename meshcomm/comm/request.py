"""The values of a collective, stage by stage: the request of its caller, the checked call, and the call for the transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor

from meshcomm.collectives import Call, Collective
from meshcomm.errors import MeshcommError
from meshcomm.transport import P2P

if TYPE_CHECKING:
    from meshcomm.comm.scheduled import Algorithm


class Options(NamedTuple):
    """What a call takes beyond the arguments of `Request`. A call with options goes through all stages, and ranks must agree
    on each option that is not in `OWN_OPTIONS`.

    uneven:   whether the size of `axis` may differ between ranks. input_split_sizes: the size of `axis` sent to each coord;
              output_split_sizes: the size received from each coord, if known.
    algorithm: reduces instead of the backend. packed: the facts of the tensors that x packs, while calls are compared.
    waits:    whether the caller waits for the call before it returns, although the call has a handle.
    told:     whether an earlier call's comparison was that of this one too.
    """

    factor: Any = None
    uneven: bool = False
    input_split_sizes: Sequence[int] | None = None
    output_split_sizes: Sequence[int] | None = None
    algorithm: Algorithm | None = None
    packed: dict[str, Any] | None = None
    waits: bool = False
    told: bool = False


NO_OPTIONS: Final = Options()
# The options that may differ between ranks, or that facts.py compares in another way.
OWN_OPTIONS: Final = frozenset(
    ("factor", "uneven", "input_split_sizes", "output_split_sizes", "algorithm", "packed", "waits", "told")
)


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


class Checked(NamedTuple):
    """A call that this rank may make, if the other ranks make the same one.

    gets:     whether this rank has a result.
    source:   x, with the axis to split or join; None on ranks that contribute nothing.
    axis, concat: counted from the front. concat: the axis along which parts are joined.
    sends, expects: the split sizes of an all_to_all, one for each coord.
    differs:  whether the sizes of parts may differ from rank to rank.
    problem:  an error on this rank only, raised after the other ranks have received their part of the call.
    """

    request: Request
    gets: bool
    source: Tensor | None = None
    factor: float | complex | None = None
    axis: int = 0
    concat: int = 0
    sends: list[int] | None = None
    expects: list[int] | None = None
    differs: bool = False
    problem: MeshcommError | None = None


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

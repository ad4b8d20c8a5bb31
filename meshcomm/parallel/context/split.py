"""Splits a model's sequence, and computes attention over the full sequence in a ring or by splitting the heads (Ulysses)."""

from __future__ import annotations

from math import lcm
from typing import Any, Literal, Protocol, TypeAlias, final, get_args

import torch
from torch import Tensor

from meshcomm.comm.checks import normal_axis
from meshcomm.comm.functional import GatherGrad
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import Attention, check_window
from meshcomm.parallel.context.documents import current_documents
from meshcomm.parallel.context.order import Order, sequence_positions
from meshcomm.parallel.context.ring import ring_attention
from meshcomm.transport.torch_private import outside_graphs

AttentionKind: TypeAlias = Literal["ring", "ulysses"]


class ByHeads(Protocol):
    """Attention over full sequences for some of the heads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
        """q (batch, some heads, sequence, head), k and v (batch, some kv heads, sequence, head) -> like q. heads: the indices
        of q's heads among all heads.
        """


def split_sequence(x: Tensor, axis: int, mesh: Mesh, dim: str, order: Order) -> Tensor:
    """Return this rank's tokens of `x`, which every rank along `dim` holds in full. Does not communicate.

    Use this for inputs, targets, masks and position tables.

    Shape:    (.., sequence, ..) -> (.., sequence / n, ..), in new memory, or x itself if n = 1.
    Gradient: covers only this rank's tokens and is zero for all others. This is correct for a parameter whose
              gradients are summed along `dim` afterwards.
    Raises:   the errors of `sequence_positions`; ShapeError if x does not have this axis.
    """
    axis = normal_axis(x, axis, lambda: f'split_sequence along "{dim}" on {mesh.label}')
    n = mesh.size(dim)
    positions = sequence_positions(x.shape[axis], n, mesh.coord(dim), order, x.device)
    return x if n == 1 else x.index_select(axis, positions)


def gather_sequence(
    x: Tensor, axis: int, mesh: Mesh, dim: str, order: Order, *, grad: GatherGrad | None = None
) -> Tensor:
    """Return the full sequence in its natural order, on every rank: the inverse of `split_sequence`.

    Shape:     (.., sequence / n, ..) -> (.., sequence, ..), or x itself if n = 1.
    Called by: every rank along `dim`, in the same program order.
    Gradient:  requires `grad`, which is "slice" or "reduce_scatter", as in `mesh.functional.all_gather`.
    Raises:    ShapeError if x cannot have this order; AutogradError for a missing or unknown `grad`.
    """
    axis = normal_axis(x, axis, lambda: f'gather_sequence along "{dim}" on {mesh.label}')
    n = mesh.size(dim)
    # Called for its checks, before anything is sent.
    sequence_positions(x.shape[axis] * n, n, 0, order)
    if n == 1:
        return x
    whole: Tensor
    if grad is None:
        whole = mesh.all_gather(dim, x, axis=axis)
    else:
        whole = mesh.functional.all_gather(dim, x, axis, grad=grad)
    return whole if order == "contiguous" else natural(whole, axis, n)


def natural(x: Tensor, axis: int, n: int) -> Tensor:
    """Return the sequence in its natural order, given its parts in zig-zag order, rank by rank."""
    first, second = x.unflatten(axis, (n, 2, -1)).unbind(axis + 1)
    return torch.cat([first, second.flip(axis)], axis).flatten(axis, axis + 1)


@outside_graphs
def ulysses_attention(
    mesh: Mesh,
    dim: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    by: ByHeads | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the full sequence, of which each rank along `dim` holds a part.

    The split changes from the sequence to the heads and back (Jacobs et al. 2023, "DeepSpeed Ulysses"). Each rank computes
    attention over the full sequence for 1/n of q's heads; n must divide the number of q's heads. If n does not divide the
    number of kv heads, kv heads are repeated up to the least common multiple, and the copies' gradients are summed.

    Arguments, callers and errors: as for `ring_attention`. k and v belong to q's sequence, in contiguous order.
    by:         computes attention over full sequences for this rank's heads instead of torch's function, for example with
                soft caps or sinks.
    Gradient:   exact, for this rank's q, k and v.
    Sent:       two all_to_all calls, one for q, k and v together and one for the result. Backward also runs two all_to_all
                calls.
    """
    call = Attention("ulysses_attention", mesh, dim, causal, "contiguous", scale, window, documents)
    q, k, v = call.checked(q, k, v, same_length=True)
    n, heads = call.n, q.shape[1]
    if heads % n:
        fit = " or ".join(str(size) for size in range(1, n) if heads % size == 0)
        raise ShapeError(
            f"{call.where}: the heads cannot be divided among the ranks",
            given=f"{heads} heads in q, {n} ranks along {dim}",
            expected=f"a multiple of {n} heads; {heads} % {n} = {heads % n}",
            hint=f"use {fit} along {dim}, or ring_attention, which supports any number of heads",
        )
    k, v = (x.repeat_interleave(lcm(k.shape[1], n) // k.shape[1], 1) for x in (k, v))
    # One exchange for all three: the heads of q, k and v for a rank are adjacent.
    packed = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2).flatten(1, 2)
    packed = mesh.functional.all_to_all(dim, packed, 1, 2)
    q, k, v = packed.split([heads // n, k.shape[1] // n, k.shape[1] // n], 1)
    mine = slice(mesh.coord(dim) * q.shape[1], (mesh.coord(dim) + 1) * q.shape[1])
    out = call.whole(q, k, v) if by is None else by(q, k, v, mine)
    return mesh.functional.all_to_all(dim, out, 2, 1)


@final
class ContextSplit:
    """The mesh dim along which the sequence is split. If `dim` is None or its size is 1, nothing is split.

    Args:
        dim: a dim of the mesh, or a merged dim.
        attention: how ranks attend to each other's tokens.

    size, coord: the dim's size and this rank's coord.
    order: how tokens are placed on ranks. The ring uses "zigzag", which balances causal attention.
    Ulysses uses "contiguous", because it is balanced in any order.
    """

    def __init__(self, mesh: Mesh, dim: str | None, attention: AttentionKind = "ring") -> None:
        if attention not in get_args(AttentionKind):
            raise UnsupportedOp(
                f"{attention!r} is not a kind of attention over a split sequence",
                given=f"attention={attention!r}",
                expected='attention="ring" or attention="ulysses"',
                hint='attention="ring", which supports any number of heads',
            )
        self.mesh, self.dim, self.attention = mesh, dim or "", attention
        self.order: Order = "zigzag" if attention == "ring" else "contiguous"
        self.size, self.coord = (mesh.size(dim), mesh.coord(dim)) if dim else (1, 0)

    def positions(self, seq_len: int) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of this length: int64 (sequence / size,), ascending.

        Raises: ShapeError if the sequence cannot be split.
        """
        return sequence_positions(seq_len, self.size, self.coord, self.order, self.mesh.device)

    def split(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's tokens of x, which all ranks hold in full. See `split_sequence`."""
        return x if self.size == 1 else split_sequence(x, axis, self.mesh, self.dim, self.order)

    def gather(self, x: Tensor, axis: int, *, grad: GatherGrad | None = None) -> Tensor:
        """The inverse of `split`, on every rank. See `gather_sequence`."""
        return x if self.size == 1 else gather_sequence(x, axis, self.mesh, self.dim, self.order, grad=grad)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        by: ByHeads | None = None,
    ) -> Tensor:
        """Compute attention of this rank's queries over the full sequence. See `ring_attention`, `ulysses_attention`.

        Shape:  q (batch, heads, sequence / size, head), k and v (batch, kv heads, sequence / size, head)
                -> like q. If nothing is split, this is torch's scaled_dot_product_attention.
        window: with causal, the largest number of keys that a query attends to, ending with its own. If None, a query
                attends to all earlier keys.
        by:     as for `ulysses_attention`. Ring attention raises UnsupportedOp, because no rank has the full sequence.
        In a call that `documents.within` wraps, a query attends only to keys of its own document.
        """
        documents = current_documents()
        if self.size == 1:
            if by is not None:
                return by(q, k, v, slice(0, q.shape[1]))
            check_window("attend", causal, window)
            call = Attention("attend", self.mesh, self.dim, causal, self.order, scale, window, documents)
            return call.whole(q, k, v)
        settings: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
        settings["documents"] = documents
        if self.attention == "ulysses":
            return ulysses_attention(self.mesh, self.dim, q, k, v, by=by, **settings)
        if by is not None:
            raise UnsupportedOp(
                f'ring attention along "{self.dim}" on {self.mesh.label} does not support a model\'s own attention',
                given="attention with custom code, for example with a soft cap or sinks",
                expected="causal attention with a scale and a sliding window",
                hint='parallel.options.attention = "ulysses", with which each rank has full sequences for some heads',
            )
        return ring_attention(self.mesh, self.dim, q, k, v, **settings)

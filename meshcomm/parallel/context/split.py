"""How a model's sequence is split, and attention over all of it: around a ring, or by splitting the heads (Ulysses)."""

from __future__ import annotations

from math import lcm
from typing import Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from meshcomm.comm.functional import GatherGrad
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import Attention, check_window, whole_attention
from meshcomm.parallel.context.order import (
    Order,
    gather_sequence,
    natural,
    sequence_positions,
    split_sequence,
    zigzag,
)
from meshcomm.parallel.context.ring import ring_attention
from meshcomm.transport.torch_private import outside_graphs

AttentionKind: TypeAlias = Literal["ring", "ulysses"]


@outside_graphs
def ulysses_attention(
    mesh: Mesh,
    dim: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    order: Order = "contiguous",
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the whole sequence, of which each rank along `dim` holds a part.

    The split changes from the sequence to the heads and back (Jacobs et al. 2023, "DeepSpeed Ulysses"): each rank
    attends with the whole sequence for its n-th part of q's heads, which n must divide. Where n does not divide the kv
    heads, each is repeated up to their least common multiple; its gradients are summed.

    Arguments, who calls and errors: as for `ring_attention`; k and v are of q's sequence.
    Gradient:   exact, for this rank's q, k, v.
    Sent:       two all_to_all, of q, k and v together and of the result; two in backward.
    """
    call = Attention("ulysses_attention", mesh, dim, causal, order, scale, window)
    q, k, v = call.checked(q, k, v, same_length=True)
    n, heads = call.n, q.shape[1]
    if heads % n:
        fit = " or ".join(str(size) for size in range(1, n) if heads % size == 0)
        raise ShapeError(
            f"{call.where}: the heads cannot be shared out",
            given=f"{heads} heads in q, {n} ranks along {dim}",
            expected=f"a multiple of {n} heads; {heads} % {n} = {heads % n}",
            hint=f"{fit} along {dim}, or ring_attention, which takes any number of heads",
        )
    k, v = (x.repeat_interleave(lcm(k.shape[1], n) // k.shape[1], 1) for x in (k, v))
    # One exchange for all three: each rank's heads of q, k and v stand together.
    packed = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2).flatten(1, 2)
    packed = mesh.functional.all_to_all(dim, packed, 1, 2)
    reorder = causal and order == "zigzag" and n > 1
    if reorder:
        packed = natural(packed, 2, n)
    q, k, v = packed.split([heads // n, k.shape[1] // n, k.shape[1] // n], 1)
    out = call.whole(q, k, v)
    if reorder:
        out = zigzag(out, 2, n)
    return mesh.functional.all_to_all(dim, out, 2, 1)


@final
class ContextSplit:
    """Along which dim of the mesh the sequence is split; None, or a dim of size 1, splits nothing.

    Args:
        dim: one dim of it, or a merged one.
        attention: how ranks attend to each other's tokens.
        order: of the tokens on the ranks. None: "zigzag" for the ring, where it balances causal
            attention, "contiguous" for Ulysses, which is balanced by itself.

    size, coord: of the dim. order: that of the tokens.
    """

    def __init__(
        self,
        mesh: Mesh,
        dim: str | None,
        attention: AttentionKind = "ring",
        *,
        order: Order | None = None,
    ) -> None:
        if attention not in get_args(AttentionKind):
            raise UnsupportedOp(
                f"there is no attention {attention!r} over a split sequence",
                given=f"attention={attention!r}",
                expected='attention="ring" or attention="ulysses"',
                hint='attention="ring", which takes any number of heads',
            )
        self.mesh, self.dim, self.attention = mesh, dim or "", attention
        self.order: Order = order or ("zigzag" if attention == "ring" else "contiguous")
        self.size, self.coord = (mesh.size(dim), mesh.coord(dim)) if dim else (1, 0)
        # For its checks of the order.
        self.positions(2 * self.size)

    def positions(self, seq_len: int) -> Tensor:
        """The positions of this rank's tokens in a sequence of that length: int64 (sequence / size,), ascending.

        Raises: ShapeError where the sequence cannot be split.
        """
        return sequence_positions(seq_len, self.size, self.coord, self.order).to(self.mesh.device)

    def split(self, x: Tensor, axis: int) -> Tensor:
        """This rank's tokens of an x that all hold whole. See `split_sequence`."""
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
    ) -> Tensor:
        """Attention of this rank's queries over the whole sequence. See `ring_attention`, `ulysses_attention`.

        Shape:  q (batch, heads, sequence / size, head), k and v (batch, kv heads, sequence / size, head)
                -> like q. Where nothing is split it is torch's scaled_dot_product_attention.
        window: with causal, keys that a query meets at most, its own the last; None: all before it.
        """
        if self.size == 1:
            check_window("attend", causal, window)
            return whole_attention(q, k, v, causal, scale, window)
        attend = ring_attention if self.attention == "ring" else ulysses_attention
        return attend(
            self.mesh, self.dim, q, k, v, causal=causal, order=self.order, scale=scale, window=window
        )

"""One object that says how a model's sequence is split, and attends over all of it."""

from __future__ import annotations

from typing import Literal, TypeAlias, final, get_args

from torch import Tensor

from meshcomm.comm.functional import GatherGrad
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import check_window, whole_attention
from meshcomm.parallel.context.order import Order, gather_sequence, sequence_positions, split_sequence
from meshcomm.parallel.context.ring import ring_attention
from meshcomm.parallel.context.ulysses import ulysses_attention

AttentionKind: TypeAlias = Literal["ring", "ulysses"]


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
        self.mesh = mesh
        self.dim = dim or ""
        self.attention = attention
        self.order: Order = order or ("zigzag" if attention == "ring" else "contiguous")
        self.size = mesh.size(dim) if dim else 1
        self.coord = mesh.coord(dim) if dim else 0
        # For its checks of the order.
        self.positions(2 * self.size)

    def positions(self, sequence: int) -> Tensor:
        """Where this rank's tokens stand in a sequence of that length: int64 (sequence / size,), ascending.

        Raises: ShapeError where the sequence cannot be split.
        """
        return sequence_positions(sequence, self.size, self.coord, self.order).to(self.mesh.device)

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

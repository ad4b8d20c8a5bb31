"""Classes that the modules of a user get when they are split, to compute on this rank's part.

Objects stay, so names, hooks, shared modules and attributes stay. Only the class changes, to one made
from the module's own (as fully_shard does it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.parallel.tensor.layers import held
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.split import TensorSplit


class SharedEntry:
    """`split.enter`, once for all column-parallel layers that read the same tensor.

    Siblings share one. It keeps its last input until the module around them returns, so the same object
    is the same input, unless it was written to in between.
    """

    def __init__(self, split: TensorSplit) -> None:
        self._split = split
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        self._state: tuple[int, bool] = (0, False)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` behind `enter`."""
        if torch.compiler.is_compiling():
            return self._split.enter(x)
        state = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._entered is None or x is not self._given or state != self._state:
            self._given, self._state = x, state
            self._entered = self._split.enter(x)
        return self._entered

    def clear(self) -> None:
        """Forget the tensor: the module around the layers has returned."""
        self._given = self._entered = None


class Around:
    """A module whose own forward reads this rank's part of each parameter, which all others read as DTensor; and
    whose arguments or result change where it begins and ends, by `split.enter` and the like.

    Not by hooks: torch.compile would compile each layer anew, as every hook has another number.
    """

    meshcomm_split: TensorSplit
    meshcomm_computes = False
    meshcomm_enter: tuple[int | str, ...] = ()
    meshcomm_gather: tuple[int | str, ...] = ()
    meshcomm_scatter = False
    meshcomm_axis: int | None = None
    meshcomm_shared: SharedEntry | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        """The forward of the module's own class, between the changes of its arguments and result."""
        split, outer = self.meshcomm_split, self.meshcomm_computes
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(named)
        for key in (*self.meshcomm_enter, *self.meshcomm_gather):
            if not isinstance(given.get(key), Tensor):
                raise ShapeError(
                    f"a {type(self).__name__} was called without the argument that its plan names",
                    given=f"{len(args)} arguments by place" + "".join(f", {name}" for name in named),
                    expected=f"a tensor as argument {key!r}",
                    hint='"args": [0] for the first by place, "args": ["hidden_states"] for one by name',
                )
        for key in self.meshcomm_enter:
            given[key] = split.enter(given[key])
        for key in self.meshcomm_gather:
            given[key] = split.gather(given[key], self.meshcomm_axis)
        args = tuple(given[place] for place in range(len(args)))
        self.meshcomm_computes = True
        try:
            y = super().forward(*args, **{name: given[name] for name in named})  # type: ignore[misc]
        finally:
            self.meshcomm_computes = outer
            if self.meshcomm_shared is not None and not torch.compiler.is_compiling():
                self.meshcomm_shared.clear()
        if not self.meshcomm_scatter:
            return y
        if isinstance(y, tuple):
            return (split.scatter(y[0], self.meshcomm_axis), *y[1:])
        return split.scatter(y, self.meshcomm_axis)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, DTensor) and self.__dict__.get("meshcomm_computes"):
            return local(value)
        return value


class Attention:
    """nn.MultiheadAttention of which each rank computes num_heads / ranks heads.

    query, key, value and the result are whole, or split along the sequence, as around any column and
    row. Of the weights only their mean over all heads is known; without need_weights=False they are
    computed, as in torch. With sequence_parallel no gradient flows through them.
    """

    meshcomm_split: TensorSplit
    meshcomm_entry: Callable[[Tensor], Tensor]
    out_proj: nn.Module
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    training: bool

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention, for (batch, sequence, width) or batch_first=False's order."""
        self._check(query, attn_mask is None and is_causal, need_weights and not average_attn_weights)
        split = self.meshcomm_split
        weight, bias = held(self, "in_proj_weight").chunk(3), held(self, "in_proj_bias")
        biases = [None] * 3 if bias is None else bias.chunk(3)
        q, k, v = (
            F.linear(self.meshcomm_entry(x), w, b)
            for x, w, b in zip((query, key, value), weight, biases, strict=True)
        )
        if not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        heads = self.num_heads // split.size, self.head_dim
        q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(q, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        averaged = None
        if need_weights:
            scores = q @ k.mT / self.head_dim**0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            averaged, y = weights.sum(1) / self.num_heads, weights @ v
            if split.sequence_parallel:
                # The modules around work on slices: which of its gradients would be summed is unknown.
                averaged = averaged.detach()
            averaged = split.mesh.functional.all_reduce(split.dim, averaged, grad="identity")
        else:
            # torch's is_causal is a hint about the mask, and needs the mask to be given.
            causal = is_causal and key_padding_mask is None
            y = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, causal)
        y = y.transpose(1, 2).flatten(2)
        out: Tensor = self.out_proj(y if self.batch_first else y.transpose(0, 1))
        return out, averaged

    def _check(self, query: Tensor, causal_alone: bool, weights_of_heads: bool) -> None:
        where = self.meshcomm_split.mesh.label
        if weights_of_heads:
            raise UnsupportedOp(
                "attention with split heads does not give the weights of each head",
                given="need_weights=True, average_attn_weights=False",
                expected="average_attn_weights=True, or no weights",
                hint="need_weights=False",
            )
        if query.ndim != 3:
            what, given = "with split heads cannot take this query", f"a query of shape {tuple(query.shape)}"
            expected, hint = "3 axes: batch, sequence and width", "query.unsqueeze(0) and batch_first=True"
        elif causal_alone:
            what, given = "was told is_causal without the mask", "is_causal=True, attn_mask=None"
            expected = "the mask as well: in torch is_causal only says what the mask is"
            hint = "attn_mask=nn.Transformer.generate_square_subsequent_mask(length)"
        else:
            return
        raise ShapeError(f"attention {what} on {where}", given=given, expected=expected, hint=hint)

    def _mask(self, q: Tensor, attn: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores of this rank's heads."""
        split = self.meshcomm_split
        if attn is not None and attn.ndim == 3:
            # (batch * all heads, ...): this rank's heads of each sample.
            attn = attn.unflatten(0, (-1, self.num_heads)).chunk(split.size, 1)[split.coord]
        found = None
        for mask in (attn, None if padding is None else padding[:, None, None]):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
            found = mask.to(q.dtype) if found is None else found + mask.to(q.dtype)
        return found

"""What would a pattern do, on any mesh and shape? Answered without a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index

from meshcomm.errors import LayoutError, PatternError
from meshcomm.layout import Layout
from meshcomm.pattern.plan import plan
from meshcomm.pattern.recipe import Recipe


def explain_pattern(
    pattern: str,
    dims: Mapping[str, int] | Layout,
    /,
    shape: tuple[int, ...] | None = None,
    *,
    partial: str | None = None,
    **sizes: int,
) -> Recipe:
    """The steps that `mesh.rearrange(x, pattern, partial=partial, **sizes)` takes, as a value.

    Needs no process and no torch. Print it to read the steps.

    Args:
        pattern: see `Mesh.rearrange`.
        dims:    the mesh: name -> size, outermost first, or a Layout.
        shape:   of the local tensor on each rank. None: the steps without numbers; the pattern
                 must then be free of an ellipsis.
        partial: as for `Mesh.rearrange`.
        sizes:   lengths of axes, as for `Mesh.rearrange`.

    Raises PatternError; LayoutError where `dims` are no mesh.

    >>> print(explain_pattern("b s (cp h) d -> b (cp s) h d", {"dp": 2, "cp": 4}, (2, 8, 16, 4)))
    b s (cp h) d -> b (cp s) h d    on mesh cp=4
      cp: moves: slices are exchanged between all ranks along it
      step                                            axes          shape          each rank sends
      x                                               b s (cp h) d  (2, 8, 16, 4)
      all_to_all along cp, split axis 2, join axis 1  b (cp s) h d  (2, 32, 4, 4)  3 x 256 = 768
      sent by each rank: 768 elements, times the bytes of one
    """
    if not isinstance(dims, (Layout, Mapping)):
        raise LayoutError(
            "explain_pattern needs a mesh",
            given=f"dims: a {type(dims).__name__}",
            expected="name -> size, outermost first, or a Layout",
            hint='explain_pattern(pattern, {"dp": 2, "tp": 4})',
        )
    layout = dims if isinstance(dims, Layout) else Layout(dims)
    return plan(pattern, layout, None if shape is None else _lengths(shape), partial, tuple(sizes.items()))


def _lengths(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape as plain ints."""
    try:
        lengths = tuple(index(length) for length in shape)
    except TypeError:
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise PatternError(
            "rearrange: not a shape",
            given=f"shape={shape!r}",
            expected="the lengths of the local tensor's axes, whole numbers of 0 or more",
            hint="tuple(x.shape)",
        )
    return lengths

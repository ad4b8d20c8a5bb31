"""Which names of a pattern are dims of the mesh, how large are they, and may they meet?"""

from __future__ import annotations

from typing import TypeAlias

from meshcomm.layout import Layout
from meshcomm.pattern.parse import Pattern, fault, names_of

MeshDims: TypeAlias = tuple[tuple[str, int], ...]


def mesh_dims(layout: Layout) -> MeshDims:
    """Every name that the mesh gives a meaning, with its size; outermost (farthest apart) first.

    >>> mesh_dims(Layout({"dp": 2, "tp": 4}, merge={"all": ("tp", "dp")}))
    (('dp', 2), ('all', 8), ('tp', 4))
    """

    def reach(name: str) -> int:
        return max((size * stride for size, stride in layout.digits(name) if size > 1), default=0)

    return tuple((name, layout.size(name)) for name in sorted(layout.names, key=reach, reverse=True))


def check_apart(pattern: Pattern, layout: Layout) -> None:
    """No two dims of one pattern may say the same about a rank: "dp" and a merged dim that has dp,
    or a view's dim and a base dim that cut the same ranks. Raises PatternError."""
    known = set(layout.names)
    used = [n for n in dict.fromkeys(names_of(pattern.left) + names_of(pattern.right)) if n in known]
    for place, one in enumerate(used):
        for other in used[place + 1 :]:
            for size, stride in layout.digits(one).canonical():
                for other_size, other_stride in layout.digits(other).canonical():
                    apart = stride % (other_stride * other_size) == 0 or other_stride % (stride * size) == 0
                    if not apart:
                        raise fault(
                            pattern.text,
                            f'the dims "{one}" and "{other}" overlap: a rank\'s coords along them depend '
                            "on each other",
                            "dims that are independent, as the dims of one factorisation are",
                            f'one rearrange for "{one}" and another for "{other}"',
                        )

"""What do the calls along dims need of a mesh?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from meshcomm.comm.directory import Directory
from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Layout

# What is given comes back: a tensor, or a list of them. A tuple comes back as a list.
X = TypeVar("X", Tensor, list[Tensor], Sequence[Tensor])


class Along:
    """Who is where, and a communicator for each dim."""

    layout: Layout
    _at: Directory

    @property
    def label(self) -> str:
        """This rank with its coords, as in `rank 5 (pp=1 dp=0 tp=1)`."""
        raise NotImplementedError

    def _only_plain(self, call: str, **given: bool) -> None:
        for name, is_given in given.items():
            if is_given:
                raise UnsupportedOp(
                    f"{call} of a list on {self.label}: {name} has no effect",
                    given=f"a list of tensors and {name}",
                    expected=f"{name} beside a single tensor",
                    hint="one call for each tensor",
                )

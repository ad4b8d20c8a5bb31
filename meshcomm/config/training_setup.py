"""What the checks between the training sections ask: the sections, and the size of every part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshcomm.config.architecture import ModelConfig
from meshcomm.config.data import DataConfig
from meshcomm.config.mesh import MeshConfig
from meshcomm.config.parallel import ParallelConfig, Part
from meshcomm.config.problems import Broken
from meshcomm.config.train import TrainConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """The sections of a training file whose parts are all played by dims that exist.

    data: None where the file has no such section yet. broken: settings that are wrong by themselves.
    """

    mesh: MeshConfig
    parallel: ParallelConfig
    model: ModelConfig
    data: DataConfig | None
    train: TrainConfig
    broken: Broken

    def size(self, part: Part) -> int | None:
        """Ranks along a part's dim: 1 where no dim plays it, None where its size is open."""
        dim = self.parallel.parts.get(part)
        if dim is None:
            return 1
        view = self.parallel.expert_view(self.mesh.views) if part == "expert" else None
        size = (self.mesh.dims if view is None else self.mesh.views[view])[dim]
        return None if size < 1 else size

    def dim(self, part: Part) -> str:
        """The dim of a part that is played."""
        return self.parallel.parts[part]

    def key(self, part: Part) -> str:
        """The setting that holds the size of a part that is played."""
        view = self.parallel.expert_view(self.mesh.views) if part == "expert" else None
        return f"mesh.dims.{self.dim(part)}" if view is None else f"mesh.views.{view}.{self.dim(part)}"

    def given(self, parts: Iterable[Part]) -> str:
        """`, mesh.dims.dp = 2` for each of the parts that is played."""
        return "".join(f", {self.key(p)} = {self.size(p)}" for p in parts if p in self.parallel.parts)


def remainder(number: int, by: int) -> str:
    """The arithmetic as text.

    >>> remainder(8, 3)
    '8 % 3 = 2'
    """
    return f"{number} % {by} = {number % by}"


def shared(number: int, by: int) -> str:
    """What a number is for each of `by`, as text; the number alone where there is one.

    >>> shared(32, 2), shared(32, 1)
    ('32/2 = 16', '32')
    """
    return str(number) if by == 1 else f"{number}/{by} = {number // by}"

"""The training that a configuration describes, as its rules see it: sections, sizes of parts, and values that fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from meshcomm.config.mesh import MeshConfig
from meshcomm.config.parallel import PARTS, ParallelConfig, Part
from meshcomm.config.problems import Broken, Near, Problem, nearest
from meshcomm.config.section import Rule, Section, Table, rules_of, run
from meshcomm.config.train import DataConfig, TrainConfig
from meshcomm.config.write import toml

M = TypeVar("M", bound=Section)

# The rules that a kind of model brings.
DEMANDS: Final[dict[type, list[Rule]]] = defaultdict(list)


@dataclass(frozen=True, slots=True)
class Training:
    """The sections of a training file whose parts are all played by dims that exist.

    A rule of it needs settings by their paths (`"model.heads"`) and parts by their names (`"tensor"`): it is
    skipped where a setting is wrong by itself, a section is missing, or the size of a part is open.
    model: of any kind that `demand` knows. model, data: None where the file has no such section. broken: settings
    that are wrong by themselves.
    """

    mesh: MeshConfig
    parallel: ParallelConfig
    model: Any
    data: DataConfig | None
    train: TrainConfig
    broken: Broken

    def dim(self, part: Part) -> str:
        """The dim of a part that is played."""
        return self.parallel.parts[part]

    def key(self, part: Part) -> str:
        """The setting that holds the size of a part that is played."""
        view = self.parallel.expert_view(self.mesh.views) if part == "expert" else None
        return f"mesh.dims.{self.dim(part)}" if view is None else f"mesh.views.{view}.{self.dim(part)}"

    def open_size(self, part: Part) -> int | None:
        """Ranks along a part's dim: 1 where no dim plays it, None where its size is open."""
        dim = self.parallel.parts.get(part)
        if dim is None:
            return 1
        view = self.parallel.expert_view(self.mesh.views) if part == "expert" else None
        size = (self.mesh.dims if view is None else self.mesh.views[view])[dim]
        return None if size < 1 else size

    def size(self, part: Part) -> int:
        """As `open_size`, for a rule that needs the part."""
        size = self.open_size(part)
        assert size is not None, f"a rule asks for the size of {part}, which it does not need"
        return size

    def problems(self) -> Iterator[Problem]:
        """What the rules find, each with the nearest values that fit."""
        rules = [rule for rule in (*self._demands(), *rules_of(Training)) if self._judged(rule)]
        for rule in rules:
            for problem in run([rule], self, Broken(), self._written):
                tries = [way for each in problem.tries for way in self._ways(each, rules)]
                yield replace(problem, tries=tries)

    def _demands(self) -> Iterator[Rule]:
        for kind in type(self.model).__mro__:
            yield from DEMANDS.get(kind, ())

    def _judged(self, rule: Rule) -> bool:
        return not self.broken.touches(*(need for need in rule.needs if need not in PARTS)) and all(
            (self.open_size(need) if need in PARTS else getattr(self, need.partition(".")[0])) is not None
            for need in rule.needs
        )

    def _written(self, need: str) -> str:
        """A setting, or the size of a part; nothing for a part that is not played."""
        if need in PARTS:
            return f"{self.key(need)} = {self.size(need)}" if need in self.parallel.parts else ""
        section, _, key = need.partition(".")
        return f"{key} = {toml(getattr(getattr(self, section), key))}"

    def _ways(self, way: str | Near, rules: Iterable[Rule]) -> list[str]:
        """A way out as text: of a setting, the values that none of `rules` refuses, nor a rule of its own section."""
        if isinstance(way, str):
            return [way]
        section, *path = way.setting.split(".")
        value = getattr(self, section)
        needs = {way.setting, *(part for part in self.parallel.parts if self.key(part) == way.setting)}
        concerned = [rule.check for rule in rules if needs.intersection(rule.needs)]
        own = [rule.check for rule in rules_of(type(value)) if path[0] in rule.needs]
        before = [problem.what for check in own for problem in check(value)]

        def fits(number: int) -> bool:
            other = self._with(section, path, number)
            changed = getattr(other, section)
            return not any(True for check in concerned for _ in check(other)) and all(
                problem.what in before for check in own for problem in check(changed)
            )

        for part in path:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return [f"{way.setting} = {n}" for n in nearest(value, fits, way.most, way.within)]

    def _with(self, section: str, path: list[str], value: int) -> Training:
        """The same training with another value of one setting."""
        old = getattr(self, section)
        changed: Any = value
        for depth in range(len(path) - 1, 0, -1):
            holder: Any = getattr(old, path[0])
            for part in path[1:depth]:
                holder = holder[part]
            changed = Table({**holder, path[depth]: changed})
        return replace(self, **{section: old.model_copy(update={path[0]: changed})})


def demand(
    model: type[M], *needs: str
) -> Callable[[Callable[[Training, M], Iterable[Problem]]], Callable[[Training, M], Iterable[Problem]]]:
    """Make a function a rule of every training of this kind of model; needs as of Training."""

    def added(
        check: Callable[[Training, M], Iterable[Problem]],
    ) -> Callable[[Training, M], Iterable[Problem]]:
        DEMANDS[model].append(Rule(needs, (), lambda training: check(training, training.model)))
        return check

    return added

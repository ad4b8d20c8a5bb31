"""Converts between the tensors in a folder and the parameters of a transformers model.

The library describes each conversion with name patterns and operations, such as stacking the experts of a layer. If the
operations only concatenate tensors, the tensors are read slice by slice. Otherwise, the library's own operations run on
full tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, final

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from meshcomm.models.hf import Whole
from meshcomm.models.weights import Source


@final
class Conversion:
    """The conversions of one model."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def sources(self, names: Iterable[str]) -> dict[str, Source]:
        """Return the source of each parameter in a folder whose tensors have these names."""
        module: Any = self._whole.module
        transforms = get_model_conversion_mapping(module)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        shapes = module.state_dict()
        of: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, shapes)
            of[target][pattern].append(name)
        found: dict[str, Source] = {}
        for target, lying in of.items():
            pattern = next(iter(lying))
            if pattern is None:
                found[target] = Source(lying[None][0])
                continue
            converter = next(each for each in converters if pattern in each.source_patterns)
            found |= _converted(module, target, converter, {key or "": names for key, names in lying.items()})
        return found

    def stored(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the tensors, by name, that store a parameter in a model folder. If a tensor combines several
        parameters, the parameter keeps its name, which from_pretrained can also read.
        """
        module: Any = self._whole.module
        try:
            found: dict[str, Tensor] = revert_weight_conversion(module, {name: value})
        except Exception:
            return {name: value}
        return found


def _converted(module: Any, target: str, converter: Any, lying: Mapping[str, list[str]]) -> dict[str, Source]:
    """Return the source of each result of a converter. lying: the converter's patterns -> names in the folder."""
    rows = [lying.get(pattern, []) for pattern in converter.source_patterns]
    kinds = [(type(each), getattr(each, "dim", 0)) for each in converter.operations]
    if kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return {target: Source(tuple(zip(*rows, strict=True)))}
    names = tuple(name for row in rows for name in row)
    first = converter.target_patterns[0]
    targets = [target, *(target.replace(first, each) for each in converter.target_patterns[1:])]
    sizes = {pattern: len(each) for pattern, each in zip(converter.source_patterns, rows, strict=True)}
    convert = partial(_convert, module, target, converter, sizes)
    return {each: Source((names,), convert=partial(convert, each)) for each in targets}


def _convert(
    module: Any, target: str, converter: Any, sizes: Mapping[str, int], wanted: str, tensors: list[Tensor]
) -> Tensor:
    fresh, left = deepcopy(converter), iter(tensors)
    fresh.collected_tensors = defaultdict(
        list, {pattern: [next(left) for _ in range(size)] for pattern, size in sizes.items() if size}
    )
    made: dict[str, Any] = fresh.convert(target, model=module, config=module.config)
    found = made[wanted]
    value: Tensor = found[0] if isinstance(found, list) else found
    return value

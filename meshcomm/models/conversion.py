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
)

from meshcomm.models.hf import Whole
from meshcomm.models.weights import Source
from meshcomm.transfer.naming import reverted


@final
class Conversion:
    """The conversions of one model."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def sources(self, names: Iterable[str]) -> dict[str, Source]:
        """Return the source of each parameter in a folder whose tensors have these names."""
        module: Any = self._whole.module
        transforms = get_model_conversion_mapping(module)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        shapes = module.state_dict()
        names_of: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, shapes)
            names_of[target][pattern].append(name)
        sources: dict[str, Source] = {}
        for target, lying in names_of.items():
            pattern = next(iter(lying))
            if pattern is None:
                sources[target] = Source(lying[None][0])
                continue
            converter = next(candidate for candidate in converters if pattern in candidate.source_patterns)
            sources |= _converted(
                module, target, converter, {key or "": names for key, names in lying.items()}
            )
        return sources

    def stored(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the tensors, by name, that store a parameter in a model folder."""
        return reverted(self._whole.module, name, value)


def _converted(module: Any, target: str, converter: Any, lying: Mapping[str, list[str]]) -> dict[str, Source]:
    """Return the source of each result of a converter. lying: the converter's patterns -> names in the folder."""
    rows = [lying.get(pattern, []) for pattern in converter.source_patterns]
    kinds = [(type(operation), getattr(operation, "dim", 0)) for operation in converter.operations]
    if kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return {target: Source(tuple(zip(*rows, strict=True)))}
    names = tuple(name for row in rows for name in row)
    first = converter.target_patterns[0]
    targets = [target, *(target.replace(first, pattern) for pattern in converter.target_patterns[1:])]
    sizes = {pattern: len(row) for pattern, row in zip(converter.source_patterns, rows, strict=True)}
    convert = partial(_convert, module, target, converter, sizes)
    return {result: Source((names,), convert=partial(convert, result)) for result in targets}


def _convert(
    module: Any, target: str, converter: Any, sizes: Mapping[str, int], wanted: str, tensors: list[Tensor]
) -> Tensor:
    fresh, unused = deepcopy(converter), iter(tensors)
    fresh.collected_tensors = defaultdict(
        list, {pattern: [next(unused) for _ in range(size)] for pattern, size in sizes.items() if size}
    )
    results: dict[str, Any] = fresh.convert(target, model=module, config=module.config)
    result = results[wanted]
    value: Tensor = result[0] if isinstance(result, list) else result
    return value

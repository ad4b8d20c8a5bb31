"""Does each layer split evenly along the tensor's dim?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshcomm.config.nearest import nearest
from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup


def tensor_problems(setup: Setup) -> Iterator[Problem]:
    """Heads, inner elements and the vocabulary that the tensor's dim does not divide."""
    size, model = setup.size("tensor"), setup.model
    if size is None or "tensor" not in setup.parallel.parts:
        return
    dim = setup.dim("tensor")
    known = [name for name in ("heads", "kv_heads", "ff") if not setup.broken.touches(f"model.{name}")]
    numbers: dict[str, int] = {name: getattr(model, name) for name in known}
    split = [*numbers.values(), model.vocabulary]
    smaller = [f"mesh.dims.{dim} = {n}" for n in nearest(size, lambda n: all(x % n == 0 for x in split))]
    fits: dict[str, Callable[[int], bool]] = {
        "heads": lambda n: n % size == 0 and n % model.kv_heads == 0 and model.width % (2 * n) == 0,
        "kv_heads": lambda n: n % size == 0 and model.heads % n == 0,
        "ff": lambda n: n % size == 0,
    }
    for name, number in numbers.items():
        if number % size:
            yield Problem(
                f"model.{name}",
                f"{name} is not divisible by {dim}: {number} % {size} = {number % size}",
                given=f"{name} = {number}, mesh.dims.{dim} = {size}",
                expected=f"{name} divisible by mesh.dims.{dim}",
                hint=either([*smaller, *(f"model.{name} = {n}" for n in nearest(number, fits[name], 1))]),
            )
    if model.vocabulary % size:
        rest = model.vocabulary % size
        yield Problem(
            f"mesh.dims.{dim}",
            f"the {model.vocabulary} bytes are not divisible by {dim}: {model.vocabulary} % {size} = {rest}",
            given=f"{dim} = {size}",
            expected=f"a divisor of {model.vocabulary}",
            hint=either(smaller),
        )

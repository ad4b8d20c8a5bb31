"""Are there experts, and do they split evenly along the expert's dim?"""

from __future__ import annotations

from collections.abc import Iterator

from meshcomm.config.nearest import nearest
from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup, remainder
from meshcomm.config.wording import toml


def expert_problems(setup: Setup) -> Iterator[Problem]:
    """A dim for experts that a model does not have, or has in a number that it does not divide."""
    size, model = setup.size("expert"), setup.model
    if "expert" not in setup.parallel.parts or setup.broken.touches("model.experts"):
        return
    dim = setup.dim("expert")
    if not model.experts:
        some = nearest(8, lambda n: size is None or n % size == 0, 1) if size and 8 % size else [8]
        yield Problem(
            "parallel.expert",
            "no effect: the model has no experts",
            given=f"expert = {toml(dim)}, experts = 0",
            expected="model.experts of 1 or more",
            hint=either([*(f"model.experts = {n}" for n in some), "remove parallel.expert"]),
        )
    elif size is not None and model.experts % size:
        fewest = model.experts_per_token
        yield Problem(
            "model.experts",
            f"experts is not divisible by {dim}: {remainder(model.experts, size)}",
            given=f"experts = {model.experts}, {setup.key('expert')} = {size}",
            expected=f"equally many experts for each of the {size} ranks along {dim}",
            hint=either(
                f"model.experts = {n}"
                for n in nearest(model.experts, lambda n: n % size == 0 and n >= fewest)
            ),
        )

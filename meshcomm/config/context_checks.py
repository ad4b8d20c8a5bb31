"""Do a sample's tokens, and the heads that attend to them, split evenly along the context's dim?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshcomm.config.nearest import nearest
from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup, remainder, shared
from meshcomm.config.wording import toml


def context_problems(setup: Setup) -> Iterator[Problem]:
    """Tokens and heads that the dims of context and tensor do not divide."""
    context, tensor = setup.size("context"), setup.size("tensor")
    if context is None:
        return
    if setup.data is not None and not setup.broken.touches("data.sequence"):
        yield from _tokens(setup, setup.data.sequence, context, tensor)
    ulysses = setup.parallel.attention == "ulysses" and context > 1 and tensor is not None
    if ulysses and not setup.broken.touches("model.heads", "model.kv_heads", "parallel.attention"):
        yield from _heads(setup, context, tensor or 1)


def _tokens(setup: Setup, sequence: int, context: int, tensor: int | None) -> Iterator[Problem]:
    parallel = setup.parallel
    ring = parallel.attention == "ring" and not setup.broken.touches("parallel.attention")
    lines = 1 if not parallel.sequence_parallel or tensor is None else tensor

    def fits(sequence: int, context: int) -> bool:
        chunks = context * (2 if ring and context > 1 else 1)
        return sequence % chunks == 0 and sequence // context % lines == 0

    sequences = [f"data.sequence = {n}" for n in nearest(sequence, lambda n: fits(n, context))]
    if context > 1 and sequence % (context * (2 if ring else 1)):
        dim = setup.dim("context")
        by = context * (2 if ring else 1)
        yield Problem(
            "data.sequence",
            f"not divisible by {'2*' if ring else ''}{dim}: {remainder(sequence, by)}",
            given=f"sequence = {sequence}{setup.given(['context'])}, attention = {toml(parallel.attention)}",
            expected="two chunks of equal length for each rank, one early and one late: zig-zag"
            if ring
            else f"equally many tokens for each of the {context} ranks along {dim}",
            hint=either(
                [
                    *sequences,
                    *(f"mesh.dims.{dim} = {n}" for n in nearest(context, lambda n: fits(sequence, n), 1)),
                ]
            ),
        )
    elif sequence // context % lines:
        dim, mine = setup.dim("tensor"), sequence // context
        quotient = "" if context == 1 else f"{shared(sequence, context)}, "
        yield Problem(
            "data.sequence",
            f"a rank's tokens are not divisible by {dim}: {quotient}{remainder(mine, lines)}",
            given=f"sequence = {sequence}{setup.given(['context', 'tensor'])}, sequence_parallel = true",
            expected=f"equally many tokens for each of the {lines} ranks along {dim}",
            hint=either([*sequences, "parallel.sequence_parallel = false"]),
        )


def _heads(setup: Setup, context: int, tensor: int) -> Iterator[Problem]:
    model, dim = setup.model, setup.dim("context")
    heads, kv_heads = model.heads, model.kv_heads
    if heads % tensor or kv_heads % tensor:
        return  # reported with the tensor's dim

    def even(kv_heads: int, context: int) -> bool:
        mine = kv_heads // tensor
        return kv_heads % tensor == 0 and (mine % context == 0 or context % mine == 0)

    def whole(heads: int, kv_heads: int, context: int) -> bool:
        grouped = heads % kv_heads == 0 and model.width % (2 * heads) == 0
        return grouped and heads % (tensor * context) == 0 and even(kv_heads, context)

    dims = nearest(context, lambda n: whole(heads, kv_heads, n), 1)
    ways = [*(f"mesh.dims.{dim} = {n}" for n in dims), 'parallel.attention = "ring"']

    def others(name: str, number: int, fits: Callable[[int], bool]) -> list[str]:
        return [f"model.{name} = {n}" for n in nearest(number, fits, 1)]

    given = f"heads = {heads}, kv_heads = {kv_heads}{setup.given(['tensor', 'context'])}"
    given += ', attention = "ulysses"'
    quotient = "" if tensor == 1 else f"{shared(heads, tensor)}, "
    if heads // tensor % context:
        yield Problem(
            "model.heads",
            f"a rank's heads are not divisible by {dim}: {quotient}{remainder(heads // tensor, context)}",
            given=given,
            expected=f"equally many heads for each of the {context} ranks along {dim}, which exchange tokens "
            "for heads",
            hint=either([*others("heads", heads, lambda n: whole(n, kv_heads, context)), *ways]),
        )
    elif not even(kv_heads, context):
        mine = kv_heads // tensor
        quotient = "" if tensor == 1 else f"{shared(kv_heads, tensor)}, "
        yield Problem(
            "model.kv_heads",
            f"neither a rank's kv_heads nor {dim} divides the other: {quotient}{remainder(mine, context)}, "
            f"{remainder(context, mine)}",
            given=given,
            expected=f"equally many for each of the {context} ranks along {dim}, or each on equally many of them",
            hint=either([*others("kv_heads", kv_heads, lambda n: whole(heads, n, context)), *ways]),
        )

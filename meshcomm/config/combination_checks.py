"""Which parts and settings cannot be had together, and why?"""

from __future__ import annotations

from collections.abc import Iterator

from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup
from meshcomm.config.wording import toml, whole_toml


def combination_problems(setup: Setup) -> Iterator[Problem]:
    """Settings that are right by themselves and cannot be had together."""
    parallel, train = setup.parallel, setup.train
    if parallel.shard is not None and parallel.expert is not None:
        whole = (
            f"name {parallel.shard} in parallel.data, not in parallel.shard"
            if parallel.data is None
            else f"one dim for the ranks of {parallel.data} and {parallel.shard}, in parallel.data"
        )
        yield Problem(
            "parallel.shard",
            "cannot shard beside parallel.expert: experts lie along the dims of another view and would need one "
            "of those to shard along",
            given=f"shard = {toml(parallel.shard)}, expert = {toml(parallel.expert)}",
            expected="one of them",
            hint=either([whole, "remove parallel.expert: all experts on every rank, sharded as all weights"]),
        )
    yield from _order(setup)
    split_backward = parallel.pipeline is not None and parallel.schedule == "zero_bubble"
    broken = setup.broken.touches("parallel.schedule", "train.compile")
    if train.compile and split_backward and (setup.size("pipeline") or 2) > 1 and not broken:
        # torch 2.13 refuses modules from torch.compile here; compiled in place, the backward graph
        # ran twice for each micro-batch, once for the inputs and once for the weights.
        yield Problem(
            "train.compile",
            "cannot compile for zero_bubble: a compiled block's backward pass is one piece, and this schedule "
            "runs the halves for inputs and weights at different times",
            given=f"compile = true, schedule = {toml(parallel.schedule)}",
            expected="one of them",
            hint=either(["train.compile = false", 'parallel.schedule = "interleaved_1f1b"']),
        )


def _order(setup: Setup) -> Iterator[Problem]:
    """Hybrid sharding beside tensor parallelism takes a slice of the mesh, in the mesh's order."""
    parallel, dims = setup.parallel, setup.mesh.dims
    data, shard = parallel.data, parallel.shard
    if data is None or shard is None or parallel.tensor is None or data == shard:
        return
    order = list(dims)
    if order.index(data) < order.index(shard):
        return
    swapped = {data: shard, shard: data}
    mended = {swapped.get(dim, dim): dims[swapped.get(dim, dim)] for dim in order}
    yield Problem(
        "parallel.shard",
        f"{shard} stands before {data} in mesh.dims: torch takes copies of shards with tensor parallelism only "
        "from dims in the mesh's own order, copies first",
        given=f"mesh.dims = {toml(dims)}, data = {toml(data)}, shard = {toml(shard)}",
        expected=f"{data} before {shard}",
        hint=either(
            [
                f"mesh.dims = {whole_toml(mended)}",
                f"parallel.data = {toml(shard)} and parallel.shard = {toml(data)}",
            ]
        ),
    )

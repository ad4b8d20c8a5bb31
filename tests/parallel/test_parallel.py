"""Layers, gradients and stages in parallel, against the same thing on one process.

float64 throughout: what is left of a difference is the order of additions, a few 1e-15, so 1e-12
leaves room and no real mistake fits into it.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import meshcomm
from meshcomm.config import MeshConfig, ModelConfig, load
from meshcomm.errors import LayoutError, ShapeError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import (
    Accumulate,
    ColumnParallel,
    GradientSync,
    Pipelined,
    RowParallel,
    Stage,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    cross_entropy,
    local,
    split_layers,
    whole,
)
from meshcomm.parallel.compose import sections
from meshcomm.parallel.splits import Splits
from meshcomm.testing import Pool
from meshcomm.train.model import Transformer, initialise


def cpu(**dims: int) -> MeshConfig:
    return MeshConfig(dims=dims, device="cpu", timeout_s=30.0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-12, atol=1e-13)


# -- tensor ---------------------------------------------------------------------------------------


def part(mesh: Mesh, x: Tensor, axis: int) -> Tensor:
    return x.chunk(mesh.size("tp"), axis)[mesh.coord("tp")]


def linear_layers() -> None:
    with meshcomm.init(cpu(tp=4)) as mesh:
        split = TensorSplit(mesh, "tp", torch.float64)
        full, x = randn(12, 8).requires_grad_(), randn(3, 5, 8, seed=1).requires_grad_()
        upstream = randn(3, 5, 12, seed=2)
        expected = x @ full.mT
        expected.backward(upstream)

        column = ColumnParallel(split, 8, 12)
        assign(column.weight, full)
        assert isinstance(column.weight, DTensor)
        assert column.weight.placements == (Shard(0),)
        assert column.weight.shape == (12, 8)
        mine = x.detach().requires_grad_()
        y = column(split.enter(mine))
        close(y, part(mesh, expected, -1))
        y.backward(part(mesh, upstream, -1))
        close(mine.grad, x.grad)
        close(whole(cast(Tensor, column.weight.grad)), full.grad)

        row = RowParallel(split, 8, 12)
        assign(row.weight, full)
        assert isinstance(row.weight, DTensor)
        assert row.weight.placements == (Shard(1),)
        mine = part(mesh, x.detach(), -1).requires_grad_()
        y = row(mine)
        close(y, expected)
        y.backward(upstream)
        close(mine.grad, part(mesh, cast(Tensor, x.grad), -1))
        close(whole(cast(Tensor, row.weight.grad)), full.grad)


def embedding() -> None:
    with meshcomm.init(cpu(tp=4)) as mesh:
        split = TensorSplit(mesh, "tp", torch.float64)
        table = randn(16, 6).requires_grad_()
        ids = torch.tensor([[0, 3, 4, 15], [7, 8, 8, 0]])
        upstream = randn(2, 4, 6, seed=1)
        expected = table[ids]
        expected.backward(upstream)
        layer = VocabParallelEmbedding(split, 16, 6)
        assign(layer.weight, table)
        y = layer(ids)
        close(y, expected)
        y.backward(upstream)
        close(whole(cast(Tensor, layer.weight.grad)), table.grad)


def loss_of_split_logits() -> None:
    with meshcomm.init(cpu(tp=4)) as mesh:
        split = TensorSplit(mesh, "tp", torch.float64)
        targets = torch.tensor([[0, 5, 15], [4, 11, 8]])
        plain = randn(2, 3, 16)
        huge = plain * 1e4
        peak = plain.clone()
        peak[..., 7] = 1e300
        flat = torch.full((2, 3, 16), -1e8, dtype=torch.float64)
        never = plain.clone()
        never[..., 1:4] = -torch.inf
        for logits in (plain, huge, peak, flat, never, plain - 1e12):
            logits = logits.clone().requires_grad_()
            expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (expected * 3).backward()
            mine = part(mesh, logits.detach(), -1).requires_grad_()
            loss = cross_entropy(split, mine, targets)
            close(loss, expected)
            (loss * 3).backward(retain_graph=True)
            close(mine.grad, part(mesh, cast(Tensor, logits.grad), -1))
            (loss * 3).backward()  # what was saved for backward is still what it was
            close(mine.grad, part(mesh, 2 * cast(Tensor, logits.grad), -1))


@pytest.mark.parametrize("check", [linear_layers, embedding, loss_of_split_logits])
def test_split_layers_give_the_outputs_and_every_gradient_of_one_process(
    pool: Pool, check: Callable[[], None]
) -> None:
    pool.run(check, ranks=4)


def indivisible() -> None:
    with meshcomm.init(cpu(tp=4)) as mesh:
        split = TensorSplit(mesh, "tp")
        with pytest.raises(ShapeError) as caught:
            ColumnParallel(split, 8, 10)
        assert str(caught.value) == (
            'axis 0 of a weight of shape (10, 8) cannot be split along "tp"\n'
            "  given:    10, and 4 ranks along tp\n"
            "  expected: a multiple of 4; 10 % 4 = 2\n"
            "  try:      12, or a smaller tp"
        )


def test_a_weight_that_does_not_divide_is_refused(pool: Pool) -> None:
    pool.run(indivisible, ranks=4)


MODEL = ModelConfig(layers=2, width=32, heads=8, kv_heads=4, ff=48)


def whole_model() -> None:
    with meshcomm.init(cpu(tp=4)) as mesh:
        tokens, targets = torch.randint(256, (2, 3, 10), generator=torch.Generator().manual_seed(3))
        stage = Stage(0, 1, range(2))
        found: list[dict[str, Tensor]] = []
        for dim in (None, "tp"):
            split = TensorSplit(mesh, dim, torch.float64)
            model = Transformer(Splits.of(split), MODEL, stage, 10)
            initialise(model, MODEL.layers, seed=5)
            loss = cross_entropy(split, model(tokens), targets)
            loss.backward()
            found.append({"loss": loss})
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor) == (dim is not None)
                if dim is not None and name.endswith("norm.weight"):
                    assert cast(DTensor, parameter).placements == (Replicate(),)
                    # Replicate is a promise that nobody keeps for us: ranks must agree bit by bit.
                    grads = mesh.all_gather(dim, local(cast(Tensor, parameter.grad)).unsqueeze(0))
                    assert all(torch.equal(grad, grads[0]) for grad in grads)
                found[-1][name] = whole(parameter)
                found[-1][name + ".grad"] = whole(cast(Tensor, parameter.grad))
        one, split_four = found
        assert list(one) == list(split_four)
        assert len(one) == 1 + 2 * (2 * 9 + 3)
        for name, expected in one.items():
            close(split_four[name], expected)


def test_a_split_transformer_has_the_loss_and_every_gradient_of_one_process(pool: Pool) -> None:
    pool.run(whole_model, ranks=4)


# -- data -----------------------------------------------------------------------------------------


class Recorder:
    """A mesh whose all_reduce along any dim only notes when it was started and waited for."""

    def __init__(self, size: int = 2) -> None:
        self.events: list[str] = []
        self._size = size

    def size(self, dims: str) -> int:
        return self._size

    def broadcast(self, dims: str, xs: list[Tensor], *, src: int) -> None:
        self.start = [x.numel() for x in xs]

    def all_reduce(self, dims: str, x: Tensor, op: str, *, async_op: bool) -> Any:
        assert async_op and op == "avg"
        self.events.append(f"send {x.numel()}")
        return self

    def wait(self) -> None:
        self.events.append("wait")


def chain(recorder: Recorder) -> nn.Sequential:
    """Four layers of 10 elements each that note when backward is through them."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)), nn.Linear(3, 1, bias=False))
    for index, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, i=index: recorder.events.append(f"layer {i}"))
    return model


def test_buckets_are_sent_in_order_while_backward_runs() -> None:
    recorder = Recorder()
    model = chain(recorder)
    # 80 bytes: two weights of 9 float32 elements; the last layer's 3 fit beside two of them.
    sync = GradientSync(cast(Mesh, recorder), "dp", model, microbatches=2, bucket_mb=84e-6)
    assert sync.buckets == [["4.weight", "3.weight", "2.weight"], ["1.weight", "0.weight"]]
    sync.start()
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert not [event for event in recorder.events if event.startswith("send")]
    recorder.events.clear()
    model(x).sum().backward()
    assert recorder.events.index("send 21") < recorder.events.index("layer 0")
    assert [event for event in recorder.events if event.startswith("send")] == ["send 21", "send 18"]
    sync.finish()
    assert recorder.events[-2:] == ["wait", "wait"]


def test_a_parameter_larger_than_a_bucket_has_its_own_and_dtypes_do_not_mix() -> None:
    parameters = [
        ("a", nn.Parameter(torch.zeros(2))),
        ("b", nn.Parameter(torch.zeros(100))),
        ("c", nn.Parameter(torch.zeros(2, dtype=torch.float64))),
        ("d", nn.Parameter(torch.zeros(2))),
        ("frozen", nn.Parameter(torch.zeros(2), requires_grad=False)),
        ("e", nn.Parameter(torch.zeros(2))),
    ]
    sync = GradientSync(cast(Mesh, Recorder()), "dp", parameters, microbatches=1, bucket_mb=20e-6)
    assert sync.buckets == [["e", "d"], ["c"], ["b"], ["a"]]


@pytest.mark.parametrize(("dims", "size"), [(None, 2), ("dp", 1)])
def test_nothing_is_sent_where_there_is_nobody_to_send_to(dims: str | None, size: int) -> None:
    recorder = Recorder(size)
    model = chain(recorder)
    sync = GradientSync(cast(Mesh, recorder), dims, model)
    sync.start()
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    sync.finish()
    assert not [event for event in recorder.events if not event.startswith("layer")]


def test_what_goes_wrong_within_a_step_is_named() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sync = GradientSync(
        cast(Mesh, Recorder()),
        "dp",
        [("used", used), ("layers.3.unused", unused)],
    )
    with pytest.raises(TrainingError, match="backward reached used outside of a step"):
        used.sum().backward()
    sync.start()
    used.sum().backward()
    with pytest.raises(TrainingError, match="backward reached used 2 times in one step"):
        used.sum().backward()
    with pytest.raises(TrainingError) as caught:
        sync.finish()
    assert str(caught.value) == (
        "1 of 2 parameters got no gradient\n"
        "  given:    layers.3.unused\n"
        "  expected: every parameter of the model to take part in the loss\n"
        "  try:      remove them, use them in forward, or set requires_grad = False"
    )
    sync.start()
    (used.sum() + unused.sum()).backward()
    used.grad = torch.zeros(2)
    with pytest.raises(TrainingError, match="grad of used was replaced during the step"):
        sync.finish()


def gradient_sums() -> None:
    with meshcomm.init(cpu(dp=2, tp=2)) as mesh:
        split = TensorSplit(mesh, "tp", torch.float64)
        layers = nn.ModuleList([ColumnParallel(split, 4, 6), RowParallel(split, 6, 4)])
        weights = [randn(6, 4, seed=1), randn(4, 6, seed=2)]
        for layer, weight in zip(layers, weights, strict=True):
            assign(cast(Tensor, layer.weight), weight)
        odd = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        sync = GradientSync(
            mesh,
            "dp",
            [*layers.named_parameters(), ("odd", odd)],
            op="sum",
            microbatches=2,
            bucket_mb=120e-6,
        )
        assert sync.buckets == [["odd", "1.weight"], ["0.weight"]]
        for step in range(2):  # the second one starts from zero again
            batch = randn(4, 4, seed=10 + step)
            plain = [weight.clone().requires_grad_() for weight in weights]
            (batch @ plain[0].mT @ plain[1].mT).square().sum().backward()
            sync.start()
            for index, x in enumerate(batch.chunk(2)[mesh.coord("dp")].split(1)):
                loss = layers[1](layers[0](split.enter(x))).square().sum()
                # A parameter that not every microbatch uses is summed all the same.
                (loss + odd.sum() if index == 1 else loss).backward()
            sync.finish()
            for layer, expected in zip(layers, plain, strict=True):
                close(whole(cast(Tensor, layer.weight.grad)), expected.grad)
            close(odd.grad, torch.full((3,), 2.0, dtype=torch.float64))


def test_gradients_are_the_sum_over_the_whole_batch(pool: Pool) -> None:
    pool.run(gradient_sums, ranks=4)


def test_a_model_that_is_dropped_goes_with_its_gradients() -> None:
    """The garbage collector does not see what a parameter's hook leads to."""
    model = nn.Linear(3, 1)
    sync = GradientSync(cast(Mesh, Recorder()), "dp", model)
    with sync:
        model(torch.ones(2, 3)).sum().backward()
    grad = weakref.ref(model.weight.grad)
    model_ref = weakref.ref(model.weight)
    del model, sync
    gc.collect()
    assert model_ref() is None and grad() is None


def beside_ddp() -> None:
    """Three steps of one loop, with DDP's wrapper and with GradientSync, from weights that differ between ranks."""
    with meshcomm.init(cpu(dp=2)) as mesh:
        torch.manual_seed(mesh.rank)  # as DDP does, coord 0's weights and buffers are taken
        ours = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        theirs = DistributedDataParallel(copy.deepcopy(ours), process_group=mesh.group("dp"))
        sync = GradientSync(mesh, "dp", ours)
        states = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs)]
        for step in range(3):
            x = randn(4, 3, seed=10 * step + mesh.rank)
            with sync:
                ours(x).square().mean().backward()
            states[1].zero_grad()
            theirs(x).square().mean().backward()
            for state in states:
                state.step()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            close(mine, other)
            assert len({str(each) for each in mesh.objects.all_gather("dp", mine.tolist())}) == 1, name


def test_a_loop_written_for_ddp_trains_the_same(pool: Pool) -> None:
    pool.run(beside_ddp, ranks=2)


def test_another_operation_and_an_exception_within_a_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(TrainingError, match="op='mean'"):
        GradientSync(cast(Mesh, Recorder()), "dp", [("weight", weight)], op="mean")
    recorder = Recorder()
    sync = GradientSync(cast(Mesh, recorder), "dp", [("weight", weight)])
    assert recorder.start == [2]
    with pytest.raises(ZeroDivisionError), sync:
        raise ZeroDivisionError
    with pytest.raises(TrainingError, match="outside of a step"):
        weight.sum().backward()
    with sync:
        weight.sum().backward()
    assert recorder.events == ["send 2", "wait"]


# -- pipeline -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (5, 4, [1, 2, 1, 1]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_layers_are_split_evenly_and_the_last_stage_gets_no_extra(
    layers: int, stages: int, expected: list[int]
) -> None:
    parts = split_layers(layers, stages)
    assert [len(part) for part in parts] == expected
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 layers cannot fill 4 pipeline stages"):
        split_layers(3, 4)


def stages() -> None:
    with meshcomm.init(cpu(pp=4)) as mesh:
        weights = [randn(5, 5, seed=seed) for seed in range(4)]
        inputs = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(1))
        targets = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(2))

        def layer(index: int) -> nn.Module:
            made = (
                nn.Linear(5, 5, bias=False, dtype=torch.float64)
                if index
                else nn.Embedding(5, 5, dtype=torch.float64)
            )
            assign(made.weight, weights[index])
            return made

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

        one = nn.Sequential(*(layer(index) for index in range(4)))
        expected = Accumulate(one, loss, 3)(inputs, targets)
        close(expected, loss(one(inputs), targets))
        tokens, hidden = (2, 3), (2, 3, 5)

        def pipelined(module: nn.Module, schedule: Any, microbatches: int) -> Pipelined:
            return Pipelined(
                mesh,
                "pp",
                module,
                loss,
                microbatches=microbatches,
                schedule=schedule,
                shapes=(tokens, hidden, hidden),
                dtype=torch.float64,
            )

        mine = layer(mesh.coord("pp"))
        run = pipelined(mine, "gpipe", 3)
        for again in (1, 2):  # gradients of the second batch are added
            found = run(inputs, targets)
            if mesh.coord("pp") == 3:
                close(found, expected)
            else:
                assert found is None
            reference = cast(Tensor, one[mesh.coord("pp")].weight.grad)
            close(next(mine.parameters()).grad, again * reference)
        with pytest.raises(LayoutError) as caught:
            pipelined(mine, "1f1b", 3)
        assert str(caught.value) == (
            "3 microbatches cannot fill a 1f1b pipeline of 4 stages\n"
            "  given:    3 microbatches per step, 4 ranks along pp\n"
            "  expected: at least 4 microbatches\n"
            '  try:      a smaller microbatch, a larger global batch, or schedule = "gpipe"'
        )


def test_stages_give_the_loss_and_gradients_of_one_process(pool: Pool) -> None:
    pool.run(stages, ranks=4)


class Wall(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ShapeError("a wall", given="a tensor")


def failing_stage() -> None:
    # The other stage waits for gradients that never come, as long as the mesh allows.
    with meshcomm.init(MeshConfig(dims={"pp": 2}, device="cpu", timeout_s=2.0)) as mesh:
        last = mesh.coord("pp") == 1
        run = Pipelined(
            mesh,
            "pp",
            Wall() if last else nn.Embedding(5, 5),
            lambda logits, targets: logits.sum(),
            microbatches=2,
            schedule="1f1b",
            shapes=((1, 3), (1, 3, 5), (1, 3, 5)),
            dtype=torch.float32,
        )
        batch = torch.zeros(2, 3, dtype=torch.int64)
        # torch wraps what a stage raises; whoever trains sees the stage's own error.
        with pytest.raises(ShapeError if last else RuntimeError, match="^a wall" if last else "."):
            run(batch, batch)


def test_what_a_stage_raises_is_not_wrapped(pool: Pool) -> None:
    pool.run(failing_stage, ranks=2)


# -- composition ----------------------------------------------------------------------------------


def other_dims() -> None:
    config = load(
        {
            "mesh": {"dims": {"dp": -1, "tp": 2}, "device": "cpu"},
            "parallel": {"data": "dp", "tensor": "tp"},
            "model": {"layers": 1, "width": 8, "heads": 2, "kv_heads": 2, "ff": 8},
            "data": {"sequence": 8},
            "train": {"steps": 1, "global_batch": 4, "microbatch": 1},
        }
    )
    with meshcomm.init(config) as mesh:
        assert sections(mesh, config).model.width == 8
        with pytest.raises(LayoutError) as caught:
            sections(mesh, load(config, ["mesh.dims={ dp = 4, tp = 1 }"]))
        assert str(caught.value) == (
            "the mesh was opened with other dims than this configuration has\n"
            "  given:    an open mesh of { dp = 2, tp = 2 }, mesh.dims = { dp = 4, tp = 1 }\n"
            "  expected: the configuration that the mesh was opened with\n"
            "  try:      meshcomm.config.load(config, ['mesh.dims={ dp = 2, tp = 2 }'])"
        )
        with pytest.raises(meshcomm.MeshcommError, match="describes a mesh and no training"):
            sections(mesh, load({"mesh": {"dims": {"dp": 2, "tp": 2}}}))
        with pytest.raises(meshcomm.MeshcommError, match="not divisible by dp: 5 % 2 = 1"):
            sections(mesh, load(config, ["train.global_batch=5"]))


def test_the_configuration_must_be_the_one_of_the_open_mesh(pool: Pool) -> None:
    pool.run(other_dims, ranks=4)

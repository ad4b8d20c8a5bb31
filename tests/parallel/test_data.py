"""Gradient sync against one process and against DDP, and errors within a step."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import meshcomm
from meshcomm.config import MeshConfig
from meshcomm.errors import CallMismatchError, RankFailed, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import ColumnParallel, GradientSync, RowParallel, TensorSplit, assign, whole
from meshcomm.testing import Pool
from tests.parallel.same import close, randn


def cpu(**dims: int) -> MeshConfig:
    return MeshConfig(dims=dims, device="cpu", timeout_s=30.0)


class Recorder:
    """A mesh whose all_reduce only records when it was started and when it was waited for."""

    def __init__(self, size: int = 2) -> None:
        self.events: list[str] = []
        self._size = size
        self.objects = self

    def all_gather(self, dims: str, obj: Any) -> list[Any]:
        return [obj] * self._size

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
    """Four layers of 9 weights and one of 3 that record when backward has passed them."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)), nn.Linear(3, 1, bias=False))
    for index, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, i=index: recorder.events.append(f"layer {i}"))
    return model


def sync_of_parameters(mesh: Mesh, changes: Callable[[list[tuple[str, nn.Parameter]]], object]) -> None:
    parameters = [(name, nn.Parameter(torch.zeros(2))) for name in "abc"]
    if mesh.rank == 1:
        changes(parameters)
    GradientSync(mesh, "dp", parameters, broadcast=False)


@pytest.mark.parametrize(
    ("changes", "theirs", "ours"),
    [
        (lambda them: them.reverse(), "parameter 1: c, float32 (2,)", "parameter 1: a, float32 (2,)"),
        (lambda them: them.pop(), "only 2 parameters", "parameter 3: c, float32 (2,)"),
        (
            lambda them: them[1][1].requires_grad_(False),
            "parameter 2: b, float32 (2,), frozen",
            "parameter 2: b, float32 (2,)",
        ),
    ],
)
def test_a_rank_that_synchronizes_other_parameters_is_named(changes: Any, theirs: str, ours: str) -> None:
    with pytest.raises(RankFailed) as found:
        meshcomm.simulate(sync_of_parameters, dims={"dp": 3}, device="cpu", args=(changes,))
    for error in found.value.by_rank.values():
        assert isinstance(error, CallMismatchError) and error.mismatched_ranks == (1,)
        assert error.what.startswith('ranks synchronize other gradients along "dp": rank 1 is mismatched;')
        assert (error.given, error.expected) == (f"rank 1: {theirs}", f"as ranks 0 2: {ours}")
    assert len(found.value.by_rank) == 3


def test_buckets_are_sent_in_order_while_backward_runs() -> None:
    recorder = Recorder()
    model = chain(recorder)
    # 84 bytes: two weights of 9 float32 elements, and the last layer's 3, fit into one bucket.
    sync = GradientSync(cast(Mesh, recorder), "dp", model, microbatches=2, bucket_mb=84e-6)
    assert sync.buckets == [["4.weight", "3.weight", "2.weight"], ["1.weight", "0.weight"]]
    sync.start()
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert not [event for event in recorder.events if event.startswith("send")]
    recorder.events.clear()
    model(x).sum().backward()
    first, second = recorder.events.index("send 21"), recorder.events.index("send 18")
    assert first < recorder.events.index("layer 1") < second
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
    with GradientSync(cast(Mesh, recorder), dims, model):
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
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
        "  expected: every parameter of the model to contribute to the loss\n"
        "  try:      remove them, use them in forward, or freeze them: requires_grad = False, or train.frozen; "
        "or GradientSync(..., zeros=True)"
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
        for step in range(2):  # the second step starts from zero again
            batch = randn(4, 4, seed=10 + step)
            plain = [weight.clone().requires_grad_() for weight in weights]
            (batch @ plain[0].mT @ plain[1].mT).square().sum().backward()
            sync.start()
            for index, x in enumerate(batch.chunk(2)[mesh.coord("dp")].split(1)):
                loss = layers[1](layers[0](split.enter(x))).square().sum()
                # A parameter that only some microbatches use is summed all the same.
                (loss + odd.sum() if index == 1 else loss).backward()
            sync.finish()
            for layer, expected in zip(layers, plain, strict=True):
                close(whole(cast(Tensor, layer.weight.grad)), expected.grad)
            close(odd.grad, torch.full((3,), 2.0, dtype=torch.float64))


def test_gradients_are_the_sum_over_the_whole_batch(pool: Pool) -> None:
    pool.run(gradient_sums, ranks=4)


def test_a_model_that_is_dropped_goes_with_its_gradients() -> None:
    """The garbage collector does not see the objects that a parameter's hook refers to."""
    model = nn.Linear(3, 1)
    sync = GradientSync(cast(Mesh, Recorder()), "dp", model)
    with sync:
        model(torch.ones(2, 3)).sum().backward()
    grad = weakref.ref(model.weight.grad)
    model_ref = weakref.ref(model.weight)
    del model, sync
    gc.collect()
    assert model_ref() is None and grad() is None


def compared_with_ddp() -> None:
    """Run three steps of one loop with DDP and with GradientSync, from weights that differ between ranks."""
    with meshcomm.init(cpu(dp=2)) as mesh:
        torch.manual_seed(mesh.rank)  # coord 0's weights and buffers are used, as with DDP
        ours = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        cast(Tensor, ours[1].running_mean).fill_(mesh.rank)
        theirs = DistributedDataParallel(copy.deepcopy(ours), process_group=mesh.group("dp"))
        sync = GradientSync(mesh, "dp", ours)
        assert not cast(Tensor, ours[1].running_mean).any()
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
    pool.run(compared_with_ddp, ranks=2)


class Following(nn.Module):
    """A module whose buffer follows the mean of the rank's samples, with one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 1)
        self.one.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.two(self.one(x - self.mean))
        return y


def following() -> None:
    """Train a module with a frozen layer and a buffer, and compare it with one process on all samples."""
    with meshcomm.init(cpu(dp=2)) as mesh:
        torch.manual_seed(0)
        alone = Following().double()
        torch.manual_seed(mesh.rank)
        ours = Following().double()
        sync = GradientSync(mesh, "dp", ours)
        alone.load_state_dict(ours.state_dict())
        for step in range(3):
            xs = [randn(4, 3, seed=10 * step + rank) for rank in range(2)]
            with sync:
                ours(xs[mesh.rank]).square().mean().backward()
            alone.zero_grad()
            mean = alone.mean
            for rank in (1, 0):  # coord 0's mean remains
                alone.mean = mean
                (alone(xs[rank]).square().mean() / 2).backward()
            for each in (ours, alone):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
            close(ours.mean, alone.mean)
            for (name, mine), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
                close(mine, other)
                assert len({str(each) for each in mesh.objects.all_gather("dp", mine.tolist())}) == 1, name


def test_buffers_and_frozen_parameters_follow_the_first_rank(pool: Pool) -> None:
    pool.run(following, ranks=2)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda module: module.float(), "two.weight, two.bias"),
        (lambda module: module.one.requires_grad_(True), "one.weight, one.bias"),
        (lambda module: module.two.bias.requires_grad_(False), "two.bias"),
        (lambda module: setattr(module, "three", nn.Linear(1, 2)), "three.weight, three.bias"),
        (lambda module: delattr(module, "two"), "two.bias, two.weight"),
    ],
    ids=["cast", "unfrozen", "frozen", "more", "fewer"],
)
def test_a_module_that_has_changed_since_is_refused(change: Any, names: str) -> None:
    module = Following().double()
    sync = GradientSync(cast(Mesh, Recorder()), "dp", module)
    with sync:
        module(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    change(module)
    with pytest.raises(TrainingError, match="changed since its GradientSync was created") as caught:
        sync.start()
    assert f"given:    {names}\n" in str(caught.value)
    GradientSync(cast(Mesh, Recorder()), "dp", module).start()


class Past(torch.optim.SGD):
    """An optimizer that changes parameters without autograd noticing, as many do."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


def test_a_second_step_before_the_first_one_is_used_is_refused() -> None:
    model = nn.Linear(3, 1)
    sync = GradientSync(cast(Mesh, Recorder()), "dp", model)

    def step(scale: float = 1.0) -> None:
        with sync:
            (model(torch.ones(2, 3)).sum() * scale).backward()

    step()
    with pytest.raises(TrainingError, match="before the previous step's gradients were used"):
        step()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), nn.Linear(2, 2)
    other.weight.grad = torch.ones(2, 2)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with pytest.raises(TrainingError, match="before the previous step's gradients were used"):
        step()
    optimizer.step()
    step()
    optimizer.zero_grad()  # dropped on purpose
    step()
    optimizer.zero_grad(set_to_none=False)
    step()
    Past(model.parameters(), lr=0.1).step()
    step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * cast(Tensor, parameter.grad)
    step(float("inf"))  # a loss scaler skips such a step
    step()
    sync.start()  # starts anew explicitly


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

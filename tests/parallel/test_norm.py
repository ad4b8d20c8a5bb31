"""The gradient norm over split parameters, against NumPy over whole gradients; clipping, against torch's in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import meshcomm
from meshcomm.errors import LayoutError, MeshClosed, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.tensor.parameters import local, parameter_of, whole
from meshcomm.testing import Pool

# Whole gradients of each of two stages: name -> (shape, axis split along each dim).
KINDS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "norm": ((7,), {}),
    "matrix": ((6, 8), {"tp": 1}),
    "sharded": ((8, 3), {"data": 0}),
    "both": ((8, 4), {"fsdp": 0, "tp": 1}),
    "expert": ((4, 3, 2), {"ep": 0, "tp": 2}),
    "tied": ((6, 4), {"tp": 0}),
}


def gradient(stage: int, name: str, dtype: torch.dtype) -> Tensor:
    """A random gradient. The tied weight's is the same on both stages."""
    seed = [list(KINDS).index(name), 0 if name == "tied" else stage]
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(KINDS[name][0])).to(dtype)


def expected_norm(dtype: torch.dtype = torch.float64) -> float:
    parts = [
        gradient(stage, name, dtype).double().numpy().ravel()
        for stage in (0, 1)
        for name in KINDS
        if (stage, name) != (1, "tied")
    ]
    return float(np.linalg.norm(np.concatenate(parts)))


def parameters(mesh: Mesh, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """This rank's parts of the parameters, with their gradients."""
    found = {}
    for name, (_, axes) in KINDS.items():
        value = gradient(mesh.coord("pp"), name, dtype)
        for dim, axis in axes.items():
            value = value.chunk(mesh.size(dim), axis)[mesh.coord(dim)]
        found[name] = parameter_of(mesh, torch.zeros_like(value), axes)
        found[name].grad = parameter_of(mesh, value.clone(), axes).detach()
    return found


def measured(mesh: Mesh, dtype: torch.dtype = torch.float64) -> tuple[float, float, bool]:
    """The norm, the norm after clipping to a third of it, and whether every gradient was scaled accordingly."""
    held, fresh = parameters(mesh, dtype), parameters(mesh, dtype)
    skip = [held["tied"]] if mesh.coord("pp") == 1 else []
    norm = GradientNorm(mesh, held.items(), pipeline="pp", skip=skip)
    before = norm.norm()
    norm.scale_(expected_norm() / 3, before)
    assert before.dtype == torch.float64 and before.shape == ()
    scale = expected_norm() / 3 / before.item()
    scaled = all(
        torch.allclose(local(held[name].grad), local(fresh[name].grad) * scale, rtol=1e-6)  # type: ignore[arg-type]
        for name in KINDS
    )
    return before.item(), norm.norm().item(), scaled


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"dp": 2, "tp": 1}, {"fsdp": 1}], ids=str)
def test_every_parameter_counts_once_and_is_added_up_in_float64(sizes: dict[str, int]) -> None:
    dims = {"pp": 2, "dp": 1, "fsdp": 2, "tp": 2} | sizes
    data = dims["dp"] * dims["fsdp"]
    views = {"expert": {"pp": 2, "edp": data // min(data, 2), "ep": min(data, 2), "tp": dims["tp"]}}
    for dtype, room in ((torch.float64, 1e-13), (torch.float32, 1e-14)):
        for before, after, scaled in meshcomm.simulate(
            measured, dims=dims, merge={"data": ["dp", "fsdp"]}, views=views, args=(dtype,)
        ):
            assert before == pytest.approx(expected_norm(dtype), rel=room)
            # torch.nn.utils.clip_grad_norm_ uses the same formula.
            clipped = expected_norm() * (expected_norm() / 3) / (expected_norm() + 1e-6)
            assert after == pytest.approx(clipped, rel=1e-13 if room == 1e-13 else 1e-6)
            assert scaled


def test_what_is_not_finite_is_returned_and_nothing_is_scaled() -> None:
    def program(mesh: Mesh, bad: float) -> tuple[float, list[float]]:
        parameter = parameter_of(mesh, torch.zeros(3), {"tp": 0})
        gradient = torch.tensor([1.0, 2.0, bad if mesh.rank == 1 else 3.0])
        parameter.grad = parameter_of(mesh, gradient, {"tp": 0}).detach()
        gradients = GradientNorm(mesh, [("weight", parameter)])
        norm = gradients.norm()
        gradients.scale_(0.1, norm)
        return norm.item(), gradient.tolist()

    for bad, check in ((math.inf, math.isinf), (math.nan, math.isnan)):
        results = meshcomm.simulate(program, dims={"tp": 2}, args=(bad,))
        assert all(check(norm) for norm, _ in results)
        assert results[0][1] == [1.0, 2.0, 3.0]
    # A small or zero norm leaves gradients unchanged. Frozen parameters do not count, and one with two names counts once.
    one, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    with meshcomm.init(dims={"tp": 1}, device="cpu") as mesh:
        for values in ([0.0, 0.0], [0.25, -0.5]):
            one.grad = torch.tensor(values)
            gradients = GradientNorm(mesh, [("one", one), ("frozen", frozen), ("again", one)])
            norm = gradients.norm()
            gradients.scale_(1.0, norm)
            assert norm.item() == math.hypot(*values)
            assert one.grad.tolist() == values


def test_mistakes_in_a_norm_are_named() -> None:
    def program(mesh: Mesh) -> None:
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 4))
        a.grad = torch.zeros(2)
        along = {name: parameter_of(mesh, torch.zeros(2), {name: 0}) for name in ("pp", "all")}
        with pytest.raises(TrainingError, match=r"1 of 2 parameters have no gradient.*\n.*head.weight"):
            GradientNorm(mesh, [("norm", a), ("head.weight", b)]).norm()
        with pytest.raises(LayoutError, match="1 of 1 in skip are not among"):
            GradientNorm(mesh, [("norm", a)], skip=[b])
        cold = GradientNorm(mesh, [("cold", b.requires_grad_(False))])
        b.requires_grad_(True)
        with pytest.raises(TrainingError, match="cold was unfrozen after GradientNorm was created"):
            cold.norm()
        for parameter in along.values():
            with pytest.raises(LayoutError, match="wq cannot be split along pp twice"):
                GradientNorm(mesh, [("wq", parameter)], pipeline="pp")

    meshcomm.simulate(program, dims={"pp": 2, "tp": 2}, merge={"all": ["pp", "tp"]})


# -- clip_grad_norm_ --------------------------------------------------------------------------------------

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}
ORDERS = (2.0, 1, math.inf, 3.0)


def net() -> nn.Sequential:
    """Two halves of four layers each, as two stages have. All in float64."""
    torch.manual_seed(3)
    layers = [nn.LayerNorm(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)]
    layers += [nn.LayerNorm(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)]
    return nn.Sequential(*layers).double()


def loss_of(output: Tensor) -> Tensor:
    return 9 * output.square().mean()


def one_process(order: float) -> tuple[float, list[Tensor]]:
    model = net()
    loss_of(model(X)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
    return norm.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def halves(model: nn.Sequential) -> list[nn.Sequential]:
    return [nn.Sequential(*model[:4]), nn.Sequential(*model[4:])]


def split(model: nn.Sequential, mesh: Mesh, plan: dict[str, object] = PLAN) -> None:  # type: ignore[assignment]
    for half in halves(model):
        parallelize_module(half, mesh["tp"], plan)  # type: ignore[arg-type]


def rows(mesh: Mesh) -> Tensor:
    return X.chunk(mesh.size("dp"))[mesh.coord("dp")]


def sharded(mesh: Mesh) -> nn.Module:
    model = net()
    split(model, mesh)
    for layer in model[4:]:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    loss_of(model(rows(mesh))).backward()
    return model


def averaged(mesh: Mesh) -> nn.Module:
    model = net()
    split(model, mesh)
    with meshcomm.GradientSync(mesh, "dp", model):
        loss_of(model(rows(mesh))).backward()
    return model


def plain(mesh: Mesh) -> nn.Module:
    """Split by meshcomm, and the same samples on all ranks: nothing is averaged."""
    model = net()
    plan = {"1": "column", "3": "row", "5": "column", "7": "row"}
    meshcomm.tensor_parallel(model, mesh, "tp", plan, example=(X,))
    loss_of(model(X)).backward()
    return model


def pending(mesh: Mesh) -> nn.Module:
    """torch's SequenceParallel leaves a norm's gradient as a pending sum along tp, along which the rows are split."""
    model = net()
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0)),
    }
    split(model, mesh, plan)
    mine = X.chunk(mesh.size("tp"))[mesh.coord("tp")]
    (loss_of(model(mine)) / mesh.size("tp")).backward()
    assert any(isinstance(p.grad, DTensor) and p.grad.placements != p.placements for p in model.parameters())  # type: ignore[attr-defined]
    return model


def on_meshes_of_torch(mesh: Mesh) -> nn.Module:
    """Half of the layers have copies along a dim, the others are split over all ranks, and a norm is not sharded."""
    model = net()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model[5], mesh=grid)
    every = init_device_mesh("cpu", (4,))
    fully_shard(model, mesh=every, ignored_params=set(model[4].parameters()))
    loss_of(model(X)).backward()
    return model


def clipped(make: Callable[[Mesh], nn.Module], orders: Sequence[float]) -> list[tuple[float, list[Tensor]]]:
    found = []
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        for order in orders:
            model = make(mesh)
            norm = meshcomm.clip_grad_norm_(model.parameters(), 0.5, order)
            grads = [parameter.grad for parameter in model.parameters()]
            whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
            found.append((norm.item(), [grad.clone() for grad in whole if grad is not None]))
    return found


@pytest.mark.parametrize("make", [sharded, averaged, plain, pending, on_meshes_of_torch])
def test_any_mixture_of_parameters_is_clipped_as_in_one_process(
    pool: Pool, make: Callable[[Mesh], nn.Module]
) -> None:
    for found in pool.run(clipped, make, ORDERS, ranks=4):
        for order, (norm, gradients) in zip(ORDERS, found, strict=True):
            expected, whole = one_process(order)
            assert expected > 0.5 and norm == pytest.approx(expected, rel=1e-12)
            for gradient, other in zip(gradients, whole, strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-15)


def a_stage_clipped(mesh: Mesh, order: float) -> tuple[float, list[Tensor]]:
    stage = mesh.coord("pp")
    model = net()
    split(model, mesh)
    first, second = halves(model)
    hidden = first(X).detach().requires_grad_()
    loss_of(second(hidden)).backward()
    if stage == 0:
        first(X).backward(hidden.grad)
    # The stages have another number of parameters. The last bias has another copy on the first stage.
    mine = [*first.parameters()] if stage == 0 else [*second.parameters()]
    copy = [nn.Parameter(torch.zeros(6, dtype=torch.float64))] if stage == 0 else []
    for parameter in copy:
        parameter.grad = second[3].bias.grad.full_tensor()
    norm = meshcomm.clip_grad_norm_(iter(mine + copy), 0.5, order, pipeline=mesh["pp"], skip=copy)
    grads = [parameter.grad for parameter in mine + copy]
    return norm.item(), [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]


@pytest.mark.parametrize("order", ORDERS)
def test_stages_of_a_pipeline_count_once(order: float) -> None:
    expected, whole = one_process(order)
    found = meshcomm.simulate(a_stage_clipped, dims={"pp": 2, "tp": 2}, args=(order,))
    for rank, (norm, gradients) in enumerate(found):
        assert norm == pytest.approx(expected, rel=1e-12)
        # 6 of the 12 gradients are of the first half; then comes the copy of the last one.
        for gradient, other in zip(
            gradients, [*whole[:6], whole[-1]] if rank < 2 else whole[6:], strict=True
        ):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_a_norm_that_is_not_finite_is_as_torchs(bad: float, order: float) -> None:
    def program(mesh: Mesh) -> tuple[float, list[float]]:
        parameter = parameter_of(mesh, torch.zeros(2), {"tp": 0})
        other = nn.Parameter(torch.zeros(()))
        other.grad = torch.tensor(5.0)
        gradient = torch.tensor([bad, 2.0] if mesh.rank == 1 else [3.0, 4.0])
        parameter.grad = parameter_of(mesh, gradient, {"tp": 0}).detach()
        both = [parameter, other]
        with pytest.raises(
            TrainingError, match=rf"not finite\n.*{bad}, of order {order:g}\n.*\n.*error_if_nonfin"
        ):
            meshcomm.clip_grad_norm_(both, 1.0, order, error_if_nonfinite=True)
        assert parameter.grad.full_tensor()[0] == 3.0
        norm = meshcomm.clip_grad_norm_(both, 1.0, order)
        return norm.item(), [*parameter.grad.full_tensor().tolist(), other.grad.item()]

    whole, five = (nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(())))
    whole.grad, five.grad = torch.tensor([3.0, 4.0, bad, 2.0]), torch.tensor(5.0)
    expected = nn.utils.clip_grad_norm_([whole, five], 1.0, order).item()
    values = [*whole.grad.tolist(), five.grad.item()]
    for norm, found in meshcomm.simulate(program, dims={"tp": 2}):
        assert norm == pytest.approx(expected, nan_ok=True) and found == pytest.approx(values, nan_ok=True)


def test_what_has_no_gradient_counts_nothing_and_what_is_complex_counts_by_its_size() -> None:
    def program(mesh: Mesh) -> None:
        value = torch.tensor([3 + 4j, 5j], dtype=torch.complex128)
        one, idle = nn.Parameter(value.clone()), parameter_of(mesh, torch.zeros(2), {"tp": 0})
        for order in ORDERS:
            one.grad = value.clone()
            assert meshcomm.clip_grad_norm_([idle, one], math.inf, order).item() == pytest.approx(
                value.norm(order).item(), rel=1e-14
            )
            assert torch.equal(one.grad, value)
        # A tensor alone, of which one rank has no gradient; and none at all.
        idle.grad = None if mesh.rank else parameter_of(mesh, torch.ones(2), {"tp": 0}).detach()
        assert meshcomm.clip_grad_norm_(idle, 1.0).item() == math.sqrt(2)
        assert meshcomm.clip_grad_norm_([], 1.0).item() == 0

    meshcomm.simulate(program, dims={"tp": 2})


def test_what_cannot_be_clipped_is_named(pool: Pool) -> None:
    for wrong in ({"max_norm": 0.0}, {"max_norm": math.nan}, {"max_norm": 1.0, "norm_type": -math.inf}):
        with pytest.raises(
            TrainingError, match=r"max_norm = .*, norm_type = .*\n  expected: more than 0\n.*math\.inf"
        ):
            meshcomm.clip_grad_norm_([], **wrong)
    pool.run(in_wrappers_of_torch, ranks=2)

    def program(mesh: Mesh) -> None:
        parameter = parameter_of(mesh, torch.zeros(2), {"pp": 0})
        parameter.grad = parameter_of(mesh, torch.ones(2), {"pp": 0}).detach()
        with pytest.raises(LayoutError, match="cannot be split along the pipeline dim too"):
            meshcomm.clip_grad_norm_([parameter], 1.0, pipeline=mesh["pp"])

    meshcomm.simulate(program, dims={"pp": 2})


def in_wrappers_of_torch() -> None:
    with meshcomm.init(dims={"dp": 1, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        split_too = DistributedDataParallel(model, device_mesh=mesh["tp"])
        flat = FullyShardedDataParallel(
            nn.Linear(4, 4),
            process_group=mesh.group("tp"),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        for module, name in (
            (split_too, "DistributedDataParallel after"),
            (flat, "FullyShardedDataParallel"),
        ):
            with pytest.raises(TrainingError, match=rf"do not record how.*\n.*{name}.*\n.*\n.*fully_shard"):
                meshcomm.clip_grad_norm_(module.parameters(), 1.0)


def test_arguments_of_other_types_and_gradients_that_are_not_summed_are_named() -> None:
    def program(mesh: Mesh) -> None:
        module = nn.Linear(4, 4)
        wrong: list[Any] = [None, module, dict(module.named_parameters()), module.named_parameters()]
        for parameters in wrong:
            with pytest.raises(TrainingError, match="takes parameters"):
                meshcomm.clip_grad_norm_(parameters, 1.0)
        pipeline: Any = "dp"
        with pytest.raises(TrainingError, match=r"pipeline='dp'"):
            meshcomm.clip_grad_norm_(module.parameters(), 1.0, pipeline=pipeline)
        text: Any = "one"
        with pytest.raises(TrainingError, match="max_norm = one"):
            meshcomm.clip_grad_norm_(module.parameters(), text)
        with meshcomm.GradientSync(mesh, "dp", module):
            module(torch.ones(2, 4)).sum().backward()
            with pytest.raises(TrainingError, match="before the gradients are summed"):
                meshcomm.clip_grad_norm_(module.parameters(), 1.0)
        meshcomm.clip_grad_norm_(module.parameters(), 1.0)

    meshcomm.simulate(program, dims={"dp": 2})


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_sparse_gradients_are_clipped_as_by_torch(order: float) -> None:
    def model() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(5, 3, sparse=True, dtype=torch.float64)

    def program(mesh: Mesh) -> None:
        ours, theirs = model(), model()
        for module in (ours, theirs):
            module(torch.tensor([1, 3, 1])).square().sum().backward()
        # torch's own function needs the entries of one index to be added up.
        assert theirs.weight.grad is not None
        theirs.weight.grad = theirs.weight.grad.to_dense()
        norm = meshcomm.clip_grad_norm_(ours.parameters(), 0.5, order)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, order))
        assert ours.weight.grad is not None
        torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad)

    meshcomm.simulate(program, dims={"dp": 2})


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_ranks_that_clip_differently_get_an_error(order: float) -> None:
    """Copies of a parameter would be scaled differently."""

    def program(mesh: Mesh) -> None:
        split, equal = parameter_of(mesh, torch.zeros(2), {"tp": 0}), nn.Parameter(torch.zeros(3))
        split.grad = parameter_of(mesh, torch.ones(2), {"tp": 0}).detach()
        equal.grad = torch.ones(3)
        with pytest.raises(TrainingError, match=r'ranks along "tp" clip(.|\n)*max_norm = '):
            meshcomm.clip_grad_norm_([split, equal], 2.0 if mesh.rank == 1 else 1.0, order)
        assert torch.equal(equal.grad, torch.ones(3))
        if mesh.rank == 2:
            equal.grad = None
        with pytest.raises(TrainingError, match="gradients of 1 parameters"):
            meshcomm.clip_grad_norm_([split, equal], 1.0, order)
        equal.grad = torch.ones(3)
        wanted = torch.ones(2 * mesh.size("tp") + 3).norm(order).item()
        assert meshcomm.clip_grad_norm_([split, equal], 1.0, order).item() == pytest.approx(wanted)

    meshcomm.simulate(program, dims={"tp": 4})


def closed() -> None:
    with meshcomm.init(dims={"tp": 2}, device="cpu", timeout_s=30) as mesh:
        parameter = parameter_of(mesh, torch.zeros(2), {"tp": 0})
        parameter.grad = parameter_of(mesh, torch.ones(2), {"tp": 0}).detach()
    for call in (lambda: meshcomm.clip_grad_norm_([parameter], 1.0), lambda: whole(parameter)):
        with pytest.raises(MeshClosed, match="split along a mesh that is closed"):
            call()


def test_parameters_of_a_closed_mesh_are_named(pool: Pool) -> None:
    pool.run(closed, ranks=2)

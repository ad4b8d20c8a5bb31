"""The gradient norm over split parameters, against NumPy over whole gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.errors import LayoutError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.tensor.parameters import local, parameter_of

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
    before = norm.clip_(expected_norm() / 3)
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
        norm = GradientNorm(mesh, [("weight", parameter)]).clip_(0.1)
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
            norm = GradientNorm(mesh, [("one", one), ("frozen", frozen), ("again", one)])
            assert norm.clip_(1.0).item() == math.hypot(*values)
            assert one.grad.tolist() == values


def test_mistakes_in_a_norm_are_named() -> None:
    def program(mesh: Mesh) -> None:
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 4))
        a.grad = torch.zeros(2)
        along = {name: parameter_of(mesh, torch.zeros(2), {name: 0}) for name in ("pp", "all")}
        with pytest.raises(TrainingError, match=r"1 of 2 parameters have no gradient.*\n.*head.weight"):
            GradientNorm(mesh, [("norm", a), ("head.weight", b)]).norm()
        with pytest.raises(TrainingError, match=r"given:    max_norm = 0\.0"):
            GradientNorm(mesh, [("norm", a)]).clip_(0.0)
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

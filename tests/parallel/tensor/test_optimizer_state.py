"""The state of an optimizer, gathered from a split module, loaded by plain torch in one process."""

from __future__ import annotations

import copy
import gc
import re
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import meshcomm
from meshcomm.errors import LayoutError, MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.parallel import (
    GradientSync,
    assign,
    load_unsplit_optimizer_state,
    load_unsplit_state,
    tensor_parallel,
    unsplit_optimizer_state,
    unsplit_state,
    whole,
)
from meshcomm.testing import Pool

PLAN: Any = {"qkv": "column:3", "out": "row", "up": "column", "down": "row"}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return cast(Tensor, self.down(self.up(x + self.out(q * k.tanh() + v)).relu()))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Tensor]:
    return list(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_mesh(kind: str, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Three steps on dp2 tp2, each coord along "dp" with its half of the batch."""
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu") as mesh:
        module = net()
        tensor_parallel(module, mesh, "tp", PLAN)
        sync = None
        if sharded:
            fully_shard(module, mesh=mesh["dp"])
        else:
            sync = GradientSync(mesh, "dp", module)
        made, settings = OPTIMIZERS[kind]
        groups = [{"params": list(module.qkv.parameters())}, {"params": other_parameters(module)}]
        optimizer = made(groups, **settings)
        for x in batches()[:3]:
            own = x.chunk(2)[mesh.coord("dp")]
            if sync is None:
                step(module, optimizer, own)
            else:
                with sync:
                    module(own).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return unsplit_state(module), unsplit_optimizer_state(module, optimizer)


def other_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in module.named_parameters() if not name.startswith("qkv")]


@pytest.mark.parametrize("sharded", [False, True], ids=["dp", "fsdp"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_plain_torch_goes_on_with_the_state_of_a_split_optimizer(
    pool: Pool, kind: str, sharded: bool
) -> None:
    module = net()
    made, settings = OPTIMIZERS[kind]

    def optimizer_of(module: Net) -> torch.optim.Optimizer:
        return made(
            [{"params": list(module.qkv.parameters())}, {"params": other_parameters(module)}], **settings
        )

    optimizer = optimizer_of(module)
    for x in batches()[:3]:
        step(module, optimizer, x)
    expected = copy.deepcopy(optimizer.state_dict())
    for weights, state in pool.run(on_mesh, kind, sharded, ranks=4):
        assert state["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(state["state"], expected["state"], rtol=1e-10, atol=1e-12)
        resumed = net()
        resumed.load_state_dict(weights)
        again = optimizer_of(resumed)
        again.load_state_dict(state)
        step(resumed, again, batches()[3])
    step(module, optimizer, batches()[3])
    torch.testing.assert_close(resumed.state_dict(), module.state_dict(), rtol=1e-10, atol=1e-12)


class Foreign(torch.optim.SGD):
    """An optimizer whose state is in its own tensors."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["moment"] = torch.zeros(3)


def refused(mesh: Mesh) -> str:
    module = net()
    tensor_parallel(module, mesh, "tp", PLAN)
    optimizer = Foreign(module.qkv.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(LayoutError) as caught:
        unsplit_optimizer_state(module, optimizer)
    return str(caught.value)


def created_before(mesh: Mesh) -> str:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tensor_parallel(module, mesh, "tp", PLAN)
    with pytest.raises(LayoutError) as caught:
        unsplit_optimizer_state(module, optimizer)
    return str(caught.value)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    for text in meshcomm.simulate(created_before, dims={"tp": 2}):
        assert "the optimizer has parameters that the module does not have" in text
        assert "after tensor_parallel and fully_shard" in text


def test_state_of_another_shape_is_refused_by_name() -> None:
    for text in meshcomm.simulate(refused, dims={"tp": 2}):
        assert "qkv.weight['moment'] in the optimizer's state" in text


class Odd(torch.optim.Optimizer):
    """An optimizer with state in containers, without axes, and of one dim less than the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad.ndim == 2:
                    grad = each.grad
                    nested = {"b": [grad * 2, (grad.sum(0), 3)], "a": grad.clone()}
                    self.state[each] = {"nested": nested, "norm": grad.norm(), "steps": 7}


def equal_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).double()


def orders(mesh: Mesh) -> list[tuple[list[int], dict[str, Any]]]:
    """Each optimizer gets the parameters in another order on each rank, and has the keys of its state in another order."""
    found = []
    for made in (Odd, torch.optim.AdamW):
        module = equal_layers()
        fully_shard(module, mesh=mesh["tp"])
        order = [0, 1, 2] if mesh.rank else [2, 0, 1]
        optimizer = made([cast(nn.Linear, module[i]).weight for i in order])
        module(batches()[0]).square().mean().backward()
        optimizer.step()
        if mesh.rank:
            for entries in optimizer.state.values():
                for key in sorted(entries):
                    entries[key] = entries.pop(key)
        found.append((order, unsplit_optimizer_state(module, optimizer)["state"]))
    return found


def test_ranks_may_give_the_optimizer_parameters_in_different_orders() -> None:
    for of_rank in meshcomm.simulate(orders, dims={"tp": 2}):
        for made, (order, state) in zip((Odd, torch.optim.AdamW), of_rank, strict=True):
            module = equal_layers()
            optimizer = made([cast(nn.Linear, module[i]).weight for i in order])
            module(batches()[0]).square().mean().backward()
            optimizer.step()
            torch.testing.assert_close(state, optimizer.state_dict()["state"], rtol=1e-12, atol=1e-14)


def caught(call: Any) -> str:
    with pytest.raises(MeshcommError) as found:
        call()
    return f"{type(found.value).__name__}: {found.value}"


def different(mesh: Mesh) -> list[str]:
    module = net()
    tensor_parallel(module, mesh, "tp", PLAN)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, batches()[0])
    # Calls are compared up to call 64.
    for _ in range(70):
        mesh.all_reduce("tp", torch.ones(1))
    if mesh.rank == 1:
        del optimizer.state[module.up.weight]["exp_avg"]
    texts = [caught(lambda: unsplit_optimizer_state(module, optimizer))]
    if mesh.rank == 1:
        optimizer.state[module.qkv.weight]["exp_avg"] = torch.zeros(3)
    texts.append(caught(lambda: unsplit_optimizer_state(module, optimizer)))
    if mesh.rank == 1:
        del module.down
    texts.append(caught(lambda: unsplit_state(module)))
    return texts


def test_different_state_is_an_error_on_every_rank() -> None:
    found: Any = meshcomm.simulate(different, dims={"tp": 4})
    for rank, (missing, failed, smaller) in enumerate(found):
        assert "the optimizer's state differs between ranks: rank 1 of 4 is mismatched" in missing
        assert "rank 1 without up.weight['exp_avg']: float64 (16, 8)" in missing
        assert "nothing says how qkv.weight['exp_avg']" in failed
        assert ("LayoutError" if rank == 1 else "MeshMismatchError: rank 1 could not gather") in failed
        assert "rank 1 without down." in smaller


class WithExtra(Net):
    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["calls"] == 3


def extra(mesh: Mesh) -> Any:
    torch.manual_seed(0)
    module = WithExtra().double()
    tensor_parallel(module, mesh, "tp", PLAN)
    return unsplit_state(module)


def test_extra_state_is_copied() -> None:
    torch.manual_seed(0)
    expected = WithExtra().double().state_dict()
    for state in meshcomm.simulate(extra, dims={"tp": 2}):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
        WithExtra().double().load_state_dict(state)


def transposed(mesh: Mesh) -> str:
    module = net()
    tensor_parallel(module, mesh, "tp", PLAN)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    weight = module.qkv.weight
    # A rank keeps the rows of q, k and v as (8, 3, 8).
    optimizer.state[weight]["moment"] = weight.detach().transpose(0, -1).contiguous()
    assert optimizer.state[weight]["moment"].shape == weight.shape
    return caught(lambda: unsplit_optimizer_state(module, optimizer))


def test_state_of_a_multi_part_weight_that_is_split_in_another_way_is_refused() -> None:
    for text in meshcomm.simulate(transposed, dims={"tp": 2}):
        assert "nothing says how qkv.weight['moment']" in text


def test_arguments_of_other_types_are_refused() -> None:
    module: Any = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(module.parameters())
    wrong: Any = [optimizer, None, module.state_dict()]
    for value in wrong:
        assert "the module is not an nn.Module" in caught(lambda value=value: unsplit_state(value))
        assert "the module is not" in caught(lambda value=value: unsplit_optimizer_state(value, optimizer))
    assert "is not a torch.optim.Optimizer" in caught(lambda: unsplit_optimizer_state(module, module))


def resumed(
    mesh: Mesh, kind: str, weights: dict[str, Tensor], state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A fourth step, on another mesh."""
    torch.manual_seed(7)
    module = Net().double()
    tensor_parallel(module, mesh, "tp", PLAN)
    if "fsdp" in mesh.dims:
        fully_shard(module, mesh=mesh["fsdp"])
    load_unsplit_state(module, weights)
    made, settings = OPTIMIZERS[kind]
    optimizer = made(
        [{"params": list(module.qkv.parameters())}, {"params": other_parameters(module)}], **settings
    )
    load_unsplit_optimizer_state(module, optimizer, state)
    step(module, optimizer, batches()[3])
    return unsplit_state(module), unsplit_optimizer_state(module, optimizer)


@pytest.mark.parametrize("dims", [{"tp": 2}, {"tp": 4}, {"fsdp": 3, "tp": 2}, {"fsdp": 2, "tp": 1}], ids=str)
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_split_module_goes_on_with_the_state_of_a_plain_one(kind: str, dims: dict[str, int]) -> None:
    module = net()
    made, settings = OPTIMIZERS[kind]
    optimizer = made(
        [{"params": list(module.qkv.parameters())}, {"params": other_parameters(module)}], **settings
    )
    for x in batches()[:3]:
        step(module, optimizer, x)
    weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(module, optimizer, batches()[3])
    for got, got_state in meshcomm.simulate(lambda mesh: resumed(mesh, kind, weights, state), dims=dims):
        torch.testing.assert_close(dict(got), dict(module.state_dict()), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            got_state["state"], optimizer.state_dict()["state"], rtol=1e-10, atol=1e-12
        )
        assert got_state["param_groups"] == optimizer.state_dict()["param_groups"]


class Versioned(Net):
    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            raise AssertionError("an old version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # type: ignore[no-untyped-call]


def versions(mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Versioned().double()
    tensor_parallel(module, mesh, "tp", PLAN)
    return unsplit_state(module)


def test_the_versions_of_modules_are_kept() -> None:
    for state in meshcomm.simulate(versions, dims={"tp": 2}):
        Versioned().double().load_state_dict(state)


def own_experts(mesh: Mesh) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranks along "fsdp" share a layer, and each of them has an expert of its own name, split along "tp"."""
    torch.manual_seed(0)
    module = nn.Module()
    module.shared = nn.Linear(8, 8)
    module.add_module(f"expert{mesh.coord('fsdp')}", nn.Linear(8, 8))
    fully_shard(module.shared, mesh=mesh["fsdp"])
    fully_shard(module.get_submodule(f"expert{mesh.coord('fsdp')}"), mesh=mesh["tp"])
    optimizer = torch.optim.AdamW(module.parameters())
    for each in module.children():
        each(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return unsplit_state(module), unsplit_optimizer_state(module, optimizer)


def test_ranks_may_hold_experts_of_other_names() -> None:
    for rank, (state, of_optimizer) in enumerate(meshcomm.simulate(own_experts, dims={"fsdp": 2, "tp": 2})):
        assert set(state) == {
            f"{part}.{key}" for part in ("shared", f"expert{rank // 2}") for key in ("weight", "bias")
        }
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(module.parameters())
        for part in module:
            part(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert torch.equal(state["shared.weight"], module[0].weight)
        assert torch.equal(state[f"expert{rank // 2}.bias"], module[1].bias)
        torch.testing.assert_close(of_optimizer["state"], optimizer.state_dict()["state"])


def older(mesh: Mesh) -> str:
    torch.manual_seed(0)
    module = Versioned().double()
    state: Any = module.state_dict()
    state._metadata[""]["version"] = 1
    tensor_parallel(module, mesh, "tp", PLAN)
    return caught(lambda: load_unsplit_state(module, state))


def test_state_of_another_version_is_refused() -> None:
    for text in meshcomm.simulate(older, dims={"tp": 2}):
        assert "another version of the module" in text and "version 1" in text


def numbers(mesh: Mesh) -> list[str]:
    """State that differs between ranks without being split."""
    texts = []
    for change in range(4):
        module = net()
        tensor_parallel(module, mesh, "tp", PLAN)
        optimizer = torch.optim.AdamW(module.parameters())
        step(module, optimizer, batches()[0])
        if mesh.rank == 1:
            state = optimizer.state[module.up.weight]
            if change == 0:
                state["step"] += 5
            elif change == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            elif change == 2:
                state["calls"] = 3
            else:
                state["held"] = Held(state["exp_avg"])
        texts.append(caught(lambda: unsplit_optimizer_state(module, optimizer)))
    return texts


@dataclass
class Held:
    tensor: Tensor


def test_numbers_that_differ_are_an_error_on_every_rank() -> None:
    for rank, (steps, settings, calls, hidden) in enumerate(meshcomm.simulate(numbers, dims={"tp": 4})):
        assert "rank 1 with up.weight['step'] = 6.0" in steps
        assert "rank 1 with param_groups[0]['lr'] = 0.5" in settings
        assert "rank 1 with up.weight['calls'] = 3" in calls
        assert ("a DTensor in a Held" if rank == 1 else "rank 1 could not gather") in hidden


class Failing(Net):
    def get_extra_state(self) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no extra state")
        return 3

    def set_extra_state(self, state: Any) -> None:
        return


def failing(mesh: Mesh) -> str:
    torch.manual_seed(0)
    module = Failing().double()
    tensor_parallel(module, mesh, "tp", PLAN)
    with pytest.raises((MeshcommError, ValueError)) as found:
        unsplit_state(module)
    return f"{type(found.value).__name__}: {found.value}"


def test_an_error_of_the_module_on_one_rank_is_told_to_the_others() -> None:
    for rank, text in enumerate(meshcomm.simulate(failing, dims={"tp": 2})):
        assert "ValueError: no extra state" in text
        assert text.startswith("ValueError" if rank == 1 else "MeshMismatchError: rank 1 could not gather")


def wrong_loads(mesh: Mesh) -> list[str]:
    module = net()
    tensor_parallel(module, mesh, "tp", PLAN)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, batches()[0])
    full, state = unsplit_state(module), unsplit_optimizer_state(module, optimizer)
    before = copy.deepcopy(full)
    wide = {**full, "up.weight": torch.zeros(17, 8)}
    other = {name: value for name, value in full.items() if name != "up.bias"} | {"more": torch.zeros(1)}
    calls: list[Any] = [
        lambda: load_unsplit_state(module, wide),
        lambda: load_unsplit_state(module, other),
        lambda: load_unsplit_state(module, cast(Any, None)),
        lambda: load_unsplit_optimizer_state(module, optimizer, {"state": {}}),
        lambda: load_unsplit_optimizer_state(module, optimizer, {**state, "param_groups": []}),
        lambda: load_unsplit_optimizer_state(
            module, optimizer, {**state, "state": {0: {"exp_avg": torch.ones(3)}}}
        ),
        lambda: load_unsplit_optimizer_state(net(), optimizer, state),
        lambda: assign(module.up.weight, torch.zeros(1, 8)),
        lambda: assign(module.up.weight, [1.0]),
        lambda: assign(module.up.weight, torch.zeros(16, 8, dtype=torch.complex64)),
        lambda: assign(module.up.weight, module.up.weight),
        lambda: whole(cast(Any, module)),
    ]
    texts = [caught(call) for call in calls]
    torch.testing.assert_close(dict(unsplit_state(module)), dict(before), rtol=0, atol=0)
    return texts


def test_a_state_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    wanted = [
        "up.weight cannot take this value(.|\n)*\\(17, 8\\)(.|\n)*\\(16, 8\\)",
        "without up.bias\n(.|\n)*with more",
        "the state is not a dict",
        "without param_groups",
        "groups of \\[\\] parameters",
        r"\['exp_avg'\] in the optimizer's state cannot take this value",
        "parameters that the module does not have",
        "the parameter cannot take this value",
        "a list",
        "complex64",
        "a DTensor of shape",
        "only a tensor can be gathered",
    ]
    for texts in meshcomm.simulate(wrong_loads, dims={"tp": 2}):
        for text, pattern in zip(texts, wanted, strict=True):
            assert re.search(pattern, text), text


def too_early(mesh: Mesh) -> list[str]:
    texts = []
    for shards in (False, True):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters())
        tensor_parallel(module, mesh, "tp", PLAN)
        if shards:
            fully_shard(module, mesh=mesh["dp"])
        module(batches()[0]).square().mean().backward()
        texts.append(caught(optimizer.step))
        torch.optim.AdamW(module.parameters()).step()
    return texts


def test_an_optimizer_from_before_the_split_is_refused_at_its_step() -> None:
    for texts in meshcomm.simulate(too_early, dims={"dp": 2, "tp": 2}):
        for text in texts:
            assert "the optimizer holds parameters that tensor_parallel has replaced" in text
            assert "10 of 10 parameters, the first norm.weight (8,)" in text
    # Other optimizers, also with parameters without gradients, and after no parameter from before a split is alive.
    plain = nn.Linear(2, 2)
    torch.optim.SGD(plain.parameters()).step()
    gc.collect()
    torch.optim.SGD(plain.parameters()).step()

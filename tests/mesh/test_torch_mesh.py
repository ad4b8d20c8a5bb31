"""torch's own FSDP2 and tensor parallelism on one of our meshes give the results of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshcomm
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import tensor_parallel
from meshcomm.testing import Pool

ORDER = [2, 0, 3, 1]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(Mlp(), Mlp())


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(net: nn.Module, rows: slice, share: int) -> list[torch.Tensor]:
    """Three AdamW steps on `rows` of each batch. The loss is the mean over the whole batch."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        out = net(batch(step)[rows])
        (out.square().sum() * share / 64).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimiser.step()
        optimiser.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()]


def sharded(order: list[int] | None, dims: dict[str, int], data: tuple[str, ...]) -> list[torch.Tensor]:
    merge = {"grad": ("pod", "dp")} if "pod" in dims else None
    with meshcomm.init(dims=dims, merge=merge, rank_order=order, device="cpu", timeout_s=30) as mesh:
        net = model()
        if "tp" in dims:
            for mlp in net:
                parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for mlp in net:
            fully_shard(mlp, mesh=mesh[data])
        fully_shard(net, mesh=mesh[data])
        size = 1
        place = 0
        for name in data:
            size, place = size * mesh.size(name), place * mesh.size(name) + mesh.coord(name)
        rows = 8 // size
        # FSDP averages over the data ranks, so each rank scales the loss of its rows by `size`.
        return train(net, slice(place * rows, (place + 1) * rows), size)


def test_fsdp_and_tensor_parallel_equal_one_process(pool: Pool) -> None:
    expected = train(model(), slice(None), 1)
    runs: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
        ({"dp": 2, "tp": 2}, ("dp",)),
        ({"pod": 2, "dp": 2}, ("pod", "dp")),
        ({"pod": 2, "dp": 2}, ("grad",)),
        ({"pod": 2, "dp": 1, "tp": 2}, ("grad",)),
    )
    for dims, data in runs:
        for rank, weights in enumerate(pool.run(sharded, ORDER, dims, data, ranks=4)):
            for got, want in zip(weights, expected, strict=True):
                # float64 and three steps: only the order of sums differs.
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=f"rank {rank}, {dims}")


def opened_again() -> list[list[float]]:
    found = []
    for _ in range(2):
        with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
            part = DTensor.from_local(torch.ones(1) * mesh.rank, mesh["tp"], [Shard(0)], run_check=False)
            found.append(part.full_tensor().tolist())
    return found


def test_a_mesh_that_is_opened_again_has_device_meshes_of_its_own(pool: Pool) -> None:
    found = pool.run(opened_again, ranks=4)
    assert found == [[[0.0, 1.0]] * 2] * 2 + [[[2.0, 3.0]] * 2] * 2


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def split_over_merged_dims() -> None:
    merge = {"model": ("dp", "tp"), "outer": ("pp", "dp")}
    with meshcomm.init(dims={"pp": 1, "dp": 2, "tp": 2}, merge=merge, device="cpu", timeout_s=30) as mesh:
        both, one = mesh["dp", "tp"], mesh["model"]
        assert mesh["outer", "tp"].ndim == 2 and one.ndim == 1 and one.get_group() is mesh.group("model")
        twice = [Shard(0), Shard(0)]
        for length in LENGTHS:
            x = torch.arange(float(length))
            # On one process: for each coord, a part of a part.
            rows = [list(row.chunk(2)) for row in x.chunk(2)]
            own = [part.tolist() for row in rows for part in row]
            split = distribute_tensor(x, both, twice)
            assert split.full_tensor().tolist() == x.tolist(), length
            assert length < 4 or split.to_local().tolist() == own[mesh.rank], length
            for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]):
                moved = split.redistribute(placements=placements)
                assert moved.full_tensor().tolist() == x.tolist(), (length, placements)
                assert moved.redistribute(placements=twice).full_tensor().tolist() == x.tolist(), length
            over = distribute_tensor(x, one, [Shard(0)])
            assert over.full_tensor().tolist() == x.tolist(), length
            assert length % 4 or over.to_local().tolist() == x.chunk(4)[mesh.rank].tolist()
        # A sum over both dims reduces along one dim after the other, whether or not a merged dim exists.
        partial = DTensor.from_local(torch.tensor([0.1 * (mesh.rank + 1)]), both, [Partial(), Partial()])
        with CommDebugMode() as counted:
            assert partial.full_tensor().item() == pytest.approx(1.0)
        assert counted.get_total_counts() == 2


def test_a_merged_dims_device_mesh_leaves_dtensors_on_its_dims_right(pool: Pool) -> None:
    pool.run(split_over_merged_dims, ranks=4)


def clips(mesh: Mesh, net: nn.Module) -> None:
    fully_shard(net, mesh=mesh["dp"])
    net(batch(0)).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def wraps(mesh: Mesh, net: nn.Module) -> None:
    DistributedDataParallel(net, process_group=mesh.group("dp"))


def updates(mesh: Mesh, net: nn.Module) -> None:
    with meshcomm.GradientSync(mesh, "dp", net):
        net(batch(0)).sum().backward()
    torch.optim.AdamW(net.parameters(), fused=True).step()


def factors(mesh: Mesh, net: nn.Module) -> None:
    net(batch(0)).sum().backward()
    torch.optim.Adafactor(net[0].parameters()).step()


def flattens(mesh: Mesh, net: nn.Module) -> None:
    def loss() -> Tensor:
        value = net(batch(0)).sum()
        value.backward()
        return value

    torch.optim.LBFGS(net.parameters()).step(loss)


def orthogonalizes(mesh: Mesh, net: nn.Module) -> None:
    parts = nn.Sequential(nn.Linear(8, 24, bias=False))
    tensor_parallel(parts, mesh, "tp", {"0": "column:3"})
    torch.optim.Muon(parts.parameters())


def initializes(mesh: Mesh, net: nn.Module) -> None:
    torch.distributed.init_process_group("gloo")


def ends(mesh: Mesh, net: nn.Module) -> None:
    raise RuntimeError("All parts must have the same mesh")


def mixed(call: Callable[[Mesh, nn.Module], None]) -> None:
    net = nn.Sequential(Mlp(), nn.LayerNorm(8, dtype=torch.float64))
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        parallelize_module(net[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        call(mesh, net)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            clips,
            r"clip_grad_norm_ takes only(.|\n)*same mesh(.|\n)*in clips\n(.|\n)*meshcomm\.clip_grad_norm_\(",
        ),
        (
            wraps,
            r"DistributedDataParallel takes no(.|\n)*mixed(.|\n)*in wraps\n(.|\n)*GradientSync\(mesh, \"dp\", module\)",
        ),
        (updates, r"fused=True(.|\n)*mixed(.|\n)*in updates\n(.|\n)*decay_groups\(module\)"),
        (factors, r"Adafactor takes no DTensors(.|\n)*in factors\n"),
        (flattens, r"LBFGS takes no DTensors beside(.|\n)*mixed(.|\n)*in flattens\n"),
        (orthogonalizes, r"Muon takes matrices(.|\n)*\(8, 3, 8\)|Muon takes matrices(.|\n)*\[8, 3, 8\]"),
        (initializes, r"initialized already(.|\n)*twice(.|\n)*in initializes\n(.|\n)*before meshcomm\.init"),
        (ends, None),
    ],
)
def test_what_torch_takes_no_dtensors_in_is_named_with_the_way_out(
    pool: Pool, call: Callable[[Mesh, nn.Module], None], says: str | None
) -> None:
    pool.run(ended, call, says, ranks=4)


def ended(call: Callable[[Mesh, nn.Module], None], says: str | None) -> None:
    with pytest.raises(TrainingError if says else RuntimeError, match=says or "^All parts") as caught:
        mixed(call)
    assert says is None or isinstance(caught.value.__cause__, RuntimeError | ValueError)

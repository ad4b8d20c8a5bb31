"""Plain torch programs, which run unchanged on real processes and on simulated ranks."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def _numbers(module: nn.Module) -> dict[str, list[float]]:
    found = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = value.flatten().tolist()
    return found


def _batches(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    losses = []
    for x in _batches(seed):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp_and_tp() -> Any:
    """FSDP2 on top of tensor parallelism, with AdamW and clipping."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 4)).double()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in net:
        if not isinstance(layer, nn.Tanh):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch warns for every nn.Linear
        losses = _trained(
            net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False), mesh.get_local_rank("dp")
        )
    return losses, _numbers(net)


def ddp() -> Any:
    """DDP with several buckets of 1 KiB."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    copies = DistributedDataParallel(net, bucket_cap_mb=0.001)
    return _trained(copies, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), dist.get_rank()), _numbers(
        net
    )


def pipeline() -> Any:
    """torch's pipelines: one stage per rank, with two schedules."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).double() for _ in range(size)]
    stage, found = stages[rank], []
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    for kind in (ScheduleGPipe, Schedule1F1B):
        part = PipelineStage(stage, rank, size, torch.device("cpu"))
        schedule = kind(part, 4, loss_fn=lambda y, target: (y - target).square().mean())
        for x in _batches(0):
            losses: list[Tensor] = []
            given = (x,) if rank == 0 else ()
            last: dict[str, Any] = {"target": x.flip(1), "losses": losses} if rank == size - 1 else {}
            schedule.step(*given, **last)
            optimizer.step()
            optimizer.zero_grad()
            found.append([loss.item() for loss in losses])
    return found, _numbers(stage)


def every_call() -> Any:
    """Every call of torch.distributed, also on a new group of some ranks, and asynchronously."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(8.0) + 10 * rank
    found: dict[str, Any] = {}

    def keep(name: str, *tensors: Tensor) -> None:
        found[name] = [tensor.tolist() for tensor in tensors]

    for op in ("SUM", "MAX", "PRODUCT"):
        y = x.clone()
        dist.all_reduce(y, getattr(dist.ReduceOp, op))
        keep(op, y)
    y = x.view(2, 4).t().clone().t()
    dist.all_reduce(y)
    keep("not contiguous", y)
    y = x.clone()
    dist.broadcast(y, 1)
    keep("broadcast", y)
    y = x.clone()
    dist.reduce(y, 2)
    keep("reduce", y if rank == 2 else x)
    parts = [torch.empty(8) for _ in range(size)]
    dist.all_gather(parts, x)
    keep("all_gather", *parts)
    y = torch.empty(8 * size)
    dist.all_gather_into_tensor(y, x)
    keep("all_gather_into_tensor", y)
    y = torch.empty(8 // size)
    dist.reduce_scatter_tensor(y, x.clone())
    keep("reduce_scatter_tensor", y)
    y = torch.empty(2)
    dist.reduce_scatter(y, [x[2 * each : 2 * each + 2].clone() for each in range(size)])
    keep("reduce_scatter", y)
    parts = [torch.empty(8) for _ in range(size)] if rank == 1 else []
    dist.gather(x, parts or None, dst=1)
    keep("gather", *parts)
    y = torch.empty(2)
    dist.scatter(y, [torch.full((2,), float(each)) for each in range(size)] if rank == 1 else None, src=1)
    keep("scatter", y)
    y = torch.empty(8)
    dist.all_to_all_single(y, x)
    keep("all_to_all_single", y)
    sends = [(rank + each) % size + 1 for each in range(size)]
    comes = [(each + rank) % size + 1 for each in range(size)]
    y = torch.empty(sum(comes))
    dist.all_to_all_single(y, torch.arange(float(sum(sends))) + 100 * rank, comes, sends)
    keep("uneven all_to_all_single", y)
    work = dist.all_reduce(y := x.clone(), async_op=True)
    assert work is not None
    work.wait()
    keep("async", y)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, src=3)
    found["broadcast_object_list"] = told
    half: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    y = x.clone()
    dist.all_reduce(y, group=half[rank // 2])
    keep("new_group", y)
    ends = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y := torch.empty(8), (rank - 1) % size),
    ]
    for each in dist.batch_isend_irecv(ends):
        each.wait()
    keep("batch_isend_irecv", y)
    if rank == 0:
        dist.send(x, 3, tag=5)
    elif rank == 3:
        found["source"] = dist.recv(y := torch.empty(8), tag=5)
        keep("recv", y)
    dist.barrier()
    found["backend"] = dist.get_backend(), dist.get_process_group_ranks(half[rank // 2])
    return found


def groups() -> Any:
    """What a group says of itself, and the calls that ask it."""
    rank = dist.get_rank()
    half: Any = dist.split_group(split_ranks=[[0, 1], [3, 2]])
    part: Any = dist.split_group(split_ranks=[[1, 2, 3]], backend="cpu:gloo")
    dist.monitored_barrier()
    dist.monitored_barrier(half)
    dist.all_reduce(x := torch.ones(2) * rank, group=half)
    parts = [[torch.empty(2), torch.empty(3, 1)] for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will deprecate it
        dist.all_gather_coalesced(parts, [x, torch.full((3, 1), float(rank))])
    return (
        dist.get_backend_config(),
        sorted(device.type for device in dist.group.WORLD._device_types),
        [
            (dist.get_backend_config(each), dist.get_process_group_ranks(each))
            for each in (half, part)
            if isinstance(each, dist.ProcessGroup)
        ],
        [[each.tolist() for each in row] for row in parts],
    )


def state_dict_of_rank_0() -> Any:
    """The usual start of a fine-tuning: only rank 0 has read the file."""
    torch.manual_seed(0)
    read = nn.Linear(3, 4).state_dict() if dist.get_rank() == 0 else {}
    fully_shard(net := nn.Linear(3, 4))
    set_model_state_dict(net, read, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return _numbers(net)


def methods() -> Any:
    """The overloads of a group's methods, with and without options."""
    group: Any = dist.group.WORLD
    rank, op, ones = dist.get_rank(), dist.ReduceOp.MAX, torch.ones(3)
    x, y, z = ones * rank, torch.zeros(3), torch.zeros(3)
    parts = [torch.zeros(3) for _ in range(4)]
    whole, found = torch.zeros(12), []
    timeout = timedelta(seconds=60)
    for call in (
        lambda: group.allreduce(z),
        lambda: group.allreduce(z, op),
        lambda: group.allreduce([z], op=op, timeout=timeout),
        lambda: group.allreduce_coalesced([z, y]),
        lambda: group.broadcast(z, 1),
        lambda: group.broadcast(z, root=2, timeout=timeout),
        lambda: group.allgather(parts, x),
        lambda: group._allgather_base(whole, x),
        lambda: group._allgather_base(input=x, output=whole),
        lambda: group.reduce_scatter(y, [x] * 4, op),
        lambda: group._reduce_scatter_base(y, torch.arange(12.0)),
        lambda: group.scatter(y, [ones * each for each in range(4)] if rank == 2 else [], 2),
        lambda: group.scatter(y, [ones * each for each in range(4)] if rank == 1 else [], root=1),
        lambda: group.alltoall(parts, [x] * 4),
        lambda: group.alltoall_base(whole[:4], torch.arange(4.0) + rank, [], []),
        lambda: group.barrier(timeout=timeout),
    ):
        z.copy_(x)
        call().wait()
        found.append([each.tolist() for each in (y, z, whole, *parts)])
    group.reduce(reduced := x.clone(), 1).wait()
    group.reduce(least := x.clone(), root=1, op=dist.ReduceOp.MIN).wait()
    group.gather(parts if rank == 2 else [], x, 2).wait()
    group.monitored_barrier(timeout)
    return found, [reduced.tolist(), least.tolist()] if rank == 1 else [], [part.tolist() for part in parts]


def computed() -> Any:
    """Calls that Gloo computes although meshcomm's own have no such form, and one whose result no rank can compute."""
    rank, found = dist.get_rank(), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        dist.all_reduce(x := torch.tensor([rank == 1, rank != 1, True, False]), op)
        found.append(x.tolist())
    entries = torch.tensor([[rank, (rank + 1) % 4, rank]])
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not check sparse tensors
        x = torch.sparse_coo_tensor(entries, values, (6, 2), check_invariants=True)
        dist.all_reduce(x)
        found += [x.coalesce().indices().tolist(), x.coalesce().values().tolist()]
        try:
            dist.all_reduce(torch.sparse_coo_tensor(entries, values.half(), (6, 2), check_invariants=True))
        except NotImplementedError as error:
            found.append(str(error))
    dist.reduce_scatter(y := torch.empty(rank + 1), [torch.ones(n + 1) * n + rank for n in range(4)])
    return *found, y.tolist()


def refused() -> Any:
    """Which calls Gloo refuses on every rank."""
    found: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (RuntimeError, ValueError):
            found[name] = "refused"
        else:
            found[name] = "computed"

    for dtype in (
        "bool", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "bfloat16", "complex64", "float8_e4m3fn",
    ):  # fmt: skip
        x = torch.ones(4).to(getattr(torch, dtype))
        y = torch.empty(1, dtype=x.dtype)
        parts = [torch.empty_like(x) for _ in range(4)]
        note(f"all_reduce {dtype}", lambda: dist.all_reduce(x.clone()))
        note(f"broadcast {dtype}", lambda: dist.broadcast(x.clone(), 1))
        note(f"all_gather {dtype}", lambda: dist.all_gather(parts, x))
        note(f"gather {dtype}", lambda: dist.gather(x, parts if dist.get_rank() == 0 else None))
        note(f"reduce_scatter_tensor {dtype}", lambda: dist.reduce_scatter_tensor(y, x))
        note(f"all_to_all_single {dtype}", lambda: dist.all_to_all_single(parts[0], x))
    x, kinds = torch.ones(2, 3), (torch.ones(2), torch.ones(2, dtype=torch.float64))
    for op in ("AVG", "BAND"):
        note(op, lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), getattr(dist.ReduceOp, op)))
    note("premul", lambda: dist.all_reduce(x.clone(), dist._make_nccl_premul_sum(2.0)))  # type: ignore[attr-defined]
    for shape in ((8, 3), (24,), (4, 2, 3), (4, 6), (9, 3)):
        note(f"into {shape}", lambda: dist.all_gather_into_tensor(torch.empty(shape), x))
        note(f"from {shape}", lambda: dist.reduce_scatter_tensor(x.clone(), torch.ones(shape)))
    note("into float64", lambda: dist.all_gather_into_tensor(torch.empty(8, 3, dtype=torch.float64), x))
    note("from float64", lambda: dist.reduce_scatter_tensor(x.clone(), torch.ones(8, 3, dtype=torch.float64)))
    for shape in ((2, 3), (6,)):
        parts = [torch.empty(shape) for _ in range(4)]
        note(f"parts {shape}", lambda: dist.all_gather(parts, x))
        note(f"all_to_all {shape}", lambda: dist.all_to_all(parts, [x] * 4))
    note("all_to_all uneven", lambda: dist.all_to_all(*([torch.ones(n) for n in range(4)] for _ in range(2))))
    note("to_single", lambda: dist.all_to_all_single(torch.empty(24), torch.ones(8, 3)))
    note("coalesced", lambda: dist.distributed_c10d.all_reduce_coalesced([*kinds]))
    return found


def _bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).tolist()


def extremes() -> Any:
    """min and max of NaN, both zeros and infinity: Gloo's results depend on the order of the ranks."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    generator = torch.Generator().manual_seed(rank)
    values = torch.tensor([torch.nan, -0.0, 0.0, 1.0, -torch.inf])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for length in (1, 7, 300):
                x = values[torch.randint(5, (size, length), generator=generator)].to(dtype)
                dist.all_reduce(y := x.clone(), op)
                dist.reduce(z := x.clone(), 1, op)
                dist.reduce_scatter_tensor(part := torch.empty(length, dtype=dtype), x.view(-1), op)
                dist.reduce_scatter(other := torch.empty(length, dtype=dtype), list(x.clone()), op)
                found += [_bits(y), _bits(z) if rank == 1 else [], _bits(part), _bits(other)]
    return found


def sums() -> Any:
    """Sums of complex numbers, and those that Gloo computes over several tensors together or one by one."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.bfloat16, torch.float32, torch.complex64):
        for length in (1, 7, 300):
            x = torch.randn(size, length, generator=generator, dtype=dtype)
            dist.all_reduce(z := x.clone())
            dist.reduce(y := x.clone(), 2)
            dist.reduce_scatter_tensor(part := torch.empty(length, dtype=dtype), x.view(-1))
            dist.reduce_scatter(other := torch.empty(length, dtype=dtype), list(x.clone()))
            a, b = x[0].clone(), x[1:, 0].clone()
            with _coalescing_manager():
                dist.all_reduce(a)
                dist.all_reduce(b)
            found += [_bits(each) for each in (z, part, other, a, b)] + [_bits(y) if rank == 2 else []]
    return found


def layouts() -> Any:
    """Tensors whose axes are permuted on some ranks: Gloo ignores the permutation in some calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(8.0).view(2, 4).t() + 10 * rank
    mixed = x if rank % 2 else x.contiguous()
    dist.all_reduce(a := mixed.clone())
    dist.broadcast(b := mixed.clone(), 2)
    dist.reduce(c := mixed.clone(), 1)
    dist.scatter(d := torch.zeros(4, 2), [x + each for each in range(size)] if rank == 0 else None)
    dist.all_gather(e := [torch.zeros(4, 2) for _ in range(size)], x)
    dist.gather(x, f := [torch.zeros(2, 4).t() for _ in range(size)] if rank == 0 else None)
    return [each.tolist() for each in (a, b, c if rank == 1 else d, d, *e, *(f or ()))]


def losses_in_parallel() -> Any:
    """loss_parallel, which one rank leaves while others are still inside."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    y = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)]).requires_grad_()
    found = []
    for _ in range(2):
        with loss_parallel():
            loss = cross_entropy(y, torch.arange(4))
            loss.backward()
        assert isinstance(loss, DTensor) and isinstance(y.grad, DTensor)
        found += [loss.full_tensor().item(), y.grad.to_local().tolist()]
    return found


def versions() -> Any:
    """Gloo writes most results without autograd's knowledge, so that a later backward does not raise."""
    rank, size, counts = dist.get_rank(), dist.get_world_size(), []
    x, y, parts = torch.ones(size), torch.ones(1), [torch.ones(1) for _ in range(size)]
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, dist.ReduceOp.AVG),
        lambda: dist.reduce(x, 1),
        lambda: dist.broadcast(x, 0),
        lambda: dist.scatter(y, parts if rank == 0 else None),
        lambda: dist.gather(y, parts if rank == 0 else None),
        lambda: dist.reduce_scatter_tensor(y, x),
        lambda: dist.reduce_scatter(y, parts),
        lambda: dist.all_gather_into_tensor(x, y),
        lambda: dist.all_gather(parts, y),
        lambda: dist.all_to_all_single(x, x.clone()),
        lambda: dist.all_to_all(parts, [each.clone() for each in parts]),
        lambda: dist.send(x, rank + 1) if rank % 2 == 0 else dist.recv(x, rank - 1),
    ):
        before = [each._version for each in (x, y, *parts)]
        call()
        counts.append([each._version > old for each, old in zip((x, y, *parts), before, strict=True)])
    weight = torch.ones(2, 2, requires_grad=True)
    loss = (torch.ones(1, 2) @ weight @ weight).sum()
    with torch.no_grad():
        dist.broadcast(weight, 0)
    loss.backward()
    assert weight.grad is not None
    return counts, weight.grad.tolist()


PROGRAMS = {
    each.__name__: each
    for each in (
        fsdp_and_tp,
        ddp,
        pipeline,
        every_call,
        groups,
        state_dict_of_rank_0,
        methods,
        computed,
        refused,
        extremes,
        sums,
        layouts,
        losses_in_parallel,
        versions,
    )
}

"""Unusual but correct torch.distributed programs: no rank waits for a rank that cannot arrive yet.

Each program runs on four ranks with a Gloo default group, and returns the results of its rank. None of them uses meshcomm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

WORLD = 4
Program = Callable[[int], Any]


def full(value: float, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(value))


def received(src: int, size: int = 3) -> list[float]:
    dist.recv(x := torch.zeros(size), src)
    return x.tolist()


def group_of(*ranks: int) -> Any:
    """Create a new group on all ranks."""
    return dist.new_group(list(ranks) or None)


def a_server_behind_an_asynchronous_barrier(rank: int) -> Any:
    """Rank 0 posts an asynchronous barrier, then answers requests that the others send before their own barrier."""
    if rank:
        dist.send(full(rank), 0)
        found = received(0)
        dist.barrier()
        return found
    work = dist.barrier(async_op=True)
    for src in range(1, WORLD):
        dist.send(2 * torch.tensor(received(src)), src)
    work.wait()
    return None


def messages_between_an_asynchronous_all_reduce_and_its_wait(rank: int) -> Any:
    x = full(rank)
    if rank:
        found = received(0)
        dist.all_reduce(x)
        return found, x.tolist()
    work = dist.all_reduce(x, async_op=True)
    for dst in range(1, WORLD):
        dist.send(full(10 * dst), dst)
    work.wait()
    return x.tolist()


def two_groups_started_in_either_order(rank: int) -> Any:
    groups = [group_of(), group_of()]
    x = [full(rank), full(2 * rank)]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(x[each], group=groups[each], async_op=True) for each in order]
    for work in works:
        work.wait()
    return [each.tolist() for each in x]


def a_gather_whose_sender_returns_early(rank: int) -> Any:
    """Rank 1 leaves the gather, then sends the message for which rank 2 waits before the gather."""
    parts = [torch.zeros(3) for _ in range(WORLD)] if rank == 0 else None
    if rank == 2:
        received(1)
    dist.gather(full(rank), parts, 0)
    if rank == 1:
        dist.send(full(1), 2)
    return parts and [part.tolist() for part in parts]


def a_broadcast_whose_source_returns_early(rank: int) -> Any:
    """The source returns from the broadcast before rank 3 enters it, and then overwrites the tensor."""
    x = full(7 if rank == 0 else 0)
    if rank == 3:
        received(0)
    dist.broadcast(x, 0)
    if rank == 0:
        dist.send(x.zero_(), 3)
    return x.tolist()


def a_scatter_whose_receiver_returns_early(rank: int) -> Any:
    x = torch.zeros(3)
    if rank == 2:
        received(1)
    dist.scatter(x, [full(10 * each) for each in range(WORLD)] if rank == 0 else None, 0)
    if rank == 1:
        dist.send(x, 2)
    return x.tolist()


def empty_reductions_that_nobody_waits_for(rank: int) -> Any:
    """Rank 0 returns from an empty all_reduce, as for a batch without tokens for an expert, before rank 1 enters it."""
    if rank == 1:
        received(0)
    dist.all_reduce(torch.zeros(0))
    if rank == 0:
        dist.send(full(1), 1)
    dist.all_reduce(x := full(rank))
    return x.tolist()


def a_loader_that_feeds_the_others(rank: int) -> Any:
    workers = group_of(1, 2, 3)
    if rank == 0:
        sent = [dist.isend(full(10 * batch + dst), dst) for batch in range(5) for dst in range(1, WORLD)]
        for work in sent:
            work.wait()
        return None
    losses = []
    for _ in range(5):
        x = torch.tensor(received(0))
        dist.all_reduce(x, group=workers)
        losses.append(x.tolist())
    return losses


def an_uneven_all_to_all(rank: int) -> Any:
    found = []
    for blocking in (True, False):
        leaving, coming = [rank + dst for dst in range(WORLD)], [src + rank for src in range(WORLD)]
        out = torch.zeros(sum(coming))
        work = dist.all_to_all_single(out, full(rank, sum(leaving)), coming, leaving, async_op=not blocking)
        if work is not None:
            work.wait()
        found.append(out.tolist())
    return found


def work_between_a_barrier_and_its_wait(rank: int) -> Any:
    """Many barriers: some are waited for late, one is polled, and some are never waited for."""
    works = [dist.barrier(async_op=True) for _ in range(6)]
    x = sum(float(each) for each in range(1000))
    while not works[0].is_completed():
        pass
    for work in reversed(works[:4]):
        work.wait()
    del works
    dist.barrier()
    return x


def objects(rank: int) -> Any:
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, {"rank": rank})
    told = [["a", rank] if rank == 1 else None]
    dist.broadcast_object_list(told, 1)
    gathered: list[Any] | None = [None] * WORLD if rank == 2 else None
    dist.gather_object("x" * rank, gathered, 2)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(WORLD)) if rank == 0 else None, 0)
    return everyone, told, gathered, mine


def data_parallel_with_uneven_inputs(rank: int) -> Any:
    """Ranks with fewer batches shadow the calls of the other ranks."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for batch in range(3 + rank):
            optimizer.zero_grad()
            model(full(batch).repeat(2, 1)).square().mean().backward()
            optimizer.step()
    return [p.tolist() for p in model.parameters()]


def a_pipeline_of_messages(rank: int) -> Any:
    found, sent = [], []
    for batch in range(4):
        x = full(batch)
        if rank:
            dist.irecv(x, rank - 1, tag=batch).wait()
        x = x * 2 + rank
        if rank < WORLD - 1:
            sent.append(dist.isend(x, rank + 1, tag=batch))
        found.append(x.tolist())
    for work in sent:
        work.wait()
    ends = [
        dist.P2POp(dist.isend, full(rank), (rank + 1) % WORLD),
        dist.P2POp(dist.irecv, y := torch.zeros(3), (rank - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return found, y.tolist()


def messages_of_other_sizes(rank: int) -> Any:
    """Messages into larger buffers, as another dtype, with reordered tags, through the backend directly, and from any source."""
    peer, found = rank ^ 1, []
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    sends = [
        lambda: dist.isend(full(rank, 2), peer),
        lambda: dist.isend(full(rank, 4).view(torch.int32), peer),
        lambda: dist.isend(full(rank, 5), peer, tag=1),
        lambda: dist.isend(full(rank, 1), peer, tag=2),
        lambda: backend.send([full(rank, 7)], peer, 0),
        lambda: dist.isend(full(rank, 2), peer),
    ]
    room = [
        (5, lambda x: dist.irecv(x, peer)),
        (4, lambda x: dist.irecv(x, peer)),
        (1, lambda x: dist.irecv(x, peer, tag=2)),
        (5, lambda x: dist.irecv(x, peer, tag=1)),
        (7, lambda x: dist.irecv(x, peer)),
        (3, lambda x: dist.irecv(x, peer)),
    ]
    for order in (0, 1):
        # Which end starts first.
        sent = [] if (rank + order) % 2 else [send() for send in sends]
        tensors = [torch.full((size,), -1.0) for size, _ in room]
        works = [recv(x) for x, (_, recv) in zip(tensors, room, strict=True)]
        sent = sent or [send() for send in sends]
        for work in (*sent, *works):
            work.wait()
        found += [x.tolist() for x in tensors]
        sent = [dist.isend(full(rank, size), peer, tag=3) for size in (6, 1)]
        for size, src in ((6, None), (1, peer)):
            dist.recv(x := torch.zeros(size), src, tag=3)
            found.append(x.tolist())
        for work in sent:
            work.wait()
    return found


def a_group_that_works_while_the_others_do_not(rank: int) -> Any:
    """Ranks 0 and 1 call on their group; the others wait for messages before the common call."""
    pair = group_of(0, 1)
    x = full(rank)
    if rank < 2:
        for _ in range(5):
            dist.all_reduce(x, group=pair)
        dist.send(x, rank + 2)
    else:
        x = torch.tensor(received(rank - 2))
    dist.all_reduce(x)
    return x.tolist()


def threads_on_groups_of_their_own(rank: int) -> Any:
    groups, found = [group_of() for _ in range(3)], {}

    def calls(place: int) -> None:
        x = full(rank + place)
        for number in range(6):
            work = dist.all_reduce(x, group=groups[place], async_op=number % 2 == 0)
            if work is not None:
                work.wait()
            dist.broadcast(x, number % WORLD, group=groups[place])
        found[place] = x.tolist()

    threads = [threading.Thread(target=calls, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found.items())


def coalesced_calls(rank: int) -> Any:
    x = [full(rank + each, 2 + each) for each in range(3)]
    with dist._coalescing_manager(async_ops=True) as works:
        for each in x:
            dist.all_reduce(each)
    works.wait()
    return [each.tolist() for each in x]


def functional_calls(rank: int) -> Any:
    """Functional collectives are asynchronous: the first use of a result waits for it."""
    group = dist.group.WORLD
    assert group is not None
    x = functional.all_reduce(full(rank), "sum", group)
    y = functional.broadcast(full(rank, 2), 1, group)
    return (y * 2).tolist(), (x + 1).tolist()


def sharded_with_prefetch(rank: int) -> Any:
    """FSDP2 starts the next layer's all_gather while the current layer runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    mesh = init_device_mesh("cpu", (WORLD,))
    layers: list[Any] = [fully_shard(layer, mesh=mesh) for layer in model]
    fully_shard(model, mesh=mesh)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    losses = []
    for step in range(3):
        loss = model(full(rank + step, 4)).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def monitored_barriers_between_calls(rank: int) -> Any:
    work = dist.all_reduce(x := full(rank), async_op=True)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    assert work is not None
    work.wait()
    dist.monitored_barrier(wait_all_ranks=True)
    dist.all_reduce(x)
    return x.tolist()


def groups_made_late_and_again(rank: int) -> Any:
    """Groups over the same ranks are created and destroyed repeatedly, some by those ranks alone."""
    found = []
    for turn in range(4):
        ranks = [rank & 2, rank | 1]
        alone = turn % 2 == 1
        groups = (
            [dist.new_group(ranks, use_local_synchronization=True)]
            if alone
            else [group_of(0, 1), group_of(2, 3)]
        )
        group = groups[-1] if alone else groups[rank // 2]
        work = dist.all_reduce(x := full(rank, 1 + turn), group=group, async_op=True)
        work.wait()
        found.append(x.tolist())
        dist.destroy_process_group(group)
    return found


def many_calls_in_flight(rank: int) -> Any:
    """Calls of several kinds; each rank waits for them in a different order."""
    x = [full(rank + each, 1 + each) for each in range(8)]
    works = [
        dist.all_reduce(each, async_op=True) if place % 2 else dist.broadcast(each, place // 2, async_op=True)
        for place, each in enumerate(x)
    ]
    for place in range(8):
        works[(place * 3 + rank) % 8].wait()
    return [each.tolist() for each in x]


def a_future_of_a_call(rank: int) -> Any:
    work = dist.all_reduce(x := full(rank), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] * 2).wait().tolist(), x.tolist()


def compiled(rank: int) -> Any:
    """Calls of a compiled program inside a graph, between two graphs, and in C++ after a graph."""
    torch.manual_seed(0)
    models: list[Any] = [nn.parallel.DistributedDataParallel(nn.Linear(3, 2)) for _ in range(3)]
    whole, part = models[0], models[2]
    models[1].compile(backend="eager")
    runs = [torch.compile(whole, backend="aot_eager"), models[1]]
    runs.append(torch.compile(lambda x: part(x) * 2, backend="eager"))
    for run in runs:
        for step in range(2):
            run(full(rank + step).repeat(2, 1)).square().sum().backward()
    group = dist.group.WORLD
    assert group is not None

    def between(x: torch.Tensor) -> Any:
        works = [dist.all_reduce(x, async_op=True), dist.isend(x * 0 + rank, rank ^ 1)]
        dist.recv(y := torch.zeros(3), rank ^ 1)
        for work in works:
            assert work is not None
            work.wait()
        dist.broadcast(y, 1)
        return functional.all_reduce(x, "sum", group) + y

    found = [torch.compile(between, backend="aot_eager")(full(rank)).tolist() for _ in range(2)]
    torch.compiler.reset()
    return found, [[p.grad.tolist() for p in model.parameters()] for model in models]


def traced(rank: int) -> Any:
    """Rank 1 also makes calls on meta and fake tensors, which send nothing."""
    from torch._subclasses import FakeTensorMode

    if rank == 1:
        dist.all_reduce(torch.ones(5, device="meta"))
        with FakeTensorMode():
            dist.broadcast(torch.ones(5), 0)
            dist.send(torch.ones(5), 0)
    dist.all_reduce(x := full(rank))
    return x.tolist()


def sparse(rank: int) -> Any:
    """Each rank has a different number of non-zeros; one rank has none."""
    found = []
    for row in ((), (2,)):
        x = torch.eye(4).to_sparse() if rank else torch.zeros(4, 4).to_sparse()
        y = torch.sparse_coo_tensor([[0] * rank], torch.ones(rank, *row), (3, *row))
        dist.all_reduce(x)
        dist.all_reduce(y, async_op=True).wait()
        found += [x.to_dense().tolist(), y.to_dense().tolist()]
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(4, 3, sparse=True, mode="sum"), nn.Linear(3, 2))
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        parallel(torch.tensor([[0, rank]])).sum().backward()
    return found, [p.grad.to_dense().tolist() for p in model.parameters()]


def refused_calls(rank: int) -> list[Callable[[], Any]]:
    """Calls that torch refuses on this rank before it sends anything."""
    one, ints, n = torch.ones, torch.int32, WORLD
    csr = one(2, 2).to_sparse_csr()
    return [
        lambda: dist.broadcast(one(1), 99),
        lambda: dist.reduce(one(1), 99),
        lambda: dist.gather(one(1), None, 99),
        lambda: dist.scatter(one(1), None, 99),
        lambda: dist.broadcast(one(1), group_src=-1),
        lambda: dist.all_gather([one(2)], one(2)),
        lambda: dist.all_gather([one(2)] * (n - 1) + [one(3)], one(2)),
        lambda: dist.all_gather([one(1, 2)] * n, one(2)),
        lambda: dist.all_gather([one(2, dtype=ints)] * n, one(2)),
        lambda: dist.all_gather_into_tensor(one(2 * n + 1), one(2)),
        lambda: dist.all_gather_into_tensor(one(2 * n), one(2, dtype=ints)),
        lambda: dist.all_gather_into_tensor(one(1, 2 * n), one(2)),
        lambda: dist.all_gather_into_tensor(one(1), one(2)),
        lambda: dist.gather(one(2), [one(2)], rank),
        lambda: dist.gather(one(2), [one(3)] * n, rank),
        lambda: dist.scatter(one(2), [one(2)], rank),
        lambda: dist.scatter(one(2), [one(1, 2)] * n, rank),
        lambda: dist.reduce_scatter(one(2), [one(2)]),
        lambda: dist.reduce_scatter(one(2), [one(3)] * n),
        lambda: dist.reduce_scatter_tensor(one(2), one(2 * n + 1)),
        lambda: dist.reduce_scatter_tensor(one(2), one(2 * n, dtype=ints)),
        lambda: dist.all_to_all([one(2)], [one(2)]),
        lambda: dist.all_to_all_single(one(2 * n + 1), one(2 * n + 1)),
        lambda: dist.all_to_all_single(one(2 * n), one(2 * n), [1] * n, [1] * n),
        lambda: dist.all_to_all_single(one(2 * n), one(2 * n), [2 * n], [2 * n]),
        lambda: dist.all_reduce(csr),
        lambda: dist.broadcast(one(2).to_sparse(), 0),
        lambda: dist.all_reduce(torch.nested.nested_tensor([one(2), one(3)])),
        lambda: dist.send(one(2).to_sparse(), rank ^ 1),
    ]


def calls_that_torch_refuses(rank: int) -> Any:
    """One rank catches torch's errors and then makes the same calls as the others."""
    found = []
    for call in refused_calls(rank):
        if rank == 1:
            try:
                call()
            except Exception as error:
                found.append(type(error).__name__.removesuffix("Error"))
        dist.all_reduce(x := full(rank))
        found.append(x.tolist())
    return found


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        a_server_behind_an_asynchronous_barrier,
        messages_between_an_asynchronous_all_reduce_and_its_wait,
        two_groups_started_in_either_order,
        a_gather_whose_sender_returns_early,
        a_broadcast_whose_source_returns_early,
        a_scatter_whose_receiver_returns_early,
        empty_reductions_that_nobody_waits_for,
        a_loader_that_feeds_the_others,
        an_uneven_all_to_all,
        work_between_a_barrier_and_its_wait,
        objects,
        data_parallel_with_uneven_inputs,
        a_pipeline_of_messages,
        messages_of_other_sizes,
        a_group_that_works_while_the_others_do_not,
        threads_on_groups_of_their_own,
        coalesced_calls,
        functional_calls,
        sharded_with_prefetch,
        monitored_barriers_between_calls,
        groups_made_late_and_again,
        many_calls_in_flight,
        a_future_of_a_call,
        compiled,
        traced,
        sparse,
        calls_that_torch_refuses,
    )
}


def run_all(
    context: Callable[[], AbstractContextManager[Any]] = nullcontext, *, slow: bool = False
) -> dict[str, str]:
    """Run each program on a new default group. Return its result on this rank, or its error, as text.

    context: makes the context in which a program runs. slow: whether to run the compiled program, or all others.
    """
    rank, found = int(os.environ["RANK"]), {}
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, WORLD, False, timedelta(seconds=60))
    for name, program in PROGRAMS.items():
        if (program is compiled) != slow:
            continue
        own = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
        try:
            with context():
                found[name] = repr(program(rank))
                dist.barrier()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.destroy_process_group()
    return found

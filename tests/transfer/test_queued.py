"""Tensors and versions of weights along a link whose calls are queued, as with NCCL: emulated on a CPU."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl
from meshcomm.testing.pool import Limits
from meshcomm.transfer.agree import Staging
from meshcomm.transfer.link import Link
from tests.transfer.pairs import poisoned, random_whole, same_bits

SHAPES = {"large": (511, 257), "small": (7, 6)}


@contextmanager
def linked(timeout_s: float = 60.0) -> Iterator[tuple[Mesh, Mesh, Link]]:
    keys: dict[str, Any] = {"backend": NAME, "device": "cpu", "timeout_s": timeout_s, "validate_calls": 8}
    with (
        emulated_nccl(),
        meshcomm.init(dims={"fsdp": 2}, ranks=[0, 1], **keys) as source,
        meshcomm.init(dims={"tp": 2}, ranks=[2, 3], **keys) as target,
        meshcomm.link(source, target, bucket_bytes=1 << 16) as link,
    ):
        yield source, target, link


def tensors() -> None:
    """The tensors are dropped, and their memory used again, as soon as the call has returned."""
    with linked() as (source, target, link):
        for turn in range(4):
            whole = random_whole(SHAPES["large"], torch.bfloat16, turn)
            x = out = wanted = None
            if source.is_member:
                x = whole.chunk(2)[source.coord("fsdp")].T.contiguous().T
            else:
                wanted = whole.chunk(2, 1)[target.coord("tp")].contiguous()
                out = poisoned(wanted, random.Random(turn))
            link.transfer(x, out, "n/fsdp k -> n k/tp")
            if x is not None:
                x.fill_(-1.0)
            assert out is None or same_bits(out, wanted)


def versions(staging: Staging) -> None:
    """Weights are overwritten as soon as they may be; the push of a snapshot, before it is sent."""
    with linked() as (source, target, link):
        mesh, axis = (source["fsdp"], 0) if source.is_member else (target["tp"], 1)
        dtype = torch.float32 if source.is_member else torch.bfloat16
        model: dict[str, Tensor] = {"scalar": torch.zeros((), dtype=dtype)}
        for name in SHAPES:
            blank = torch.zeros(SHAPES[name], dtype=dtype)
            model[name] = distribute_tensor(blank, mesh, [Shard(axis)], src_data_rank=None)
        weights = link.weights(model, cast=torch.bfloat16 if source.is_member else None, staging=staging)
        # The emulation orders the operators of one thread.
        weights._lazy = True
        for version in range(1, 5):
            wholes = {name: torch.randn(SHAPES[name], generator=seeded(version)) for name in SHAPES}
            wholes["scalar"] = torch.tensor(version / 3)
            if source.is_member:
                for name, x in model.items():
                    memory(x).copy_(part(wholes[name], axis, mesh.get_local_rank()))
                push = weights.push(version, snapshot=version % 2 == 0)
                if version % 2 == 0:
                    memory(model["large"]).fill_(torch.nan)
                push.wait()
                memory(model["small"]).fill_(torch.nan)
                continue
            assert weights.pull() == version
            with weights.reading():
                for name, x in model.items():
                    expected = part(wholes[name], axis, mesh.get_local_rank()).bfloat16()
                    assert torch.equal(memory(x), expected), (name, version)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def part(whole: Tensor, axis: int, coord: int) -> Tensor:
    return whole.chunk(2, axis)[coord] if whole.ndim else whole


def memory(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def lost() -> None:
    """A rank dies before the second version."""
    with linked(timeout_s=10.0) as (source, _, link):
        weights = link.weights({"w": torch.full((1000,), float(source.is_member))})
        weights._lazy = True
        weights.push(1).wait() if source.is_member else weights.pull()
        if link.mesh.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        weights.push(2).wait() if source.is_member else weights.pull()


def test_tensors_along_a_queue(pool: Pool) -> None:
    pool.run(tensors, ranks=4)


@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_versions_along_a_queue(pool: Pool, staging: Staging) -> None:
    pool.run(versions, staging, ranks=4)


@pytest.mark.faults
def test_a_rank_is_lost_while_others_wait_for_a_queue(pool: Pool) -> None:
    """The host waits for the device, so the watchdog ends the process of every other rank, and says who was lost."""
    ended = pool.call(lost, ranks=4, limits=Limits(90.0, 60.0), capture=True)
    assert [end.text for end in ended] == ["ended with exit code 1"] * 3 + ["was killed by SIGKILL"]
    assert "rank 3 does not answer: its process has ended" in "".join(end.err for end in ended)

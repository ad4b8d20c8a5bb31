"""The simulator matches Gloo to the bit, and each simulated rank has its own state."""

from __future__ import annotations

import contextvars
import os
import random
import sys
import threading
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import BarrierTimeout, MeshcommError, RankFailed, StoreTimeout, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.reductions import REDUCTIONS
from meshcomm.simulator.run import simulate_script
from meshcomm.testing import Pool
from meshcomm.transport.support import reduce_refusal
from tests.simulator import random_programs
from tests.simulator.random_programs import digest

ROOT = Path(__file__).parents[2]
DIMS = {"dp": 4, "tp": 2}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


# -- the same as Gloo ---------------------------------------------------------------------------


def every_sum(mesh: Mesh) -> dict[str, str]:
    """The digest of every reduction, by its arguments. The values are such that a sum depends on the order."""
    found = {}
    asked = [
        ("dp", length, op) for length in (1, 40, 3000) for op in (REDUCTIONS if length == 40 else ("sum",))
    ]
    for (dims, length, op), dtype in product([*asked, ("tp", 40, "avg"), ("all", 3000, "sum")], DTYPES):
        if reduce_refusal("gloo", op, dtype) is not None:
            continue
        generator = torch.Generator().manual_seed(length * 31 + mesh.rank)
        x = torch.randn(length * 8, generator=generator)
        x = (torch.complex(x, x.flip(0)) if dtype.is_complex else x).to(dtype)
        key = f"{op} of {dtype} {length} along {dims}"
        factor = 0.3 if op == "premul_sum" else None
        kept = mesh.all_reduce(dims, x[:length].clone(), op, factor=factor)
        found[f"all_reduce {key}"] = digest(kept)
        found[f"reduce_scatter {key}"] = digest(mesh.reduce_scatter(dims, x, 0, op, factor=factor))
        at = mesh.reduce(dims, x[:length], mesh.size(dims) - 1, op, factor=factor)
        found[f"reduce {key}"] = digest(at)
    return found


def every_sum_on_gloo() -> dict[str, str]:
    with meshcomm.init(dims=DIMS, merge={"all": ("dp", "tp")}, device="cpu", timeout_s=60) as mesh:
        return every_sum(mesh)


def test_sums_are_those_of_gloo_to_the_bit(pool: Pool) -> None:
    ours = meshcomm.simulate(every_sum, dims=DIMS, merge={"all": ("dp", "tp")})
    theirs = pool.run(every_sum_on_gloo)
    for rank in range(8):
        differ = [key for key, value in ours[rank].items() if value != theirs[rank][key]]
        assert not differ, (rank, differ[:5])


def test_random_programs_under_every_schedule_are_those_of_gloo(pool: Pool) -> None:
    seeds = range(24)
    theirs = pool.run(random_programs.on_gloo, seeds, ranks=6, timeout_s=100)
    for schedule in range(4):
        ours = meshcomm.simulate(
            random_programs.run_all,
            dims=random_programs.DIMS,
            merge=random_programs.MERGE,
            rank_order=random_programs.ORDER,
            args=(seeds,),
            schedule_seed=schedule,
        )
        for rank in range(6):
            for seed in seeds:
                assert ours[rank][seed] == theirs[rank][seed], (schedule, seed, rank)


# -- a rank is as a process ---------------------------------------------------------------------


def test_results_come_by_rank_and_every_rank_has_its_own_arguments() -> None:
    given = {"seen": []}

    def program(mesh: Mesh, notes: dict[str, list[int]], scale: int) -> tuple[int, dict[str, int], float]:
        notes["seen"].append(mesh.rank)
        mesh.barrier()
        assert notes["seen"] == [mesh.rank]
        return mesh.rank, mesh.coords, mesh.all_reduce("dp", torch.tensor(scale * mesh.rank)).item()

    results = meshcomm.simulate(program, dims=DIMS, args=(given, 10))
    assert given == {"seen": []}
    assert [rank for rank, _, _ in results] == list(range(8))
    assert results[5][1] == {"dp": 2, "tp": 1}
    assert [total for _, _, total in results] == [120, 160] * 4


_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("test_variable", default="none")


def test_generators_default_dtype_environment_and_context_are_a_ranks_own() -> None:
    torch.manual_seed(123)
    random.seed(5)
    np.random.seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    environment = dict(os.environ)
    _VARIABLE.set("caller")

    def program(mesh: Mesh) -> tuple[Any, ...]:
        assert _VARIABLE.get() == "caller"
        _VARIABLE.set(str(mesh.rank))
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(mesh.rank)
        assert os.environ["WORLD_SIZE"] == "8"
        unseeded = torch.rand(1).item(), random.random(), np.random.rand()
        mesh.barrier()
        torch.manual_seed(mesh.rank % 2)
        torch.set_default_dtype(torch.float64 if mesh.rank == 3 else torch.float32)
        first = torch.rand(2)
        mesh.barrier()
        second = torch.rand(2)
        mesh.barrier()
        assert torch.get_default_dtype() == (torch.float64 if mesh.rank == 3 else torch.float32)
        assert _VARIABLE.get() == os.environ["RANK"] == str(mesh.rank)
        return unseeded, torch.cat([first, second]).double().tolist()

    results = meshcomm.simulate(program, dims=DIMS, schedule_seed=3)
    assert len({unseeded for unseeded, _ in results}) == 8
    for rank, (_, drawn) in enumerate(results):
        if rank != 3:  # other dtype, other numbers
            alone = torch.rand(4, generator=torch.Generator().manual_seed(rank % 2))
            assert drawn == alone.double().tolist()
    assert results == meshcomm.simulate(program, dims=DIMS, schedule_seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert torch.get_default_dtype() == torch.float32
    assert dict(os.environ) == environment and _VARIABLE.get() == "caller"


def test_one_rank_runs_at_a_time_and_no_thread_is_left() -> None:
    before, inside, threads = threading.active_count(), [], torch.get_num_threads()

    def program(mesh: Mesh) -> None:
        for _ in range(5):
            inside.append(mesh.rank)
            assert len(inside) == 1
            time.sleep(0)
            inside.pop()
            mesh.barrier()

    meshcomm.simulate(program, dims=DIMS)
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads


def test_meshes_inside_merged_created_partial_and_closed() -> None:
    def program(world: Mesh) -> Any:
        with meshcomm.init(
            dims={"pp": 2, "dp": 2, "tp": 2},
            merge={"model": ("pp", "tp")},
            views={"expert": {"pp": 2, "edp": 1, "ep": 4}},
            rank_order=[6, 3, 1, 4, 0, 7, 5, 2],
        ) as mesh:
            sums = [mesh.all_reduce(d, torch.tensor(mesh.rank)).item() for d in ("model", ("pp", "tp"), "ep")]
            mesh.create_group("data", ("tp", "dp"))
            sums.append(mesh.all_reduce("data", torch.tensor(mesh.rank)).item())
            expected = [sum(mesh.ranks(d)) for d in ("model", ("pp", "tp"), "ep", "data")]
            assert sums == expected
            few = meshcomm.init(dims={"x": 3}, ranks=[1, 4, 6])
            assert few.is_member == (mesh.rank in (1, 4, 6))
            if few.is_member:
                assert few.all_reduce("x", torch.tensor(1)).item() == 3
            few.close()
            mesh.barrier()
        with pytest.raises(meshcomm.MeshcommError, match="is closed"):
            mesh.all_reduce("dp", torch.ones(1))
        with pytest.raises(MeshcommError, match="have met already: world_size has no effect here"):
            meshcomm.init(dims={"all": -1}, world_size=8)
        total = torch.tensor(1)
        dist.all_reduce(total, group=world.group("world"))
        assert total.item() == 8
        return str(world).splitlines()[0]

    assert meshcomm.simulate(program, dims={"world": 8})[0].startswith("mesh of 8 ranks")


def test_ranks_that_mean_different_meshes_hear_of_it() -> None:
    def program(world: Mesh) -> None:
        meshcomm.init(dims={"dp": 2, "tp": 2} if world.rank else {"dp": 4})

    with pytest.raises(RankFailed, match="the mesh differs between ranks: rank 0 of 4 is mismatched"):
        meshcomm.simulate(program, dims={"world": 4})


def test_the_store_waits_counts_and_lists() -> None:
    def program(mesh: Mesh) -> None:
        store, me = mesh.store, mesh.rank
        store.set(f"from/{me}", str(me))
        assert store.get(f"from/{(me + 1) % 8}") == str((me + 1) % 8).encode()
        store.add("count", me)
        store.append("log", b".")
        mesh.barrier()
        assert store.add("count", 0) == 28 and store.get("log") == b"." * 8
        under = torch.distributed.PrefixStore("from", store.torch_store)
        assert under.get("3") == b"3" and not under.check(["no"])
        mesh.barrier()
        if me == 0:
            assert store.delete_key("from/3") and not store.delete_key("from/3")
            store.set("deleted", "")
        while not store.check(["deleted"]):  # other ranks run while this one polls
            pass
        assert not store.check(["from/3"])
        assert store.compare_set("turn", "", "a") in (b"a", b"b")
        # No rank sets the key, so a wait that is shorter than the mesh's own times out. No time passes.
        with pytest.raises(StoreTimeout, match='"never" not set within 20 s'):
            store.get("never", timeout_s=20)
        mesh.barrier()
        if me:
            with pytest.raises(BarrierTimeout, match="1 of 8 ranks did not arrive within 30 s") as caught:
                mesh.debug.monitored_barrier(timeout_s=30)
            assert caught.value.missing == (0,)

    began = time.monotonic()
    meshcomm.simulate(program, dims=DIMS)
    assert time.monotonic() - began < 20


def test_other_seeds_are_other_schedules() -> None:
    def program(mesh: Mesh) -> bytes:
        mesh.store.compare_set("first", "", str(mesh.rank))
        return mesh.store.get("first")

    by_seed = [meshcomm.simulate(program, dims=DIMS, schedule_seed=seed) for seed in range(5, 9)]
    assert len({results[0] for results in by_seed}) > 1


def test_what_simulate_is_told_is_checked() -> None:
    for keywords, match in (
        ({}, "was not told which mesh to create"),
        ({"config": ROOT / "configs/mesh.toml", "dims": DIMS}, "given two meshes"),
        ({"config": ROOT / "configs/mesh.toml", "options": {"dp": {"backend": "nccl"}}}, "given two meshes"),
        ({"dims": {"dp": 2}, "options": {"dp": {"backnd": "nccl"}}}, "options.dp.backnd: unknown key"),
        ({"dims": {"dp": -1}}, "-1"),
        ({"dims": {"dp": 3}, "world_size": 8}, "8"),
    ):
        with pytest.raises(MeshcommError, match=match):
            meshcomm.simulate(lambda mesh: None, **keywords)  # type: ignore[arg-type]
    sizes = meshcomm.simulate(lambda mesh: mesh.size("dp"), dims={"dp": -1, "tp": 2}, world_size=6)
    assert sizes == [3] * 6
    assert meshcomm.simulate(lambda mesh: mesh.rank, ROOT / "configs/mesh.toml")[-1] == 7
    refused = meshcomm.simulate(_bitwise, dims={"dp": 2}, options={"dp": {"backend": "nccl"}})
    assert refused == ["all_reduce along \"dp\" on rank 0 (dp=0): bor of int64 is not possible on nccl",
                       "all_reduce along \"dp\" on rank 1 (dp=1): bor of int64 is not possible on nccl"]  # fmt: skip


def _bitwise(mesh: Mesh) -> str:
    with pytest.raises(UnsupportedOp) as caught:
        mesh.all_reduce("dp", torch.tensor(mesh.rank), "bor")
    return caught.value.what


def test_a_dropped_handle_is_an_error_and_no_shower_of_warnings() -> None:
    def program(mesh: Mesh) -> None:
        mesh.all_reduce("dp", torch.ones(1), async_op=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(meshcomm.MeshcommError, match="ended without waiting for 8 handles"):
            meshcomm.simulate(program, dims=DIMS)


# -- scripts ------------------------------------------------------------------------------------


def script(tmp_path: Path, text: str, **keywords: Any) -> int:
    file = tmp_path / "script.py"
    file.write_text(text)
    options: dict[str, Any] = {"arguments": (), "overrides": (), "world": None, "seed": 0, **keywords}
    return simulate_script(ROOT / "configs/mesh.toml", file, **options)


def test_examples_run_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name, config, said in (
        (
            "hello_mesh",
            ROOT / "configs/mesh.toml",
            "rank 7 (pp=1 dp=1 tp=1): pp [3, 7] sum 10, dp [5, 7] sum 12",
        ),
        ("two_meshes", None, "rank 7: in the model, {'pp': 2, 'tp': 1}, features [1.0, 1.0]"),
    ):
        path = ROOT / "examples" / f"{name}.py"
        assert simulate_script(config, path, (), (), None if config else 8, 0) == 8
        assert capsys.readouterr().out.count(said) == 1


def test_a_script_has_its_own_main_arguments_and_exit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
import dataclasses, os, pickle, sys
import meshcomm, torch
@dataclasses.dataclass
class Note:
    rank: int
mesh = meshcomm.init()
sys.argv.append(str(mesh.rank))
mesh.barrier()
assert sys.argv == [__file__, "--fast", str(mesh.rank)] and os.environ["RANK"] == str(mesh.rank)
assert sys.modules["__main__"].mesh is mesh and __name__ == "__main__"
assert pickle.loads(pickle.dumps(Note(mesh.rank))) == Note(mesh.rank)
got = mesh.objects.broadcast("dp", Note(mesh.rank).rank, src=0)
mesh.close()
sys.exit(0)
"""
    argv, main = sys.argv, sys.modules["__main__"]
    assert script(tmp_path, text, arguments=["--fast"]) == 8
    assert sys.argv is argv and sys.modules["__main__"] is main
    with pytest.raises(RankFailed, match="ranks 0 1 2 3 4 5 6 7 of 8 failed: SystemExit: 3"):
        script(tmp_path, "import sys; sys.exit(3)")
    with pytest.raises(MeshcommError, match="is not a Python program"):
        script(tmp_path, "def")
    with pytest.raises(RankFailed, match=r"script.py:1:\n +ZeroDivisionError"):
        script(tmp_path, "1 / 0")


def test_the_store_of_a_simulated_mesh_counts_and_lists_its_keys() -> None:
    def body(mesh: Mesh) -> tuple[int, list[str]]:
        store = mesh.store.torch_store
        before = store.num_keys()
        if mesh.rank == 0:
            store.multi_set(["a", "b"], ["1", "2"])
        store.wait(["a", "b"])
        return store.num_keys() - before if mesh.rank == 0 else 2, sorted(store.list_keys())

    for new, keys in meshcomm.simulate(body, dims={"dp": 2}):
        assert new == 2
        assert {"a", "b"} <= set(keys)

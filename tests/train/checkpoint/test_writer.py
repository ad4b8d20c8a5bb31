"""State with every kind of part moves from any mesh to any other; checkpoints are written while training runs."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcomm
from meshcomm.config import TrainConfig
from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.train import Attempt, Checkpoints
from meshcomm.train.checkpoint import folder as checkpoint_folder
from meshcomm.train.checkpoint import writer as checkpoint_writer
from meshcomm.train.checkpoint.checkpoints import read, write
from meshcomm.train.checkpoint.folder import complete
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.checkpoint.writer import Save, divide
from tests.sizes import train_of
from tests.train.checkpoint.test_checkpoints import names

pytestmark = pytest.mark.long


def settings(out: Path | str) -> TrainConfig:
    return TrainConfig(**train_of(9, 8, 1, out=str(out), checkpoint_every=1, checkpoint_async=True, keep=2))


def lock(step: int) -> Lock:
    return Lock(step, 0.0, "", {}, {}, {})


def config(dims: dict[str, int], views: dict[str, Any] | None = None) -> dict[str, Any]:
    mesh = {"dims": dims, "views": views or {}, "device": "cpu", "timeout_s": 30.0, "validate_calls": 0}
    return {"mesh": mesh}


# -- state of every kind, on any mesh -------------------------------------------------------------

WHOLE = {
    "layers.0.up.weight": (12, 6),  # split along tp and sharded along fsdp on the same axis
    "layers.0.down.weight": (6, 12),  # on another axis; 6 rows do not divide by 4
    "layers.0.norm.weight": (5,),  # equal along tp; sharded unevenly
    "layers.1.up.weight": (12, 6),
    "layers.1.down.weight": (6, 12),
    "layers.1.norm.weight": (5,),
    "layers.1.experts.w1": (4, 8, 3),  # experts along ep, rows along tp
    "embed.weight": (10, 4),  # on the first stage and on the last
    "norm.weight": (3,),  # plain, on the last stage
}


def value(name: str, step: int) -> Tensor:
    """The whole tensor of a name at a step; each name and step has other numbers."""
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(WHOLE.get(name, ()), generator=torch.Generator().manual_seed(seed))


class Part(nn.Module):
    """One weight, split along tp if an axis is given."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], axis: int | None) -> None:
        super().__init__()
        data: Tensor = torch.zeros(shape)
        if axis is not None and mesh.size("tp") > 1:
            data = distribute_tensor(data, mesh["tp"], [Shard(axis)], src_data_rank=None)
        self.weight = nn.Parameter(data)


class Layer(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = Part(mesh, (12, 6), 0)
        self.down = Part(mesh, (6, 12), 1)
        self.norm = Part(mesh, (5,), None)
        fully_shard(self, mesh=mesh["fsdp"])


def state_of(mesh: Mesh, stages: int) -> dict[str, Tensor]:
    """The state of this rank by global names, filled with zeros. The stages of one rank are `pp` apart."""
    size, mine = mesh.size("pp"), mesh.coord("pp")
    found: dict[str, Tensor] = {}
    for stage in range(mine, stages, size):
        for layer in range(2):
            if layer * stages // 2 == stage:
                module = Layer(mesh)
                named = {f"layers.{layer}.{name}": p for name, p in module.named_parameters()}
                if layer == 1:
                    along = tuple(dim for dim in ("ep", "tp") if mesh.size(dim) > 1)
                    shape = (4 // mesh.size("ep"), 8 // mesh.size("tp"), 3)
                    experts: Tensor = torch.zeros(shape)
                    if along:
                        axes = [Shard(["ep", "tp"].index(dim)) for dim in along]
                        experts = DTensor.from_local(experts, mesh[along], axes, run_check=False)
                    found["layers.1.experts.w1"] = experts
                found.update({name: p.detach() for name, p in named.items()})
        if stage in (0, stages - 1):
            found["embed.weight"] = torch.zeros(10, 4)
        if stage == stages - 1:
            found["norm.weight"] = torch.zeros(3)
    return {
        **{f"model.{name}": tensor for name, tensor in found.items()},
        **{f"optimizer.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in found.items()},
    }


def of_weight(name: str) -> str:
    return name.removeprefix("model.").removeprefix("optimizer.").removesuffix(".exp_avg")


def expected(name: str, step: int) -> Tensor:
    return value(of_weight(name), step + (100 if name.startswith("optimizer.") else 0))


def own(name: str, tensor: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a tensor, and the values that it should have at a step."""
    whole = expected(name, step)
    if not isinstance(tensor, DTensor):
        return tensor, whole
    part: Any = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor.to_local(), part.to_local()


def put(state: dict[str, Tensor], step: int) -> None:
    for name, tensor in state.items():
        part, values = own(name, tensor, step)
        part.copy_(values)


def differing(state: dict[str, Tensor], step: int) -> list[str]:
    return [name for name, tensor in state.items() if not torch.equal(*own(name, tensor, step))]


MESHES: list[tuple[dict[str, int], dict[str, dict[str, int]], int]] = [
    ({"pp": 2, "fsdp": 2, "tp": 2}, {"expert": {"pp": 2, "ep": 2, "tp": 2}}, 4),
    ({"pp": 1, "fsdp": 4, "tp": 2}, {"expert": {"pp": 1, "ep": 4, "tp": 2}}, 1),
    # The inner dims are outside, so ranks have other parts.
    ({"tp": 2, "fsdp": 4, "pp": 1}, {"expert": {"tp": 2, "edp": 2, "ep": 2, "pp": 1}}, 2),
]


def saved_and_loaded_everywhere(folder: Path) -> list[str]:
    """Each mesh saves two steps, and loads the steps of all meshes before it. In the end the first mesh loads all of them.

    Returns the differences.
    """
    wrong: list[str] = []
    saved: list[int] = []
    for number in (*range(len(MESHES)), 0):
        dims, views, stages = MESHES[number]
        with meshcomm.init(config(dims, views)) as mesh:
            state = state_of(mesh, stages)
            with Checkpoints(mesh, settings(folder / str(number))) as checkpoints:
                if number not in saved:
                    checkpoints.begin(Attempt(), lock(0))
                    for step in (1, 2):
                        put(state, step)
                        checkpoints.save(lock(step), {**state, "run.losses": torch.arange(float(step))})
                        put(state, 9)  # training continues during the write
                    saved.append(number)
            for other in saved:
                for step in (2, 1):
                    losses = torch.zeros(step)
                    path = folder / str(other) / "checkpoints" / f"step-{step:06d}"
                    read(mesh, {**state, "run.losses": losses}, path)
                    wrong += [f"{other} -> {number}, step {step}: {name}" for name in differing(state, step)]
                    if losses.tolist() != list(range(step)):
                        wrong.append(f"{other} -> {number}: losses {losses}")
    return wrong


@pytest.mark.parity
def test_every_kind_of_state_goes_from_any_mesh_to_any_other_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(saved_and_loaded_everywhere, tmp_path, timeout_s=120) == [[]] * 8
    names = {f"model.{name}" for name in WHOLE} | {f"optimizer.{name}.exp_avg" for name in WHOLE}
    sizes = set()
    for number in range(len(MESHES)):
        for step in (1, 2):
            path = tmp_path / str(number) / "checkpoints" / f"step-{step:06d}"
            saved = Saved(path)
            assert saved.kinds.keys() == names | {"run.losses"}
            whole = {name: torch.zeros(saved.kinds[name].shape) for name in names}
            saved.fill(whole)
            for name, tensor in whole.items():
                assert torch.equal(tensor, expected(name, step)), (number, step, name)
            # Each part is written once: the parts in all files together are as large as the tensors.
            described = pickle.loads((path / ".metadata").read_bytes()).state_dict_metadata
            parts = [chunk for meta in described.values() for chunk in meta.chunks]
            sizes.add((step, sum(chunk.sizes.numel() for chunk in parts)))
    assert sizes == {(s, 2 * sum(torch.Size(shape).numel() for shape in WHOLE.values()) + s) for s in (1, 2)}


# -- saving while training runs -------------------------------------------------------------------


@contextlib.contextmanager
def instead(name: str, function: Any) -> Iterator[None]:
    """Replace a function of the writer, and put it back afterwards, because the processes are used again."""
    before = getattr(checkpoint_writer, name)
    setattr(checkpoint_writer, name, function)
    try:
        yield
    finally:
        setattr(checkpoint_writer, name, before)


def held_back(gate: threading.Event) -> contextlib.AbstractContextManager[None]:
    """Hold files back until `gate` opens."""
    write_part = checkpoint_writer.write_part

    def writing(*args: Any) -> None:
        assert gate.wait(20)
        write_part(*args)

    return instead("write_part", writing)


def trained_during_saves(out: Path) -> list[Any]:
    """The checkpoints while step 2's files are held back on all ranks, then on one rank, and at the end."""
    gate = threading.Event()
    gate.set()
    seen: list[Any] = []
    with meshcomm.init(config({"dp": 2, "tp": 2})) as mesh:
        state = {"w": torch.zeros(3000), "part": distribute_tensor(torch.zeros(8, 4), mesh["tp"], [Shard(0)])}

        def step(number: int) -> None:
            # The training's own calls continue with the right values.
            x = torch.full((4,), float(mesh.rank + number))
            assert mesh.all_reduce("dp", x).tolist() == [2 * number + sum(mesh.ranks("dp"))] * 4
            for tensor in state.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(float(number))

        with Checkpoints(mesh, settings(out)) as checkpoints, held_back(gate):
            checkpoints.begin(Attempt(), lock(0))
            step(1)
            checkpoints.save(lock(1), state)
            checkpoints.finish()
            gate.clear()
            step(2)
            checkpoints.save(lock(2), state)
            for number in range(3, 9):
                checkpoints.poll()
                step(number)
            mesh.barrier()
            seen.append(names(out))
            mesh.barrier()
            if mesh.rank != 3:
                gate.set()
                while not (out / "checkpoints" / "step-000002.saving" / f"__{mesh.rank}.written").exists():
                    time.sleep(0.002)
            for number in range(9, 12):
                checkpoints.poll()
                step(number)
            mesh.barrier()
            seen.append(names(out))
            mesh.barrier()
            gate.set()
            # The next save waits for the one before.
            checkpoints.save(lock(11), state)
            seen.append("step-000002" in names(out))
        seen.append(names(out))
        return seen


def test_training_goes_on_while_files_are_written(pool: Pool, tmp_path: Path) -> None:
    before, last = ["job", "latest", "step-000001"], ["job", "latest", "step-000002", "step-000011"]
    for rank, seen in enumerate(pool.run(trained_during_saves, tmp_path, ranks=4)):
        under_way = [*before, "step-000002.saving"]
        assert seen == [under_way, under_way, True, last], rank
    whole = {"w": torch.zeros(3000), "part": torch.zeros(8, 4)}
    for step in (2, 11):
        # The files have the values at the time of the save, whatever later steps have made of the state.
        Saved(tmp_path / "checkpoints" / f"step-{step:06d}").fill(whole)
        assert all((tensor == step).all() for tensor in whole.values())


def without_space(out: Path, moment: str) -> tuple[int, str, str, list[str]]:
    """The step at which this rank learns that the save of step 2 failed, and the words of the error."""
    with meshcomm.init(config({"dp": 2, "tp": 2})) as mesh:
        # Enough tensors that each of the four ranks writes some of them.
        state = {f"w{n}": torch.ones(300) for n in range(32)}
        checkpoints = Checkpoints(mesh, settings(out))
        checkpoints.begin(Attempt(), lock(0))
        checkpoints.save(lock(1), state)
        checkpoints.finish()

        def full(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def part_is_lost(folder: Path, ranks: Any) -> None:
            (folder / "__2_0.distcp").unlink()
            write_metadata(folder, ranks)

        write_metadata = checkpoint_writer.write_metadata
        faults = {"write_part": (2, "write_part", full), "write_metadata": (0, "write_metadata", full)}
        rank, name, fault = faults.get(moment, (0, "write_metadata", part_is_lost))
        heard, text, cause = 0, "", ""
        with instead(name, fault) if mesh.rank == rank else contextlib.nullcontext():
            checkpoints.save(lock(2), state)
            for step in range(3, 20_000):
                try:
                    checkpoints.poll()
                except TrainingError as error:
                    heard, text, cause = step, str(error), type(error.__cause__).__name__
                    break
                mesh.all_reduce("dp", torch.ones(1))
            checkpoints.poll()  # said once
            checkpoints.finish()
        mesh.barrier()
        return heard, text, cause, names(out)


@pytest.mark.parametrize(
    ("moment", "rank", "said"),
    [
        ("write_part", "rank 2 (dp=1 tp=0) could not save into {}", "No space left on device: "),
        ("write_metadata", "rank 0 (dp=0 tp=0) could not save into {}", "No space left on device: "),
        ("a part is lost", "a part of the checkpoint is missing: __2_0.distcp", "is not there"),
    ],
)
def test_a_failed_async_save_is_raised_on_all_ranks(
    pool: Pool, tmp_path: Path, moment: str, rank: str, said: str
) -> None:
    found = pool.run(without_space, tmp_path, moment, ranks=4, timeout_s=60)
    steps, texts, causes, left = zip(*found, strict=True)
    assert len(set(steps)) == 1 and steps[0] > 0
    folder = tmp_path / "checkpoints"
    for text in texts:
        lines = text.splitlines()
        assert rank.format(f"{folder}/step-000002.saving") in lines[0] and said in lines[1]
        if moment != "a part is lost":
            assert (
                lines[-1]
                == f"  try:      make space, then train.resume = true continues from {folder}/step-000001"
            )
    assert moment == "a part is lost" or causes[2 if moment == "write_part" else 0] == "OSError"
    # The failed save has freed its space.
    assert left[0] == ["job", "latest", "step-000001"]


def ended_by_an_error(out: Path) -> str:
    """The training raises its own error while the save is held back. The error waits for the save."""
    gate = threading.Event()
    with meshcomm.init(config({"dp": 2})) as mesh:
        try:
            with held_back(gate), Checkpoints(mesh, settings(out)) as checkpoints:
                checkpoints.begin(Attempt(), lock(0))
                checkpoints.save(lock(1), {"w": torch.ones(30), "v": torch.ones(30)})
                threading.Timer(0.05, gate.set).start()
                raise RuntimeError(f"loss of rank {mesh.rank}")
        except RuntimeError as error:
            # Each rank has waited until the folder has its final name, so no launcher kills the rank that renames it.
            return f"{error}, {[path.name for path in complete(out / 'checkpoints')]}"


def never_written(out: Path) -> tuple[str, list[str]]:
    """Rank 1's disk does not answer: the end waits for mesh.timeout_s and names rank 1."""
    gate = threading.Event()
    quick = config({"dp": 2})
    quick["mesh"]["timeout_s"] = 1.5
    with meshcomm.init(quick) as mesh, held_back(gate):
        if mesh.rank == 0:
            gate.set()
        checkpoints = Checkpoints(mesh, settings(out))
        checkpoints.begin(Attempt(), lock(0))
        checkpoints.save(lock(1), {"w": torch.ones(30), "v": torch.ones(30)})
        try:
            checkpoints.finish()
        except MeshcommError as error:
            return str(error), [path.name for path in complete(out / "checkpoints")]
        finally:
            gate.set()
    return "", []


def test_the_end_and_errors_wait_for_a_save_that_is_under_way(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(ended_by_an_error, tmp_path / "a", ranks=2)
    assert found == [f"loss of rank {rank}, ['step-000001']" for rank in range(2)]
    for rank, (text, there) in enumerate(pool.run(never_written, tmp_path / "b", ranks=2)):
        assert text.startswith("rank 1 (dp=1) could not save into "), (rank, text)
        assert there == []


# -- one save in a folder --------------------------------------------------------------------------


def test_a_folder_belongs_to_one_save_and_only_its_own_files_are_removed(tmp_path: Path) -> None:
    state, folder = {"w": torch.arange(3.0)}, tmp_path / "mine"
    with meshcomm.init(config({"one": 1})) as mesh:

        def save() -> Save:
            return Save(mesh, divide(mesh, state), folder, complete=lambda: lock(1).write(folder))

        # Both saves have found the folder free. The second one begins while the first one writes, or when it has just ended.
        first = save()
        with pytest.raises(TrainingError, match="is there already") as caught:
            save()
        assert "another save is writing there" in caught.value.given and ", or save into" in caught.value.hint
        first.now()
        left = sorted(path.name for path in folder.iterdir())
        assert left == [".metadata", "__0_0.distcp", "lock.json"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_folder, "check_free", lambda _: None)
            with pytest.raises(TrainingError, match="is there already"):
                save()
        assert sorted(path.name for path in folder.iterdir()) == left
        found = {"w": torch.zeros(3)}
        read(mesh, found, folder)
        assert torch.equal(found["w"], state["w"])

        def fails(folder: Path, _: Any) -> None:
            (folder / "foreign").write_text("kept")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        folder = tmp_path / "other"
        with instead("write_metadata", fails), pytest.raises(TrainingError, match="could not save"):
            save().now()
        assert [path.name for path in folder.iterdir()] == ["foreign"]


def test_the_holder_of_the_lease_writes_over_the_rest_of_an_interrupted_save(tmp_path: Path) -> None:
    draft = tmp_path / "checkpoints" / "step-000001.saving"
    draft.mkdir(parents=True)
    (draft / "__0_0.distcp").write_text("half")
    with meshcomm.init(config({"one": 1})) as mesh, Checkpoints(mesh, settings(tmp_path)) as checkpoints:
        checkpoints.save(lock(1), {"w": torch.ones(3)})
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step-000001"]


def test_of_saves_at_the_same_time_one_has_the_folder(tmp_path: Path) -> None:
    for number in range(20):
        folder, ready = tmp_path / f"{number}", threading.Barrier(4)
        if number % 2:
            folder.mkdir()
        won: list[str] = []

        def take(token: str, folder: Path = folder, ready: Any = ready, won: list[str] = won) -> None:
            ready.wait()
            with contextlib.suppress(TrainingError):
                checkpoint_folder.claim(folder, token)
                won.append(token)

        threads = [threading.Thread(target=take, args=(str(n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and checkpoint_folder.is_claimed(folder, won[0])


def saved_into_two(folder: Path) -> str:
    with meshcomm.init(config({"dp": 2})) as mesh, pytest.raises(TrainingError) as caught:
        write(mesh, {"w": torch.ones(3)}, folder / f"of_{mesh.rank}", lock(1))
    return str(caught.value)


def test_ranks_that_save_into_different_folders_leave_nothing(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(saved_into_two, tmp_path, ranks=2):
        assert (
            "rank 1 (dp=1) could not save into " in text
            and "of_1 is not there: this rank does not see" in text
        )
    assert not list(tmp_path.iterdir())


# -- who writes what ------------------------------------------------------------------------------


def divided(_: str) -> tuple[list[str], str, str]:
    """The parts that this rank writes, and two errors: for a value that is no tensor, and for other sizes on one rank."""
    with meshcomm.init(config({"dp": 2, "tp": 2})) as mesh:
        tp = mesh.coord("tp")
        part: Any = distribute_tensor(torch.zeros(4, 4), mesh["dp"], [Shard(0)])
        state = {f"whole.{n}": torch.zeros(4) for n in range(20)} | {f"only.{tp}": part}
        # Loaders of the same samples may have states of different lengths.
        state["run.data.0.of.1"] = torch.zeros(4 + mesh.rank)
        parts = divide(mesh, state)
        with pytest.raises(TrainingError) as caught:
            divide(mesh, {"optimizer.bad": "no tensor" if mesh.rank == 3 else torch.zeros(1)})  # type: ignore[dict-item]
        with pytest.raises(TrainingError) as other:
            divide(mesh, {"model.bias": torch.zeros(2 + (mesh.rank == 3))})
        return [f"{part.name} {part.box[0]}" for part in parts], str(caught.value), str(other.value)


def test_each_part_is_written_once(pool: Pool) -> None:
    ranks = pool.run(divided, "", ranks=4)
    whole = [f"whole.{n} (0,)" for n in range(20)]
    parts = [f"only.{tp} ({row}, 0)" for tp in (0, 1) for row in (0, 2)]
    written = [part for mine, _, _ in ranks for part in mine]
    assert sorted(written) == sorted([*whole, *parts, "run.data.0.of.1 (0,)"])
    assert all(len(mine) > 2 for mine, _, _ in ranks)  # each rank writes some of the shared state
    assert all(text.startswith("rank 3 (dp=1 tp=1) could not divide a checkpoint") for _, text, _ in ranks)
    assert all("ranks that hold the same state differ in model.bias" in text for _, _, text in ranks), ranks

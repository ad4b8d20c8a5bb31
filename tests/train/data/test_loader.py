"""Samples that workers read ahead, loaders that resume at their place, and evaluation by a function."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError, TrainingError
from meshcomm.testing import Pool
from meshcomm.train import Callback, Trainer, run
from meshcomm.train.data.loader import check_epoch
from tests.sizes import model_of, train_of
from tests.train.runs import config_on, losses_or_error, metrics, trained

STEPS, SEQUENCE = 6, 8
BASE: dict[str, Any] = {
    "mesh": {"dims": {"one": 1}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {},
    "model": model_of(2, 16, 2, 2, 64),
    "data": {"seq_len": SEQUENCE, "max_bytes": 20_000},
    "train": train_of(STEPS, 8, 2, seed=7, dtype="float64", log_every=1),
}


def on(dims: str, out: Path, *overrides: str, **changed: Any) -> Config:
    return config_on({**BASE, **changed}, dims, f'train.out="{out}"', *overrides)


# -- workers --------------------------------------------------------------------------------------


class _Watch(Callback):
    """Counts, after each step, the processes that the rank has started since the run began."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_start(self, start: Any) -> None:
        """See Callback."""
        self._before = _children()

    def on_step(self, step: Any) -> None:
        """See Callback."""
        self.seen.append(len(self.workers()))

    def workers(self) -> list[int]:
        return [each for each in _children() if each not in self._before]


def _children() -> list[int]:
    own = f"/proc/self/task/{os.getpid()}/children"
    return [int(each) for each in Path(own).read_text().split()]


def watched(config: Config) -> tuple[list[float], list[int], int, int]:
    """The losses, the number of workers in each step and after the run, and a random number after the run."""
    torch.manual_seed(3)
    watch = _Watch()
    losses = trained(config, watch).losses
    ended = time.monotonic() + 10
    while watch.workers() and time.monotonic() < ended:
        time.sleep(0.01)
    return list(losses), watch.seen, len(watch.workers()), int(torch.randint(2**40, ()))


def test_workers_read_what_the_rank_would(pool: Pool, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) * 7 % 251)
    data = {"seq_len": SEQUENCE, "tokens": [str(tmp_path / "tokens.npy")]}
    model = {**BASE["model"], "vocab_size": 256}
    found = {}
    for workers in (0, 2):
        config = on("dp=2", tmp_path / f"{workers}", f"data.workers={workers}", data=data, model=model)
        found[workers] = pool.run(watched, config, ranks=2)
    for (losses, none, _, number), (ahead, seen, left, other) in zip(*found.values(), strict=True):
        assert losses == ahead and number == other
        assert set(none) == {0} and seen[0] == 2 and left == 0


class _Fails(Dataset[Any]):
    """Sample 41 is damaged; the digest does not cover it."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> list[int]:
        if index == 41:
            raise MeshcommError("sample 41 is damaged", given="nothing", expected="a sample")
        return [index] * (SEQUENCE + 1)


class _Ends(_Fails):
    """Reading sample 41 kills its process, as on a host without memory."""

    def __getitem__(self, index: int) -> list[int]:
        if index == 41:
            os.kill(os.getpid(), signal.SIGKILL)
        return [index] * (SEQUENCE + 1)


class _Hangs(_Fails):
    """Reading sample 41 waits for a disk that is gone."""

    def __getitem__(self, index: int) -> list[int]:
        if index == 41:
            time.sleep(3600)
        return [index] * (SEQUENCE + 1)


class _Reads(_Fails):
    def __getitem__(self, index: int) -> list[int]:
        return [index] * (SEQUENCE + 1)


def reads() -> Dataset[Any]:
    return _Reads()


def fails() -> Dataset[Any]:
    return _Fails()


def ends() -> Dataset[Any]:
    return _Ends()


def hangs() -> Dataset[Any]:
    return _Hangs()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_sample_is_the_same_in_a_worker(pool: Pool, tmp_path: Path, workers: int) -> None:
    data = {"seq_len": SEQUENCE, "build": f"{__name__}:fails", "workers": workers}
    (said,) = pool.run(losses_or_error, on("one=1", tmp_path, data=data), ranks=1)
    assert "sample 41 is damaged" in said and "Traceback" not in said


def workers_told_to_end(config: Config) -> tuple[Any, list[int | None]]:
    """The error of a run, and the exit codes of its workers when Python ends them as when the rank exits."""
    gc.disable()  # It would end them, too.
    said = losses_or_error(config)
    workers = multiprocessing.active_children()
    for each in workers:
        each.terminate()
    for each in workers:
        each.join(20)
    gc.enable()
    return said, [each.exitcode for each in workers]


@pytest.mark.parametrize(
    ("build", "says"), [("ends", "DataLoader worker (pid"), ("hangs", "timed out after 3")]
)
def test_a_worker_that_ends_or_hangs_is_named(pool: Pool, tmp_path: Path, build: str, says: str) -> None:
    data = {"seq_len": SEQUENCE, "build": f"{__name__}:{build}", "workers": 2}
    mesh = {**BASE["mesh"], "timeout_s": 3.0}
    ((said, codes),) = pool.run(workers_told_to_end, on("one=1", tmp_path, data=data, mesh=mesh), ranks=1)
    assert said.startswith("a worker process that reads samples has ended or is not responding")
    assert says in said and "data.workers = 2" in said
    assert all(code == 0 for code in codes) and (codes or build == "ends")


class _Unlucky:
    """Pickling this object raises the error of torch's SIGCHLD handler."""

    def __reduce__(self) -> Any:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


class _Exchanges(Callback):
    def __init__(self, mesh: meshcomm.Mesh, caught: bool) -> None:
        self._mesh, self._caught = mesh, caught

    def on_step(self, step: Any) -> None:
        """See Callback."""
        try:
            self._mesh.objects.all_gather("one", _Unlucky(), pickle=True)
        finally:
            if self._caught:
                raise ValueError("an error of the program, in a finally block")


def exchanged(config: Config, caught: bool) -> str:
    with meshcomm.init(config) as mesh:
        try:
            run(mesh, config, _Exchanges(mesh, caught))
        except MeshcommError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("caught", [False, True])
def test_a_worker_that_ends_during_a_call_is_named(pool: Pool, tmp_path: Path, caught: bool) -> None:
    data = {"seq_len": SEQUENCE, "build": f"{__name__}:reads", "workers": 2}
    (said,) = pool.run(exchanged, on("one=1", tmp_path, data=data), caught, ranks=1)
    assert said.startswith("a worker process that reads samples has ended or is not responding")
    assert "DataLoader worker (pid 7)" in said


class _Kills(_Watch):
    """Sends the workers the signals that Slurm sends to all processes of a job; later kills the rank."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def on_step(self, step: Any) -> None:
        """See Callback."""
        if step.step == 2:
            for each in self.workers():
                os.kill(each, signal.SIGTERM)
                os.kill(each, signal.SIGUSR1)
            time.sleep(0.2)
            self._file.write_text(" ".join(map(str, self.workers())))
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(config: Config, file: Path) -> None:
    trained(config, _Kills(file))


@pytest.mark.deep
def test_workers_stay_when_a_job_is_asked_to_save_and_end_with_their_rank(pool: Pool, tmp_path: Path) -> None:
    config = on("one=1", tmp_path, "data.workers=2")
    file = tmp_path / "workers"
    with pytest.raises(Exception, match="SIGKILL"):
        pool.run(killed, config, file, ranks=1)
    workers = [int(each) for each in file.read_text().split()]
    assert len(workers) == 2
    ended = time.monotonic() + 5
    while any(Path(f"/proc/{each}").exists() for each in workers) and time.monotonic() < ended:
        time.sleep(0.01)
    assert not [each for each in workers if _runs(each)]


def _runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def rows(*values: list[int]) -> Tensor:
    return torch.tensor(values)


# -- loaders that resume --------------------------------------------------------------------------


class Rows(Dataset[dict[str, Tensor]]):
    """Counts the samples that are read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        return {"input_ids": (torch.arange(SEQUENCE) * 7 + index) % 251}


class Counted:
    """A user's own loader, with a state."""

    def __init__(self, rows: Rows, coord: int, size: int) -> None:
        self._rows, self._coord, self._size, self._at, self._epoch = rows, coord, size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        share = 8 // self._size
        while self._at < 40:
            mine = order[self._at + self._coord * share :][:share]
            self._at += 8
            yield torch.utils.data.default_collate([self._rows[index] for index in mine])
        self._at = 0


class Wraps(Counted):
    """Its state at the end of an epoch equals its state at the start of the next one."""

    def __len__(self) -> int:
        return 5

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at % 40}


def loader_of(kind: str, rows: Rows, coord: int, size: int) -> Any:
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=size, rank=coord, seed=5)
    if kind == "its own":
        return Counted(rows, coord, size)
    if kind == "wraps":
        return Wraps(rows, coord, size)
    if kind == "a batch sampler":
        return DataLoader(rows, batch_sampler=BatchSampler(sampler, 8 // size, drop_last=True))
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(rows, batch_size=8 // size, sampler=sampler)
    return DataLoader(rows, batch_size=8 // size, sampler=sampler)


def loaded(config: Config, kind: str) -> tuple[list[float], int]:
    """The losses of a run, and the number of samples that this attempt has read."""
    rows = Rows()
    with meshcomm.init(config) as mesh:
        loader = loader_of(kind, rows, mesh.data_rank, mesh.data_world_size)
        return list(Trainer(mesh, config).run(loader).losses), rows.read


# The run stops within the first epoch of five steps, at its end, and within the second one.
@pytest.mark.parametrize("kind", ["its own", "wraps", "torchdata", "without a state"])
@pytest.mark.parametrize("stopped", [3, 5, 7])
@pytest.mark.deep_cases(r"\[(3-(its|torchdata|wraps)|5-(its|torchdata|without)|7)")
def test_a_loader_with_a_state_goes_on_without_reading_again(
    pool: Pool, tmp_path: Path, kind: str, stopped: int
) -> None:
    if kind == "torchdata":
        pytest.importorskip("torchdata")
    saving = ["train.resume=true", "train.checkpoint_every=100", "train.schedule=constant"]
    whole, _ = pool.run(loaded, on("dp=2", tmp_path / "whole", "train.steps=9", *saving), kind, ranks=2)[0]
    first = on("dp=2", tmp_path / "two", f"train.steps={stopped}", *saving)
    losses, read = pool.run(loaded, first, kind, ranks=2)[0]
    assert losses == whole[:stopped] and read == 4 * stopped
    rest = on("dp=2", tmp_path / "two", "train.steps=9", *saving)
    losses, read = pool.run(loaded, rest, kind, ranks=2)[0]
    assert losses == whole
    assert read == (4 * 9 if kind == "without a state" else 4 * (9 - stopped))


def test_on_another_number_of_shares_the_batches_before_are_taken_first(pool: Pool, tmp_path: Path) -> None:
    saving = ["train.resume=true", "train.checkpoint_every=100", "train.schedule=constant"]
    whole, _ = pool.run(loaded, on("dp=2", tmp_path / "a", "train.steps=7", *saving), "its own", ranks=2)[0]
    pool.run(loaded, on("dp=2", tmp_path / "b", "train.steps=3", *saving), "its own", ranks=2)
    rest = on("dp=4", tmp_path / "b", "train.steps=7", *saving)
    losses, read = pool.run(loaded, rest, "its own", ranks=4)[0]
    assert losses == pytest.approx(whole, rel=1e-12) and read == 2 * 7


def test_a_sampler_within_a_batch_sampler_is_told_the_epoch(pool: Pool, tmp_path: Path) -> None:
    plain, nested = (
        pool.run(loaded, on("dp=2", tmp_path / kind, "train.steps=7"), kind, ranks=2)[0]
        for kind in ("without a state", "a batch sampler")
    )
    assert plain == nested


def epoch_of(samples: int, size: int, drops: bool, sampler_drops: bool) -> tuple[list[Any], bool]:
    """The loaders of all ranks, and whether a rank's last batch is short or an epoch repeats a sample."""
    rows = torch.utils.data.TensorDataset(torch.arange(samples))
    loaders = [
        DataLoader(
            rows,
            batch_size=8 // size,
            drop_last=drops,
            sampler=DistributedSampler(rows, num_replicas=size, rank=rank, drop_last=sampler_drops),
        )
        for rank in range(size)
    ]
    read = [[batch.tolist() for (batch,) in loader] for loader in loaders]
    numbers = [number for each in read for batch in each for number in batch]
    short = any(len(batch) < 8 // size for each in read for batch in each)
    return loaders, short or len(set(numbers)) < len(numbers)


def test_an_epoch_whose_last_batch_is_short_or_repeats_samples_is_refused_at_the_start() -> None:
    refused = 0
    for samples, size, drops, sampler_drops in itertools.product(
        range(8, 34), (1, 2, 4), (False, True), (False, True)
    ):
        loaders, wrong = epoch_of(samples, size, drops, sampler_drops)
        for loader in loaders:
            for steps in (len(loader) - 1, len(loader)):
                train = SimpleNamespace(steps=steps, global_batch_size=8)
                mesh = SimpleNamespace(label="rank 0")
                engine: Any = SimpleNamespace(
                    sections=SimpleNamespace(train=train), data_size=size, mesh=mesh
                )
                said = ""
                try:
                    check_epoch(loader, engine)
                except TrainingError as error:
                    said = str(error)
                assert bool(said) == (wrong and steps == len(loader)), (samples, size, drops, sampler_drops)
                refused += bool(said)
    assert refused > 100


def with_a_short_end(config: Config) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(TrainingError) as error:
        Trainer(mesh, config).run(DataLoader(Subset(Rows(), range(38)), batch_size=8))
    return str(error.value)


def test_a_run_names_the_step_of_a_short_batch_before_it_trains(pool: Pool, tmp_path: Path) -> None:
    (said,) = pool.run(with_a_short_end, on("one=1", tmp_path), ranks=1)
    assert (
        said.startswith("the last batch of an epoch, step 5, has only 6 samples") and "drop_last=True" in said
    )


class Odd(Counted):
    """A loader whose state holds an object."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": object()}


def with_an_odd_state(config: Config) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(TrainingError) as error:
        Trainer(mesh, config).run(Odd(Rows(), mesh.data_rank, mesh.data_world_size))
    return str(error.value)


def test_a_state_that_cannot_be_saved_is_named(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(with_an_odd_state, on("dp=2", tmp_path, "train.checkpoint_every=2"), ranks=2)
    assert all("the state of the Odd cannot be saved" in each for each in said)


class Changed(Counted):
    """A loader that is made differently than before."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("4 workers, and 2 when the state was made")


def with_another_loader(config: Config, kind: Any) -> str:
    with meshcomm.init(config) as mesh:
        try:
            Trainer(mesh, config).run(kind(Rows(), mesh.data_rank, mesh.data_world_size))
        except TrainingError as error:
            return str(error)
    return ""


def test_a_state_that_does_not_fit_is_named(pool: Pool, tmp_path: Path) -> None:
    saving = ["train.resume=true", "train.checkpoint_every=100", "train.schedule=constant"]
    assert pool.run(
        with_another_loader, on("dp=2", tmp_path, "train.steps=2", *saving), Counted, ranks=2
    ) == ["", ""]
    said = pool.run(with_another_loader, on("dp=2", tmp_path, "train.steps=4", *saving), Changed, ranks=2)
    assert all("the Changed cannot load the state" in each for each in said)
    assert all("AssertionError: 4 workers" in each for each in said)


class Streamed(IterableDataset[Tensor]):
    """Samples in order. divided: each worker reads different ones. same: all samples are equal."""

    def __init__(self, divided: bool, same: bool) -> None:
        self._divided, self._same = divided, same

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if self._divided and worker is not None else (0, 1)
        for number in range(first, 96, step):
            yield torch.full((SEQUENCE,), 1 if self._same else number)


def streamed(config: Config, divided: bool, same: bool) -> str:
    loader = DataLoader(
        Streamed(divided, same),
        batch_size=8,
        num_workers=2,
        collate_fn=in_one,
        multiprocessing_context="fork",
    )
    before = _children()
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        try:
            trainer.run(loader)
        except TrainingError as error:
            return str(error)
        # The workers have ended with the run.
        assert _children() == before
    return ""


def in_one(rows: list[Tensor]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack(rows)}


def test_workers_that_read_the_same_stream_are_named(pool: Pool, tmp_path: Path) -> None:
    config = on("one=1", tmp_path)
    (said,) = pool.run(streamed, config, False, False, ranks=1)
    assert (
        said.startswith("the workers of the DataLoader read the same samples") and "num_workers = 2" in said
    )
    assert "get_worker_info" in said
    assert pool.run(streamed, config, True, False, ranks=1) == [""]
    assert pool.run(streamed, config, False, True, ranks=1) == [""]


# -- evaluation by a function ---------------------------------------------------------------------


def judge(trainer: Trainer) -> float:
    """The loss on one batch in which all tokens are the same."""
    share = 8 // trainer.engine.data_size
    return trainer.evaluate([{"input_ids": torch.full((share, SEQUENCE), 65)}])


def judge_more(trainer: Trainer) -> dict[str, float]:
    return {"accuracy": 0.25, "perplexity": float(torch.tensor(judge(trainer)).exp())}


def judge_badly(trainer: Trainer) -> str:
    return "good"


def test_a_function_evaluates(pool: Pool, tmp_path: Path) -> None:
    evaluating = ["train.eval_every=3", f"train.evaluate={__name__}:judge"]
    for dims, ranks in (("one=1", 1), ("dp=2", 2)):
        summaries = pool.run(trained, on(dims, tmp_path / dims, *evaluating), ranks=ranks)
        lines = [line for line in metrics(tmp_path / dims) if "validation_loss" in line]
        assert [line["step"] for line in lines] == [3, 6]
        assert summaries[0].evaluation is not None
        assert summaries[0].evaluation.validation_loss == lines[-1]["validation_loss"] > 0
        assert lines[0]["validation_tokens"] == 0
    one, two = (
        [line["validation_loss"] for line in metrics(tmp_path / dims) if "validation_loss" in line]
        for dims in ("one=1", "dp=2")
    )
    assert one == pytest.approx(two, rel=1e-12)


def test_what_a_function_finds_stands_beside_the_validation_loss(pool: Pool, tmp_path: Path) -> None:
    evaluating = ["train.eval_every=6", "data.validation=0.1", f"train.evaluate={__name__}:judge_more"]
    pool.run(trained, on("dp=2", tmp_path, *evaluating), ranks=2)
    (line,) = [line for line in metrics(tmp_path) if "validation_loss" in line]
    assert line["validation_accuracy"] == 0.25 and line["validation_perplexity"] > 1
    assert line["validation_tokens"] > 0


def test_what_is_no_evaluation_is_named(pool: Pool, tmp_path: Path) -> None:
    def said(name: str) -> str:
        changes = ["train.eval_every=3", f"train.evaluate={name}"]
        return str(pool.run(losses_or_error, on("one=1", tmp_path, *changes), ranks=1)[0])

    assert "train.evaluate returns no numbers" in said(f"{__name__}:judge_badly")
    assert "without a validation part" in said(f"{__name__}:judge_more")
    assert "train.evaluate could not be imported" in said("tests.nowhere:judge")
    with pytest.raises(ConfigError, match=r"data\.validation, data\.validation_files or train\.evaluate"):
        load_config({**BASE, "train": {**BASE["train"], "eval_every": 3}})


def judge_apart(trainer: Trainer) -> dict[str, float]:
    """Each rank judges its own samples."""
    return {"loss": 1.0, "accuracy": 0.25 + trainer.mesh.coord("dp") / 4}


def judge_on_one(trainer: Trainer) -> float | None:
    return None if trainer.mesh.rank else 2.0


def judge_roughly(trainer: Trainer) -> dict[str, float]:
    """Ranks round differently, and one number is undefined."""
    return {"loss": 1.0 + trainer.mesh.rank * 1e-7, "nothing": float("nan")}


def test_ranks_that_evaluate_differently_are_named_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    def ran(name: str, out: str) -> list[Any]:
        changes = ["train.eval_every=3", f"train.evaluate={__name__}:{name}", "train.target_loss=0.5"]
        return pool.run(losses_or_error, on("dp=2 tp=2", tmp_path / out, *changes), ranks=4)

    for said in ran("judge_apart", "apart"):
        assert "train.evaluate returns different numbers on the ranks" in said
        assert "ranks 0 1: loss 1, accuracy 0.25" in said and "ranks 2 3: loss 1, accuracy 0.5" in said
    alone = ran("judge_on_one", "one")
    assert all("train.evaluate returns no numbers" in said and "judge_on_one: None" in said for said in alone)
    assert alone[0].startswith("rank 1 (")
    assert len({*ran("judge_roughly", "roughly")}) == 1
    lines = [line for line in metrics(tmp_path / "roughly") if "validation_loss" in line]
    assert [line["validation_loss"] for line in lines] == [1.0, 1.0]

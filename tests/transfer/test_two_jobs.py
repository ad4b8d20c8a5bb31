"""Links between two jobs: tensors, versions of weights, and a target that dies and comes again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcomm
from meshcomm.errors import CommunicationError, MeshcommError, WeightsTorn
from meshcomm.testing import Pool
from meshcomm.transfer.link import Link
from tests.ports import free_port
from tests.two_jobs import OPENS_S, Place, run, values


def whole(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 5, generator=draw),
        "b": torch.randn(3, generator=draw),
        "c": torch.randn((), generator=draw),
    }


def linked(place: Place, mesh: meshcomm.Mesh, port: int, **keys: Any) -> Link:
    side = "source" if place.job == "trainer" else "target"
    address = f"tcp://127.0.0.1:{port}"
    return meshcomm.link(**{side: mesh}, name="policy", store=address, timeout_s=OPENS_S, **keys)


def model_of(mesh: meshcomm.Mesh, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, the first of them split along the mesh's only dim."""
    split = distribute_tensor(tensors["a"].clone(), mesh.device_mesh, [Shard(0)])
    return {"a": split, "b": tensors["b"].clone(), "c": tensors["c"].clone()}


def parts(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.items()}


def _versions(place: Place, port: int) -> list[int]:
    with place.mesh() as mesh, linked(place, mesh, port) as link:
        x = out = None
        full = torch.arange(12.0).view(6, 2)
        if place.job == "trainer":
            x = full.chunk(2)[place.rank]
        else:
            out = torch.full((6, 1), torch.nan)
        link.transfer(x, out, "n/dp k -> n k/dp")
        if out is not None:
            assert torch.equal(out, full.chunk(2, 1)[place.rank])
        model = model_of(
            mesh, whole() if place.job == "trainer" else {n: x * torch.nan for n, x in whole().items()}
        )
        weights, seen = link.weights(model), []
        for version in (1, 5):
            if place.job == "trainer":
                weights.push(version=version).wait()
                seen.append(weights.version)
                with torch.no_grad():
                    for tensor in model.values():
                        tensor.add_(1)
                continue
            seen.append(weights.pull())
            for name, tensor in parts(model).items():
                assert torch.equal(tensor, whole()[name] + (version > 1))
        return seen


def test_versions_go_from_one_job_to_another(pool: Pool, tmp_path: Path) -> None:
    """Both jobs see the same versions, bit-equal on the target."""
    ended = run(pool, tmp_path, _versions, free_port(), trainer=2, generator=2)
    assert values(ended) == [[1, 5]] * 4


def _killed(place: Place, port: int) -> Any:
    """The generator loses a rank between two versions, and starts again as a job of one process."""
    mesh = place.mesh()
    if place.job == "again":
        place.until("failed", 0, 1)
    link = linked(place, mesh, port)
    model = model_of(mesh, whole())
    weights = link.weights(model)
    if place.job == "generator":
        assert weights.pull() == 1
        if place.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationError, match=r"rank 0 of the target \(dp=0\)"):
            weights.pull()
        link.close()
        with weights.reading() as version:
            return version
    if place.job == "again":
        with pytest.raises(WeightsTorn), weights.reading():
            pass
        assert weights.pull() == 3
        for name, tensor in parts(model).items():
            assert torch.equal(tensor, whole()[name] + 1)
        link.close()
        return mesh.close()
    weights.push(version=1).wait()
    with pytest.raises(CommunicationError, match=r"rank 0 of the target \(dp=0\)"):
        weights.push(version=2).wait()
    with torch.no_grad():
        for tensor in model.values():
            tensor.add_(1)
    assert mesh.all_reduce("dp", torch.ones(1)).item() == 2.0
    place.tell("failed")
    began = time.monotonic()
    link.reopen()
    weights.push(version=3).wait()
    link.close()
    mesh.close()
    return time.monotonic() - began


def test_a_generator_that_dies_comes_again(pool: Pool, tmp_path: Path) -> None:
    """The trainer learns who died, trains on, and sends the next version to the job that comes next."""
    ended = run(pool, tmp_path, _killed, free_port(), trainer=2, generator=2, again=1)
    assert [end.state for end in ended] == ["returned", "returned", "died", "returned", "returned"], (
        "\n".join(end.text for end in ended)
    )
    assert ended[3].value == 1


def _transfer_after_a_loss(place: Place, port: int) -> Any:
    mesh = place.mesh()
    link = linked(place, mesh, port)
    x, out = (torch.ones(4), None) if place.job == "trainer" else (None, torch.empty(2))
    for _ in range(2):
        if place.job == "generator" and place.rank == 1:
            link.transfer(x, out, "n -> n/dp")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            link.transfer(x, out, "n -> n/dp")
        except CommunicationError as error:
            return type(error).__name__, error.what, vars(error)["missing"]
    return None


def test_a_transfer_names_the_lost_rank_and_its_side(pool: Pool, tmp_path: Path) -> None:
    """Not the rank's number on the link, which neither job knows."""
    ended = run(pool, tmp_path, _transfer_after_a_loss, free_port(), trainer=2, generator=2)
    lost = "a tensor was not transferred: rank 1 of the target (dp=1) was lost"
    for end in ended[:2]:
        assert end.value == ("TransferFailed", lost, (("target", 1),)), end.text


def _error(call: Any) -> tuple[str, str, tuple[tuple[str, int], ...], float]:
    """Return the kind, the first line and the lost ranks of the error of a call, and its seconds."""
    began, error = time.monotonic(), None
    try:
        call()
    except MeshcommError as raised:
        error = raised
    seconds = time.monotonic() - began
    if error is None:
        return "none", "", (), seconds
    assert "link=" not in str(error)
    return type(error).__name__, error.what, vars(error).get("missing", ()), seconds


def _killed_in_on_commit(place: Place, port: int) -> Any:
    mesh = place.mesh()
    link = linked(place, mesh, port)
    model = model_of(mesh, whole())

    def on_commit(version: int) -> None:
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    weights = link.weights(model, on_commit=on_commit if place.job == "generator" else None)
    if place.job == "generator":
        return _error(weights.pull), _error(weights.pull)
    return _error(lambda: weights.push(version=2).wait()), mesh.all_reduce("dp", torch.ones(1)).item()


def test_a_generator_killed_in_on_commit_is_missed_soon(pool: Pool, tmp_path: Path) -> None:
    """Far sooner than the timeout of a minute. The generator that is left has the version, and learns of it at its next call."""
    ended = run(pool, tmp_path, _killed_in_on_commit, free_port(), trainer=2, generator=2)
    lost = "version 2 was not confirmed by every rank of the target: rank 1 of the target (dp=1) was lost"
    for end in ended[:2]:
        (kind, what, missing, seconds), own = end.value
        assert (kind, what, missing, own) == ("TransferFailed", lost, (("target", 1),), 2.0), end.text
        assert seconds < 20
    first, second = ended[2].value
    assert first[0] == "none" and first[3] < 20 and second[0] == "TransferFailed", ended[2].text
    assert second[2] == (("target", 1),)


def _slow(place: Place, port: int) -> Any:
    """First on_commit takes longer than the timeout, then the trainer."""
    with place.mesh() as mesh:
        side = "source" if place.job == "trainer" else "target"
        place.tell("opened")
        place.until("opened", *range(3))
        address = f"tcp://127.0.0.1:{port}"
        link = meshcomm.link(**{side: mesh}, name="policy", store=address, timeout_s=5)
        weights = link.weights(whole(), on_commit=lambda version: time.sleep(7))
        if place.job == "generator":
            assert weights.pull() == 1
            return _error(weights.pull)
        weights.push(version=1).wait()
        time.sleep(8)
        return _error(lambda: weights.push(version=2).wait())


@pytest.mark.deep
def test_a_slow_on_commit_is_waited_for_and_a_slow_trainer_is_late_not_lost(
    pool: Pool, tmp_path: Path
) -> None:
    """The same on every rank, the late one included."""
    ended = run(pool, tmp_path, _slow, free_port(), trainer=1, generator=2)
    for kind, what, missing, _ in values(ended):
        assert (kind, missing) == ("TransferFailed", (("source", 0),)), what
        assert "rank 0 of the source (dp=0) did not come within 5 s" in what


def _killed_before_weights(place: Place, port: int) -> Any:
    mesh = place.mesh()
    link = linked(place, mesh, port)
    place.tell("linked")
    place.until("linked", *range(4))
    if place.job == "trainer" and place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return _error(lambda: link.weights(whole()))


def test_a_trainer_that_dies_before_the_weights_is_named(pool: Pool, tmp_path: Path) -> None:
    """It serves the link's store, so that nobody can be asked."""
    ended = run(pool, tmp_path, _killed_before_weights, free_port(), trainer=2, generator=2)
    for end in ended[1:]:
        kind, what, missing, _ = end.value
        assert (kind, missing) == ("TransferFailed", (("source", 0),)), what
        assert "rank 0 of the source (dp=0) was lost" in what


def _neighbors(place: Place, port: int) -> Any:
    """Two links at one address: the process that serves the store for both belongs to the first one, and dies."""
    mesh = place.mesh()
    if place.job in ("third", "fourth"):
        place.until("serves", 0)
    side = "source" if place.job in ("first", "third") else "target"
    name = "A" if place.job in ("first", "second") else "B"
    link = meshcomm.link(**{side: mesh}, name=name, store=f"tcp://127.0.0.1:{port}", timeout_s=OPENS_S)
    place.tell("serves")
    weights = link.weights(whole())
    place.tell("agreed")
    (process, *_) = place.until("agreed", *range(4))
    if place.job == "first":
        os.kill(os.getpid(), signal.SIGKILL)
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    return _error(weights.push(version=1).wait if side == "source" else weights.pull)


def test_a_store_that_another_link_has_served_is_named(pool: Pool, tmp_path: Path) -> None:
    jobs = dict.fromkeys(("first", "second", "third", "fourth"), 1)
    ended = run(pool, tmp_path, _neighbors, free_port(), **jobs)
    assert ended[1].value[2] == (("source", 0),), ended[1].text
    for end in ended[2:]:
        kind, what, missing, _ = end.value
        assert (kind, missing) == ("TransferFailed", ()), what
        assert 'the link\'s store is lost, which rank 0 of the source of the link "A" served' in what

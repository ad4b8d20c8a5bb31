"""Versions of weights: what a change, a reader, a second push, an error and replaced memory do, on all ranks of both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import meshcomm
from meshcomm.errors import (
    MeshcommError,
    SourceChanged,
    TransferFailed,
    TransferMismatch,
    UnsupportedOp,
    WeightsTorn,
)
from meshcomm.mesh import Mesh
from meshcomm.transfer.changes import digest_of
from meshcomm.transfer.link import Link
from meshcomm.transfer.run import Run
from meshcomm.transfer.weights import Weights


def simulated(program: Callable[[Mesh, Mesh, Link], Any]) -> list[Any]:
    """Call a program with a source of ranks 0 and 1, a target of ranks 2 and 3, and a link. Return the results by rank."""

    def opened(mesh: Mesh) -> Any:
        with (
            meshcomm.init(dims={"fsdp": 2}, ranks=[0, 1]) as source,
            meshcomm.init(dims={"tp": 2}, ranks=[2, 3]) as target,
            meshcomm.link(source, target, bucket_bytes=256) as link,
        ):
            return program(source, target, link)

    return meshcomm.simulate(opened, dims={"all": 4})


def raised(call: Callable[[], object]) -> MeshcommError | None:
    try:
        call()
    except MeshcommError as error:
        return error
    return None


def plain(value: float = 1.0) -> nn.Linear:
    """Return a layer with known weights, which every rank holds whole."""
    layer = nn.Linear(5, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(15.0).view(3, 5) + value)
        layer.bias.fill_(value)
    return layer


def split(layer: nn.Linear, source: Mesh, target: Mesh) -> nn.Linear:
    """Split a layer with FSDP2 on the source, by columns on the target."""
    if source.is_member:
        fully_shard(layer, mesh=source["fsdp"])
    else:
        parallelize_module(layer, target["tp"], ColwiseParallel())
    return layer


def full(layer: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters."""
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in layer.named_parameters()
    }


def is_equal(layer: nn.Module, other: nn.Module) -> bool:
    parameters = full(other)
    return all(torch.equal(x, parameters[name]) for name, x in full(layer).items())


# -- changes of the source ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["foreach", "fused", ""])
@pytest.mark.parametrize("is_split", [False, True], ids=["plain", "FSDP2"])
@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_a_step_during_a_push_is_an_error_on_every_rank(kind: str, is_split: bool, staging: Any) -> None:
    """Of every kind of optimizer, for plain parameters and for FSDP2's; the next push works, and old weights stay readable."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        if is_split:
            split(layer, source, target)
        weights = link.weights(layer, staging=staging)
        before = after = None
        if source.is_member:
            optimizer: torch.optim.Optimizer
            if kind == "fused":
                optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)
            else:
                optimizer = torch.optim.SGD(
                    layer.parameters(), lr=0.5, momentum=0.9, foreach=kind == "foreach"
                )
            weights.push(1).wait()
            layer(torch.ones(2, 5)).sum().backward()
            push = weights.push(2)
            if source.rank == 1 or is_split:
                optimizer.step()
            error = raised(push.wait)
            assert raised(push.wait) is error
            weights.push(3).wait()
        else:
            assert weights.pull() == 1
            before = full(layer)
            error = raised(weights.pull)
            after = weights.version
            torn = raised(lambda: ExitStack().enter_context(weights.reading()))
            assert isinstance(torn, WeightsTorn) == (staging == "buckets")
            assert staging == "buckets" or all(
                torch.equal(x, before[name]) for name, x in full(layer).items()
            )
            assert weights.pull() == 3
        assert isinstance(error, SourceChanged)
        return error.names, after, full(layer)

    results = simulated(program)
    assert {names for names, _, _ in results} == {("bias", "weight")}
    assert {version for _, version, _ in results[2:]} == {1 if staging == "whole" else None}
    if is_split:
        assert all(torch.equal(x, results[3][2][name]) for name, x in results[0][2].items())


@pytest.mark.parametrize("change", ["data", "numpy", "back"])
def test_changes_that_torch_does_not_count(change: str) -> None:
    """They are seen by the values. A change that is taken back is seen by torch's count."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain()
        weights = link.weights(layer)
        if not source.is_member:
            return raised(weights.pull)
        push = weights.push(1)
        if change == "data":
            layer.bias.data[0] = 9.0
        elif change == "numpy":
            layer.bias.detach().numpy()[0] = 9.0
        else:
            with torch.no_grad():
                layer.bias.neg_().neg_()
        return raised(push.wait)

    assert all(isinstance(error, SourceChanged) and error.names == ("bias",) for error in simulated(program))


@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_a_change_that_is_taken_back_once_it_was_sent(staging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with averaged weights, for which an evaluation swaps them: torch does not count it, and the values are those of before."""
    sends = Run._run

    def swapped(run: Run) -> None:
        places: list[Any] = [room.regions[0].held for room in run._sources.values()][:1]
        before = [place.clone() for place in places]
        for place in places:
            place.data.fill_(9.0)
        sends(run)
        for place, values in zip(places, before, strict=True):
            place.data.copy_(values)

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain() if source.is_member else plain().to(torch.bfloat16)
        weights = link.weights(layer, staging=staging, cast=torch.bfloat16)
        assert raised(weights.push(1).wait if source.is_member else weights.pull) is None
        link.mesh.barrier("link")
        monkeypatch.setattr(Run, "_run", swapped)
        error = raised(weights.push(2).wait if source.is_member else weights.pull)
        return type(error).__name__, error and error.names, weights.version  # type: ignore[attr-defined]

    kept = 1 if staging == "whole" else None
    results = simulated(program)
    assert {(name, len(names)) for name, names, _ in results} == {("SourceChanged", 1)}
    assert [version for *_, version in results] == [1, 1, kept, kept]


def test_elements_of_any_stride() -> None:
    """A single element counts as contiguous."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        made = torch.arange(8.0) if source.is_member else torch.zeros(8)
        z = torch.full((3,), 2 + 5j if source.is_member else 0j)
        model = {"one": made[1::2][:1], "many": made[2::3], "imaginary": z.imag[:1], "conjugate": z.conj()}
        weights = link.weights(model)
        if source.is_member:
            weights.push(1).wait()
        else:
            assert weights.pull() == 1
        return {name: x.tolist() for name, x in model.items()}

    assert (
        simulated(program)
        == [{"one": [1.0], "many": [2.0, 5.0], "imaginary": [5.0], "conjugate": [2 - 5j] * 3}] * 4
    )


@pytest.mark.parametrize("snapshot", [False, True])
def test_inside_a_default_device(snapshot: bool) -> None:
    """As in programs that build a model on meta."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        out = torch.zeros(2)
        with torch.device("meta"):
            weights = link.weights(layer)
            weights.push(1, snapshot=snapshot).wait() if source.is_member else weights.pull()
            link.transfer(
                layer.bias[:2] if source.is_member else None, out if target.is_member else None, "n -> n"
            )
        return layer.bias.unique().tolist(), out.tolist() == [1.0, 1.0] or source.is_member

    assert simulated(program) == [([1.0], True)] * 4


def test_a_snapshot_may_change_at_once() -> None:
    """Also through `.data`, which torch does not count; the copy is of the push, not of the transfer."""

    def program(source: Mesh, target: Mesh, link: Link) -> bool:
        layer = plain(float(source.is_member))
        weights = link.weights(layer, cast=torch.float32)
        for version in (0, 1, 2):
            if source.is_member:
                push = weights.push(version, snapshot=version > 0)
                if not version:
                    push.wait()
                    continue
                layer.weight.data.fill_(-float(version))
                with torch.no_grad():
                    layer.bias.fill_(7.0)
                push.wait()
            else:
                assert weights.pull() == version
                first = plain(1.0)
                if version == 1:
                    assert is_equal(layer, first)
        return source.is_member or bool((layer.weight == -1).all() and (layer.bias == 7).all())

    assert all(simulated(program))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64, torch.bool]
)
def test_a_digest_sees_every_change(dtype: torch.dtype) -> None:
    """One element, two that change by opposite amounts, two that change places; of any memory."""
    for size in (1, 2, 7, 1000, 140_000):
        x = (torch.arange(size) % 2).to(dtype)
        assert digest_of(x) == digest_of(x.clone())
        for at in {0, size // 2, size - 1}:
            y = x.clone()
            y[at] = ~y[at] if dtype == torch.bool else y[at] + 1
            assert digest_of(x) != digest_of(y), (size, at)
        if size > 2:
            y = x.clone()
            y[0], y[1] = x[1], x[0]
            assert digest_of(x) != digest_of(y)
    z = torch.arange(24.0).view(4, 6)
    assert digest_of(z.t()) == digest_of(z.t().contiguous()) != digest_of(z)
    assert digest_of(z[1:, 3:]) == digest_of(z[1:, 3:].clone())


def test_a_digest_needs_no_copy_of_the_tensor() -> None:
    """Of contiguous memory, and of memory that begins at an odd byte."""
    whole = torch.zeros(4096, 4096)
    for memory in (whole, whole.view(torch.uint8).view(-1)[3:-2]):
        digest_of(memory[:1])
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before, _ = peak_bytes(), digest_of(memory)
        assert peak_bytes() - before < whole.nbytes // 8


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


# -- pushes in a row -----------------------------------------------------------------------------------------


def test_a_second_push_waits_for_a_deferred_pull() -> None:
    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        weights = link.weights(layer)
        if not source.is_member:
            return [weights.pull(), weights.pull()]
        first = weights.push(1)
        assert not first.done
        second = weights.push(2)
        assert first.done
        second.wait()
        return [first.version, second.version]

    assert simulated(program) == [[1, 2]] * 4


def test_an_error_that_nobody_has_waited_for_is_raised_once() -> None:
    """By the next push, or by the end of the link; a failed push leaves nothing behind."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        weights = link.weights(layer)
        if not source.is_member:
            errors = [raised(weights.pull), raised(weights.pull)]
            return [type(error).__name__ for error in errors], weights.pull()
        changed = []
        weights.push(1)
        with torch.no_grad():
            layer.bias.add_(1)
        changed.append(raised(lambda: weights.push(2)))
        weights.push(2)
        with torch.no_grad():
            layer.bias.add_(1)
        changed.append(raised(lambda: weights.push(3)))
        weights.push(3)
        return [type(error).__name__ for error in changed], 3

    assert simulated(program) == [(["SourceChanged"] * 2, 3)] * 4


def test_the_link_carries_a_push_out_before_it_closes_and_before_another_call() -> None:
    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer, x = plain(float(source.is_member)), torch.full((4,), float(source.is_member))
        weights = link.weights(layer)
        if source.is_member:
            weights.push(1)
            link.transfer(x, None, "n -> n")
            weights.push(2)
            return 2
        assert weights.pull() == 1
        link.transfer(None, x, "n -> n")
        assert (x == 1).all()
        return weights.pull()

    assert simulated(program) == [2] * 4


def test_different_versions_are_an_error_on_every_rank() -> None:
    """The link remains usable."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        weights = link.weights(plain())
        if source.is_member:
            error = raised(weights.push(5 + source.rank).wait)
            weights.push(7).wait()
        else:
            error = raised(weights.pull)
            assert weights.version is None
            assert weights.pull() == 7
        return str(error)

    texts = simulated(program)
    assert all("version 5 on rank 0 of the source (fsdp=0)" in text for text in texts)
    assert all("version 6 on rank 1 of the source (fsdp=1)" in text for text in texts)


# -- readers ------------------------------------------------------------------------------------------------


def test_a_reader_keeps_its_version_until_it_ends() -> None:
    """The swap waits for it; a reader that comes later has the next version."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        weights = link.weights(layer)
        if source.is_member:
            for version in (1, 2):
                with torch.no_grad():
                    layer.weight.fill_(version)
                weights.push(version).wait()
            return True
        weights.pull()
        begun, versions = threading.Event(), []

        def read() -> None:
            with weights.reading() as version:
                begun.set()
                threading.Event().wait(0.3)
                versions.append((version, layer.weight.unique().tolist()))

        reader = threading.Thread(target=read)
        reader.start()
        begun.wait()
        assert weights.pull() == 2
        reader.join()
        assert versions == [(1, [1.0])]
        with weights.reading() as version, weights.reading():
            return version == 2 and bool((layer.weight == 2).all())

    assert all(simulated(program))


@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_readers_during_a_transfer(staging: Any) -> None:
    """Between the messages, the old version can be read if the new one is staged; weights that are being written cannot."""
    looks = []

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        weights = link.weights(layer, staging=staging)

        for version in (1, 2):
            if source.is_member:
                with torch.no_grad():
                    layer.bias.fill_(version)
                weights.push(version).wait()
                continue
            tear = weights._unchanged

            def before_the_end(*arguments: Any, version: int = version) -> None:
                with ExitStack() as reading:
                    refused = raised(lambda: reading.enter_context(weights.reading()))
                looks.append((version, type(refused).__name__, weights.version))
                tear(*arguments)

            weights._unchanged = before_the_end
            weights.pull()
            weights._unchanged = tear
        return None

    simulated(program)
    torn = "NoneType" if staging == "whole" else "WeightsTorn"
    assert sorted(map(str, looks)) == sorted(
        map(str, [(1, "WeightsTorn", None), (2, torn, 1 if staging == "whole" else None)] * 2)
    )


def alone(program: Callable[[Link], Any], **keys: Any) -> Any:
    """Call a program on a rank that is both sides."""

    def opened(mesh: Mesh) -> Any:
        with meshcomm.link(mesh, mesh) as link:
            return program(link)

    return meshcomm.simulate(opened, dims={"dp": 1}, **keys)[0]


def test_a_reader_that_never_ends_is_named() -> None:
    """The version is not used, and the link says why at once afterwards."""

    def program(link: Link) -> None:
        weights = link.weights(plain(), into=(layer := plain(2.0)))
        weights.push(1)
        weights.pull()
        end = threading.Event()
        begun = threading.Event()

        def read() -> None:
            with weights.reading():
                begun.set()
                end.wait()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        begun.wait()
        push = weights.push(2)
        error = raised(weights.pull)
        assert isinstance(error, TransferFailed)
        assert "rank 0 of the target (dp=0)" in str(error) and "reading()" in str(error)
        assert error.missing == (("source", 0), ("target", 0))
        assert raised(push.wait) is error
        assert weights.version == 1 and is_equal(layer, plain())
        again = raised(lambda: weights.push(3))
        assert "reopen" in str(again) and "reading()" in str(again)
        end.set()
        reader.join()

    alone(program, timeout_s=0.5)


def test_pull_inside_reading_is_refused() -> None:
    def program(link: Link) -> None:
        weights = link.weights(plain(), into=plain(2.0))
        weights.push(1)
        weights.pull()
        weights.push(2)
        with weights.reading():
            assert "inside reading()" in str(raised(weights.pull))
        assert weights.pull() == 2

    alone(program)


# -- on_commit ------------------------------------------------------------------------------------------------


def test_an_error_of_on_commit_reaches_every_rank() -> None:
    """The version counts, but not where it was raised, and the link remains usable."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        def quantize(version: int) -> None:
            with weights.reading() as read:
                assert read == version
            if version == 1 and target.is_member and target.rank == 3:
                raise ValueError("no scale")

        weights = link.weights(plain(), on_commit=quantize)
        transfer = (lambda v: weights.push(v).wait()) if source.is_member else (lambda v: weights.pull())
        error = raised(lambda: transfer(1))
        version = weights.version
        refused = target.is_member and raised(lambda: ExitStack().enter_context(weights.reading()))
        cause = error.__cause__ if error is not None else None
        transfer(2)
        return str(error), version, str(refused), type(cause).__name__, weights.version

    results = simulated(program)
    assert all("ValueError: no scale on rank 3 of the target (tp=1)" in text for text, *_ in results)
    assert [version for _, version, *_ in results] == [1, 1, 1, None]
    assert "on_commit of version 1 raised ValueError: no scale" in results[3][2]
    assert results[3][3] == "ValueError"
    assert {last for *_, last in results} == {2}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_on_commit(kind: type[BaseException]) -> None:
    """It is raised where it was; the other ranks learn of it, and the next version arrives everywhere."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        def interrupted(version: int) -> None:
            if version == 1 and target.rank == 3:
                raise kind

        weights = link.weights(plain(), on_commit=interrupted)
        told = []
        for version in (1, 2):
            try:
                _ = weights.push(version).wait() if source.is_member else weights.pull()
                told.append("")
            except BaseException as error:
                told.append(type(error).__name__)
        return told, weights.version

    results = simulated(program)
    assert results == [(["TransferFailed", ""], 2)] * 3 + [([kind.__name__, ""], 2)]


@pytest.mark.parametrize("call", ["pull", "another pull", "transfer", "weights", "close"])
def test_calls_inside_on_commit_are_refused(call: str) -> None:
    """All other ranks wait for this one's on_commit there."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        calls: dict[str, Callable[[], object]] = {
            "pull": lambda: weights.pull(),
            "another pull": lambda: others.pull(),
            "transfer": lambda: link.transfer(None, torch.zeros(2), "n -> n"),
            "weights": lambda: link.weights(plain()),
            "close": link.close,
        }
        weights = link.weights(plain(), on_commit=lambda version: version == 1 and calls[call]())
        others = link.weights(plain())
        error = raised(lambda: weights.push(1).wait() if source.is_member else weights.pull())
        weights.push(2).wait() if source.is_member else weights.pull()
        return str(error)

    for text in simulated(program):
        assert "UnsupportedOp: " in text and "inside on_commit" in text


def test_a_reader_waits_for_on_commit() -> None:
    def program(link: Link) -> None:
        order = []

        def clear(version: int) -> None:
            reader.start()
            threading.Event().wait(0.2)
            order.append("cleared")

        def read() -> None:
            with weights.reading():
                order.append("read")

        reader = threading.Thread(target=read)
        weights = link.weights(plain(), into=plain(2.0), on_commit=clear)
        weights.push(1)
        weights.pull()
        reader.join()
        assert order == ["cleared", "read"]

    alone(program)


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "target"])
def test_replaced_memory_is_an_error_on_every_rank(side: str) -> None:
    """load_state_dict(assign=True) makes tensors of other memory. After weights() again, all is well."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain(float(source.is_member))
        weights = link.weights(layer)
        transfer = (lambda v: weights.push(v).wait()) if source.is_member else (lambda v: weights.pull())
        transfer(1)
        if (source if side == "source" else target).is_member:
            layer.load_state_dict(plain(4.0).state_dict(), assign=True)
        error = raised(lambda: transfer(2))
        weights = link.weights(layer)
        transfer(3)
        return str(error), is_equal(layer, plain(4.0 if side == "source" else 1.0))

    for text, as_source in simulated(program):
        assert f"weight, bias of the {side}'s model on rank {0 if side == 'source' else 2}" in text
        assert "load_state_dict(assign=True)" in text
        assert as_source


@pytest.mark.parametrize("side", ["source", "target", "both"])
def test_a_new_parameter_is_an_error_on_every_rank(side: str) -> None:
    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        model = nn.Sequential(plain())
        model.register_buffer("skipped", torch.ones(1))
        weights = link.weights(model, skip="skipped*")
        model.register_buffer("skipped_too", torch.ones(1))
        if side in ("both", "source" if source.is_member else "target"):
            model.append(plain())
        error = raised(weights.push(1).wait if source.is_member else weights.pull)
        assert isinstance(error, TransferMismatch) and "1.weight" in str(error.given)
        weights = link.weights(nn.Sequential(*model[:1]))
        return raised(weights.push(1).wait if source.is_member else weights.pull)

    assert simulated(program) == [None] * 4


def test_a_reshard_of_fsdp_is_not_a_replacement() -> None:
    """FSDP2 shows other parameters between unshard and reshard; weights are sent from the sharded ones."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = split(plain(float(source.is_member)), source, target)
        weights = link.weights(layer)
        for version in (1, 2):
            if source.is_member:
                unsharded: Any = layer
                unsharded.unshard()
                weights.push(version).wait()
                unsharded.reshard()
            else:
                weights.pull()
        return is_equal(layer, plain())

    assert all(simulated(program))


def test_parameters_stay_what_they_are() -> None:
    """They require grad, are tied, are not contiguous, and have an optimizer's state: only their values change."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = nn.Module()
        start = float(source.is_member)
        layer.weight = nn.Parameter((torch.arange(12.0).view(3, 4) * start).t())
        layer.tied = layer.weight
        layer.scale = nn.Parameter(torch.tensor(3.0 * start))
        weights = link.weights(layer)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        (layer.weight * layer.scale).sum().backward()
        if source.is_member:
            weights.push(1).wait()
            return True
        optimizer.step()
        before = layer.weight
        weights.pull()
        optimizer.step()
        fits = layer.weight is before and layer.tied is before and before.requires_grad and before.is_leaf
        return fits and before.stride() == (1, 4) and len(optimizer.state) == 2

    assert all(simulated(program))


@pytest.mark.parametrize("staging", ["whole", "buckets"])
@pytest.mark.parametrize("mode", ["plan", "pull", "model", "all"])
def test_inference_mode(staging: Any, mode: str) -> None:
    """Inference tensors are sent and written; their changes, which torch does not count, are seen."""

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        with torch.inference_mode(mode in ("model", "all")):
            tensors = {"x": torch.full((40,), float(source.is_member)), "y": torch.zeros(3, 3) + 2}
        with torch.inference_mode(mode in ("plan", "all")):
            weights = link.weights(tensors, staging=staging)
        errors = []
        for version in (1, 2, 3):
            with torch.inference_mode(mode in ("pull", "all")):
                if not source.is_member:
                    errors.append(raised(weights.pull))
                    continue
                push = weights.push(version)
                if version == 2:
                    with torch.inference_mode():
                        tensors["x"].add_(1)
                errors.append(raised(push.wait))
        return [type(error).__name__ for error in errors], tensors["x"].unique().tolist(), weights.version

    assert simulated(program) == [(["NoneType", "SourceChanged", "NoneType"], [2.0], 3)] * 4


def test_a_rank_of_both_sides() -> None:
    """pull carries the push out; each order of calls but this one is refused."""

    def program(link: Link) -> None:
        source, target = plain(), plain(2.0)
        weights = link.weights(source, into=target)
        assert isinstance(raised(weights.pull), UnsupportedOp)
        push = weights.push(1)
        assert isinstance(raised(push.wait), UnsupportedOp)
        assert weights.pull() == 1
        push.wait()
        assert is_equal(target, source)
        push = weights.push(2)
        with torch.no_grad():
            source.bias.add_(1)
        error = raised(weights.pull)
        assert isinstance(error, SourceChanged) and raised(push.wait) is error
        weights.push(3)
        assert weights.pull() == 3 and is_equal(target, source)

    alone(program)


def test_tied_weights_of_which_a_rank_has_no_element() -> None:
    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        tied = torch.zeros(1, 3)
        if source.is_member:
            tied = distribute_tensor(torch.ones(1, 3), source["fsdp"], [Shard(0)], src_data_rank=None)
        weights = link.weights({"embedding": tied, "head": tied})
        if source.is_member:
            weights.push(1).wait()
        else:
            weights.pull()
        return weights.names, source.is_member or bool((tied == 1).all())

    assert simulated(program) == [(("embedding",), True)] * 4


def test_methods_of_the_other_side_are_refused() -> None:
    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        weights: Weights = link.weights(plain())
        calls = [weights.pull, lambda: ExitStack().enter_context(weights.reading())]
        return [type(raised(call)) for call in (calls if source.is_member else [lambda: weights.push(1)])]

    assert simulated(program) == [[UnsupportedOp] * 2] * 2 + [[UnsupportedOp]] * 2


@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_weights_written_over_their_own_source(staging: Any) -> None:
    """Rows go to the other rank, in the same memory: right if they arrive beside it, refused if they are written in place."""
    whole = torch.arange(12.0).view(4, 3)

    def program(_: Mesh) -> Any:
        source = meshcomm.init(dims={"tp": 2})
        target = meshcomm.init(dims={"tp": 2}, rank_order=[1, 0])
        with meshcomm.link(source, target) as link:
            part = distribute_tensor(whole.clone(), source["tp"], [Shard(0)], src_data_rank=None)
            memory = part.to_local()
            room = DTensor.from_local(memory, target["tp"], [Shard(0)], run_check=False)
            error = None
            try:
                weights = link.weights({"w": part}, into={"w": room}, staging=staging)
                weights.push(version=1, snapshot=True)
                weights.pull()
            except MeshcommError as caught:
                error = caught
            return type(error).__name__, str(error), memory, target.coord("tp")

    for name, text, memory, coord in meshcomm.simulate(program, dims={"dp": 2}):
        if staging == "whole":
            assert name == "NoneType" and torch.equal(memory, whole.chunk(2)[coord]), text
        else:
            assert (
                name == "TransferMismatch"
                and "w of the target: it shares memory with w of the source" in text
            )


def test_versions_arrive_after_ranks_made_different_calls() -> None:
    """A rank that makes another call than the others' push and pull is named everywhere; the next version arrives."""
    wrong = 3

    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        rank = source.rank
        layer = plain(1.0 if source.is_member else 0.0)
        weights = link.weights(layer)
        if rank == wrong:
            error = raised(lambda: link.transfer(None, torch.empty(3), "n -> n"))
        else:
            error = raised(lambda: weights.push(version=1).wait() if source.is_member else weights.pull())
        if source.is_member:
            weights.push(version=2).wait()
        else:
            assert weights.pull() == 2
        return type(error).__name__, is_equal(layer, plain())

    assert simulated(program) == [("TransferMismatch", True)] * 4


def test_a_compiled_module_has_the_names_of_its_module() -> None:
    def program(source: Mesh, target: Mesh, link: Link) -> Any:
        layer = plain()
        weights = link.weights(torch.compile(layer) if source.is_member else layer)
        return weights.names

    assert simulated(program) == [("weight", "bias")] * 4

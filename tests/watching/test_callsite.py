"""Which frames of a traceback belong to the user, which line a call records, and where threads are."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.testing import Pool
from meshcomm.watching.callsite import is_ours, line_of, place_in, stack_of, users_frame
from tests.ranks import on_ranks

TORCH, OWN = Path(torch.__file__).parent, Path(meshcomm.__file__).parent


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        (TORCH / "nn/modules/module.py", True),
        (OWN / "comm/along.py", True),
        (f"{TORCH}titan/train.py", False),
        (f"{TORCH}vision/models/resnet.py", False),
        (f"{OWN}_tools/train.py", False),
        (OWN / "commands/measure.py", False),
        (os.__file__, False),
    ],
)
def test_a_package_whose_name_begins_alike_is_the_users(file: str | Path, ours: bool) -> None:
    assert is_ours(str(file)) is ours


TYPER, USER = "/env/lib/python3.11/site-packages/typer/main.py", "/home/me/model.py"
CLI, STEPS, ALONG = str(OWN / "commands/run.py"), str(OWN / "train/steps.py"), str(OWN / "comm/along.py")


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ([TYPER, CLI, STEPS, ALONG], STEPS),
        (
            [TYPER, CLI, str(OWN / "train/trainer.py"), STEPS, str(TORCH / "nn/modules/module.py"), ALONG],
            STEPS,
        ),
        ([TYPER, CLI, STEPS, USER, ALONG], USER),
        ([TYPER, CLI, "<frozen runpy>", USER, STEPS, ALONG], USER),
        ([TYPER, USER, STEPS, ALONG], USER),
    ],
)
def test_the_line_of_a_command_is_the_users_or_the_training_s(files: list[str], shown: str) -> None:
    """It is never a line of the library that parses the command's arguments: in the frames, the files and an error."""

    def called_from(left: list[str]) -> str:
        if not left:
            frame = users_frame(1)
            stack = [file for file, _, _ in stack_of(threading.get_ident())]
            index = place_in(stack)
            assert index is not None and stack[index] == frame.f_code.co_filename
            return frame.f_code.co_filename
        space = {"called_from": called_from, "left": left[1:]}
        exec(compile("found = called_from(left)", left[0], "exec"), space)
        return str(space["found"])

    called_from.__code__ = called_from.__code__.replace(co_filename=ALONG)
    assert called_from(files) == shown


def test_a_line_is_in_the_file_of_its_code_also_if_another_file_has_equal_code() -> None:
    one, other = (compile("mesh.barrier()", file, "exec") for file in ("one.py", "other.py"))
    assert one == other and (line_of(one, 4), line_of(other, 4)) == ("one.py:1", "other.py:1")


def test_the_stack_of_a_thread_and_one_s_own() -> None:
    done = threading.Event()

    def waits() -> None:
        done.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.1)
    found = stack_of(thread.ident or 0)
    done.set()
    thread.join()
    assert (__file__, waits.__code__.co_firstlineno + 1, "waits") in found
    assert found[-1][2] == "_bootstrap"
    own = [(file, name) for file, _, name in stack_of(threading.get_ident()) if not is_ours(file)]
    assert own[0] == (__file__, "test_the_stack_of_a_thread_and_one_s_own")
    assert stack_of(-1) == []


class Local:
    """Something that a failed call holds."""


def test_a_stack_keeps_no_frame() -> None:
    def fails() -> weakref.ref[Local]:
        local = Local()
        stack_of(threading.get_ident())
        return weakref.ref(local)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


def watched_for_frames() -> int:
    seen: list[int] = []
    frames, sys._current_frames = sys._current_frames, lambda: seen.append(1) or frames()  # type: ignore[func-returns-value]
    try:
        with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=3) as mesh:
            mesh.all_reduce("dp", torch.ones(1))
            time.sleep(1.5)
            return len(seen)
    finally:
        sys._current_frames = frames


def test_an_open_mesh_makes_no_frames_of_running_threads(pool: Pool) -> None:
    # Python 3.11 has died by SIGSEGV when another thread walked the frames.
    assert pool.run(watched_for_frames, ranks=2) == [0, 0]


@on_ranks(4)
def test_the_recorded_line_is_the_users() -> None:
    lines = Path(__file__).read_text().splitlines()
    for validate in (0, 64):
        dims = {"pp": 1, "dp": 2, "tp": 2}
        with meshcomm.init(dims=dims, device="cpu", timeout_s=20, validate_calls=validate) as mesh:
            watch: Any = mesh._state.watch
            x = torch.ones(2, requires_grad=True)

            def recorded(text: str) -> None:
                file, line = watch.status()["groups"][0]["last"]["callsite"].rsplit(":", 1)
                assert file == __file__ and text in lines[int(line) - 1]

            for _ in range(3):
                y = mesh.functional.all_reduce("dp", x, grad="sum")
                recorded("functional.all_reduce")
                y.sum().backward()
                recorded("backward()")
                mesh.all_reduce("dp", torch.ones(2))
                recorded('mesh.all_reduce("dp"')
                mesh.all_reduce(("dp", "tp"), torch.ones(2), algorithm="hierarchical")
                recorded("hierarchical")

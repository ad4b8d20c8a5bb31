"""torch's functions: importing meshcomm replaces none of them, and the last close restores all of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import CallMismatchError
from meshcomm.transport import torch_private
from meshcomm.transport.torch_changes import CAN_WATCH, REPLACED, changed
from tests.ranks import on_ranks

# All functions of torch's modules and classes, before and after importing every part of meshcomm that calls torch.distributed.
IMPORTS = """
import importlib, pkgutil, sys, types
import torch, torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.pipelining, torch.utils.checkpoint

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        owners = [module, *(each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name)]
        for owner in owners:
            for key, value in vars(owner).items():
                if callable(value) or isinstance(value, (classmethod, staticmethod, property)):
                    found[name, getattr(owner, "__qualname__", ""), key] = value
    return found

before = functions()
import meshcomm
package = pkgutil.walk_packages(meshcomm.__path__, "meshcomm.")
for each in package:
    # Models import transformers, which takes long.
    if each.name.split(".")[1] in ("comm", "dryrun", "mesh", "parallel", "pattern", "simulator", "transport"):
        importlib.import_module(each.name)
after = functions()
print(sorted(key for key, value in before.items() if key in after and after[key] is not value))
print(len(before))
"""


def test_importing_meshcomm_replaces_no_function_of_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    replaced, count = ended.stdout.splitlines()[-2:]
    assert replaced == "[]" and int(count) > 10_000


def torchs() -> list[object]:
    """torch's current values of the names that meshcomm replaces."""
    return [getattr(each.owner, each.name, None) for each in REPLACED]


@on_ranks(2)
def test_the_last_of_two_meshes_puts_everything_back() -> None:
    plain = torchs()
    for order in permutations(range(2)):
        meshes = [meshcomm.init(dims={"dp": 2}, device="cpu") for _ in range(2)]
        assert torchs() != plain
        for mesh in meshes:
            # Compared calls replace Work.wait. It stays replaced while an asynchronous call is pending.
            mesh.all_reduce("dp", torch.ones(2))
            left = mesh.all_reduce("dp", torch.ones(2), async_op=True)
            assert torchs()[1] is not plain[1]
            left.wait()
        meshes[order[0]].close()
        assert torchs() != plain
        meshes[order[1]].all_reduce("dp", torch.ones(2))
        meshes[order[1]].close()
        assert torchs() == plain and not dist.is_initialized()


@on_ranks(2)
def test_a_failed_mesh_puts_everything_back() -> None:
    plain = torchs()
    with pytest.raises(meshcomm.MeshcommError):
        meshcomm.init(dims={"dp": 2, "tp": 3}, device="cpu")
    assert torchs() == plain
    with pytest.raises(CallMismatchError), meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        mesh.all_reduce("dp", torch.ones(2 + mesh.rank))
    assert torchs() == plain


@pytest.mark.skipif(not CAN_WATCH, reason="torch before 2.14 has no hooks for groups")
@on_ranks(2)
def test_a_watch_puts_everything_back_and_gives_way_to_a_mesh() -> None:
    plain = torchs()
    watch = meshcomm.watch()
    assert all(now is not torch for now, torch in zip(torchs()[3:], plain[3:], strict=True))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    watch.close()
    assert torchs() == plain
    meshcomm.watch()
    with meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        mesh.all_reduce("dp", torch.ones(2))
        assert torchs()[3:] == plain[3:] and torchs() != plain
    assert torchs() == plain
    dist.destroy_process_group()


def test_a_function_that_others_replace_meanwhile_stays_theirs() -> None:
    each = REPLACED[0]
    first, second = changed(), changed()
    first()
    first()  # harmless
    ours = getattr(each.owner, each.name)
    assert ours is not each.torchs
    setattr(each.owner, each.name, print)
    try:
        second()
        assert getattr(each.owner, each.name) is print
    finally:
        setattr(each.owner, each.name, each.torchs)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the state of threads is unknown")
def test_the_end_of_python_waits_for_threads_of_gloo() -> None:
    """One that frees a tensor after Python has shut down is ended by SIGABRT."""
    begun, over = threading.Event(), []

    def busy() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        # Without Python's lock, as Gloo's threads.
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 400_000)
        over.append(True)

    thread = threading.Thread(target=busy)
    thread.start()
    assert begun.wait(60)
    torch_private._await_returning()
    assert over
    thread.join()

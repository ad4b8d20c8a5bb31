"""Functions that the pool's ranks run for a page: a script, a block, or a function of a block."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.mesh import watched
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE, new_job
from meshcomm.transport.variables import with_variables


def script(
    folder: str, arguments: list[str], config: str | None, overrides: list[str], watches: bool = False
) -> tuple[int, str]:
    """Run a script on this rank as `python SCRIPT ARGUMENTS` or, if it watches, `meshcomm run CONFIG SCRIPT ARGUMENTS` does.

    Returns the exit code and the text for stderr.
    """
    variables = {} if config is None else {CONFIG_VARIABLE: config, OVERRIDES_VARIABLE: "\n".join(overrides)}
    with _inside(folder, variables):
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        if watches:
            watched.watch_if_possible(False)
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except MeshcommError as error:
            return 2, f"{type(error).__name__}: {error}"
        except SystemExit as left:
            return (left.code if isinstance(left.code, int) else int(left.code is not None)), ""
        finally:
            # The process goes on, with another program.
            if dist.is_initialized():
                dist.destroy_process_group()
    return 0, ""


def block(folder: str, source: str, filename: str, dims: Mapping[str, int], before: str) -> None:
    """Run a block of a page on this rank of a mesh. `before` defines the names that the block takes for granted."""
    with _inside(folder, {}), meshcomm.init(dims=dims, device="cpu") as mesh:
        names: dict[str, Any] = {"mesh": mesh, "__name__": "page"}
        exec(compile(before, "<preludes>", "exec"), names)
        exec(compile(source, filename, "exec"), names)


def function_of(source: str, filename: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Call one function that a block defines."""
    module = types.ModuleType("page")
    exec(compile(source, filename, "exec"), module.__dict__)
    return getattr(module, name)(*arguments)


@contextlib.contextmanager
def _inside(folder: str, variables: Mapping[str, str]) -> Iterator[None]:
    here, path, arguments = Path.cwd(), list(sys.path), list(sys.argv)
    os.chdir(folder)
    try:
        with with_variables(variables), new_job():
            yield
    finally:
        os.chdir(here)
        sys.path[:] = path
        sys.argv = arguments

"""Run a notebook of docs/notebooks in IPython, and keep its outputs as Jupyter does. As a program, write them into the notebooks.

A kernel would need three seconds for each notebook to load torch. IPython's shell, in which a kernel runs its cells, is enough: it
numbers the cells, displays results and shows errors. A deep test runs the notebooks in a kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from ipykernel.compiler import XCachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import meshcomm
from tests.documents.blocks import DOCS

# A number with its unit, which depends on its size.
_NUMBER = re.compile(r"\d[\d.,]*(e-?\d+)?( ?([kMG]?B(/s)?|[mu]?s|%)(?!\w))?")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


class Shown(DisplayHook):
    """Keeps the result of a cell instead of printing it."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        number = self.shell.execution_count - 1
        result = {"output_type": "execute_result", "execution_count": number}
        self.shell.outputs.append({**result, "data": format_dict, "metadata": md_dict})


class Shell(InteractiveShell):
    """Keeps the result and the error of a cell."""

    displayhook_class = Shown
    # Cells are files in a temporary folder, as in a kernel.
    compiler_class = XCachingCompiler

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        self.outputs.append(
            {"output_type": "error", "ename": etype.__name__, "evalue": str(evalue), "traceback": stb}
        )

    def outputs_of(self, source: str) -> list[dict[str, Any]]:
        """What a cell prints, then what it returns or raises."""
        self.outputs: list[dict[str, Any]] = []
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.run_cell(source, store_history=True)
        text = printed.getvalue()
        return [{"output_type": "stream", "name": "stdout", "text": text}] * bool(text) + self.outputs


@contextlib.contextmanager
def shell() -> Iterator[Shell]:
    """IPython's shell in this process, as in a notebook that has imported meshcomm."""
    main, path = sys.modules["__main__"], [*sys.path]
    settings = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    # The shell would look for packages in the environment that the variable names, which need not be this one's.
    with patch.dict(os.environ):
        os.environ.pop("VIRTUAL_ENV", None)
        made = Shell.instance(config=settings)
    try:
        meshcomm.load_ipython_extension(made)
        yield made
    finally:
        atexit.unregister(made.atexit_operations)
        Shell.clear_instance()
        # A shell's namespace is `__main__`.
        sys.modules["__main__"], sys.path[:] = main, path


def executed(book: dict[str, Any]) -> dict[str, Any]:
    """The notebook with new outputs. Raises AssertionError for the first cell with an error that its tags do not announce."""
    cells = []
    with shell() as made:
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                outputs = made.outputs_of("".join(cell["source"]))
                raised = any(output["output_type"] == "error" for output in outputs)
                assert raised == ("raises-exception" in cell["metadata"].get("tags", [])), outputs
                cell = {**cell, "outputs": outputs, "execution_count": made.execution_count - 1}
            cells.append(cell)
    return {**book, "cells": cells}


def shown(book: dict[str, Any]) -> list[list[Any]]:
    """What is compared of each cell's outputs. Of times, whose cells have the tag "timings", only the words are."""
    return [
        [_plain(output, "timings" in cell["metadata"].get("tags", [])) for output in cell["outputs"]]
        for cell in book["cells"]
        if cell["cell_type"] == "code"
    ]


def _plain(output: dict[str, Any], timings: bool) -> Any:
    texts = {
        **output.get("data", {}),
        **{name: output[name] for name in ("text", "traceback", "evalue") if name in output},
    }
    joined = {name: ("\n" if name == "traceback" else "").join(text) for name, text in texts.items()}
    if timings:
        return {name: _NUMBER.sub("N", text) for name, text in joined.items()}
    return joined


def main() -> None:
    for path in NOTEBOOKS:
        book = executed(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The program's lines, as errors and reports name them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from traceback import extract_tb
from typing import Any, Final

# Where the frames of a traceback are not the program's.
_LIBRARIES: Final = tuple(os.path.dirname(file) + os.sep for file in (__file__, os.__file__))


def source_line(file: str, line: int | None) -> str:
    """Return file:line of the program. For a cell that IPython runs, return the cell and line, such as cell In[7], line 3.

    A kernel compiles each cell as a temporary file, whose name says nothing to the reader.
    """
    ipython: Any = sys.modules.get("IPython")
    # There is no shell; or IPython is older than version 8; or the file is not a cell.
    with suppress(AttributeError, TypeError):
        label, cell = ipython.get_ipython().compile.format_code_name(file)
        return f"{label.lower()} {cell}, line {line}"
    return f"{file}:{line}"


def lines_of(error: BaseException) -> list[str]:
    """Return the place and the text of each of the program's lines in an error's traceback."""
    return [
        f"{source_line(frame.filename, frame.lineno)} in {frame.name}\n    {frame.line}"
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith(_LIBRARIES) and "-packages" not in frame.filename
    ]

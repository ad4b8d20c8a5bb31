"""The commands of `meshcomm`: a file for each, with its arguments, its work and its view.

A file imports what takes time (torch, numpy, pydantic, rich) in its functions, because `meshcomm --help` and a shell's
completion import the file.
"""

from __future__ import annotations

import errno
import os
import sys

from meshcomm.commands.app import app, say
from meshcomm.errors import MeshcommError

__all__ = ["app", "main"]


# Of a write to an open file, whose error has no name of a file.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the `meshcomm` command."""
    try:
        try:
            app(prog_name="meshcomm")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename is not None:
            raise
        # Python would flush it again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        say(
            MeshcommError(
                "the output could not be written",
                given=error.strerror,
                expected="a terminal, a pipe, or a file with space left",
                hint="a file on another disk after >",
            )
        )
        sys.exit(2)

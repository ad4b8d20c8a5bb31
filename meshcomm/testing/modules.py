"""How do the ranks get the modules that pytest imported: same names, same files, same rewritten asserts?

pytest imports test modules by rules of its own (rootdir, import modes), rewrites their asserts, and keeps
both to its process. A rank gets a table of names and files and imports them through `Modules`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from itertools import accumulate
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, final

from _pytest.assertion import rewrite

import meshcomm

# Where a module that a rank imported from the table keeps its Source.
_STAMP: Final = "__meshcomm_source__"


@final
@dataclass(frozen=True)
class Source:
    """Where one module comes from. search: a package's folders. stamp: changes when the file does."""

    file: str | None
    search: tuple[str, ...] | None
    rewrite: bool
    stamp: str


def sources(wanted: str) -> dict[str, Source]:
    """The modules of this process that a rank could not import, or not with rewritten asserts.

    wanted: a module that is in it in any case.
    """
    elsewhere = (
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        str(Path(meshcomm.__file__).parent),
    )
    names = {wanted}
    for name, module in list(sys.modules.items()):
        if isinstance(getattr(module, "__loader__", None), rewrite.AssertionRewritingHook) and not str(
            getattr(module, "__file__", "")
        ).startswith(elsewhere):
            names.add(name)
    with_parents = {each for name in names for each in accumulate(name.split("."), "{}.{}".format)}
    return {name: _source(sys.modules[name]) for name in sorted(with_parents) if name in sys.modules}


def _source(module: ModuleType) -> Source:
    file = getattr(module, "__file__", None)
    search = getattr(module, "__path__", None)
    stamp = ""
    if file is not None:
        try:
            status = os.stat(file)
            stamp = f"{status.st_mtime_ns}-{status.st_size}"
        except OSError:
            file = None
    return Source(
        file=file,
        # pytest makes up packages that have neither; their modules come from the table alone.
        search=None if search is None and file is not None else tuple(search or ()),
        rewrite=isinstance(module.__loader__, rewrite.AssertionRewritingHook),
        stamp=stamp,
    )


@final
class _Rewritten(importlib.machinery.SourceFileLoader):
    """Loads what pytest has rewritten, as a rule from the file where it keeps that."""

    def __init__(self, name: str, source: Source) -> None:
        assert source.file is not None
        super().__init__(name, source.file)
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_STAMP] = self._source
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        # pytest's own functions, tried on 9.2.
        file = Path(self.path)
        kept = rewrite._read_pyc(file, rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}")
        return kept or rewrite._rewrite_test(file, None)[1]  # type: ignore[arg-type]


@final
class Modules(MetaPathFinder):
    """Finds the modules of a table. One per rank, first in sys.meta_path."""

    def __init__(self) -> None:
        self._table: Mapping[str, Source] = {}

    def use(self, table: Mapping[str, Source]) -> None:
        """Take a new table; modules that are no longer what it says are imported anew when asked for."""
        for name, source in table.items():
            module = sys.modules.get(name)
            # Another file of this name, or the same without rewritten asserts.
            if module is not None and source.rewrite and getattr(module, _STAMP, None) != source:
                for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                    del sys.modules[each]
        self._table = dict(table)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        source = self._table.get(fullname)
        if source is None:
            return None
        if source.file is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = list(source.search or ())
            return spec
        loader: Any = _Rewritten(fullname, source) if source.rewrite else None
        return importlib.util.spec_from_file_location(
            fullname,
            source.file,
            loader=loader,
            submodule_search_locations=None if source.search is None else list(source.search),
        )

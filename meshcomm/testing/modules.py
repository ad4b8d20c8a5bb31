"""How do the ranks get the modules that pytest imported: same names, same files, same rewritten asserts?

pytest imports test modules by rules of its own (rootdir, import modes), rewrites their asserts, and keeps
both to its process. A rank gets a table of names and files and imports them through `Modules`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, final

from _pytest.assertion.rewrite import AssertionRewritingHook, rewrite_asserts

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
    elsewhere = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    elsewhere.add(str(Path(meshcomm.__file__).parent))
    found: dict[str, Source] = {}
    for name, module in list(sys.modules.items()):
        rewritten = isinstance(getattr(module, "__loader__", None), AssertionRewritingHook)
        if name == wanted or (
            rewritten and not str(getattr(module, "__file__", "")).startswith(tuple(elsewhere))
        ):
            for each in _with_parents(name):
                if each not in found and each in sys.modules:
                    found[each] = _source(sys.modules[each])
    return found


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


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
        rewrite=isinstance(module.__loader__, AssertionRewritingHook),
        stamp=stamp,
    )


def compiled(file: str, stamp: str, folder: Path) -> CodeType:
    """The code of `file` with asserts rewritten as pytest does it; made once, kept in `folder`."""
    kept = folder / f"{hashlib.sha256(f'{file} {stamp}'.encode()).hexdigest()[:32]}.code"
    try:
        code: CodeType = marshal.loads(kept.read_bytes())
        return code
    except (OSError, EOFError, ValueError):
        pass
    data = Path(file).read_bytes()
    tree = ast.parse(data, filename=file)
    rewrite_asserts(tree, data, file)
    code = compile(tree, file, "exec", dont_inherit=True)
    # All ranks may come here at once, so the file appears whole or not at all.
    number, name = tempfile.mkstemp(dir=folder)
    with open(number, "wb") as new:
        new.write(marshal.dumps(code))
    os.replace(name, kept)
    return code


@final
class _Rewritten(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, source: Source, folder: Path) -> None:
        assert source.file is not None
        super().__init__(name, source.file)
        self._source = source
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_STAMP] = self._source
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        return compiled(self.path, self._source.stamp, self._folder)


@final
class Modules(MetaPathFinder):
    """Finds the modules of a table. One per rank, first in sys.meta_path."""

    def __init__(self) -> None:
        self._table: Mapping[str, Source] = {}
        self._folder = Path()

    def use(self, table: Mapping[str, Source], folder: Path) -> None:
        """Take a new table; modules that are no longer what it says are imported anew when asked for."""
        for name, source in table.items():
            module = sys.modules.get(name)
            # Another file of this name, or the same without rewritten asserts.
            if module is not None and source.rewrite and getattr(module, _STAMP, None) != source:
                for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                    del sys.modules[each]
        self._table, self._folder = dict(table), folder

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
        loader: Any = _Rewritten(fullname, source, self._folder) if source.rewrite else None
        return importlib.util.spec_from_file_location(
            fullname,
            source.file,
            loader=loader,
            submodule_search_locations=None if source.search is None else list(source.search),
        )

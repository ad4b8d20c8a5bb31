"""How do the ranks get the modules that pytest imported: same names, same files, same rewritten asserts?

pytest imports test modules by its own rules (rootdir, import modes), rewrites their asserts, and keeps both
to its process. Each rank makes a pytest.Config, which brings pytest's import hook, and finds files by a table.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

import pytest

import meshcomm


class Source(NamedTuple):
    """Where one module comes from. search: a package's folders. rewritten: whether its asserts are."""

    file: str | None
    search: tuple[str, ...] | None
    rewritten: bool


def sources(wanted: str) -> dict[str, Source]:
    """The modules of this process that a rank could not import, or not with rewritten asserts.

    wanted: a module that is included in any case.
    """
    libraries = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), *meshcomm.__path__)
    names = {wanted}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and _is_rewritten(module) and not file.startswith(libraries):
            names.add(name)
    with_parents = {each for name in names for each in accumulate(name.split("."), "{}.{}".format)}
    return {name: _source(sys.modules[name]) for name in sorted(with_parents) if name in sys.modules}


def _is_rewritten(module: ModuleType) -> bool:
    # pytest's import hook loads the modules that it finds; Python's own finders use other loaders.
    return any(getattr(module, "__loader__", None) is finder for finder in sys.meta_path)


def _source(module: ModuleType) -> Source:
    file, search = getattr(module, "__file__", None), getattr(module, "__path__", None)
    if file is not None and not Path(file).exists():
        file = None
    # pytest makes up packages that have neither file nor folders; their modules come from the table alone.
    folders = None if search is None and file is not None else tuple(search or ())
    return Source(file, folders, _is_rewritten(module))


@final
class Modules(MetaPathFinder):
    """Finds the modules of a table. One per rank, first in sys.meta_path."""

    def __init__(self) -> None:
        before = list(sys.meta_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            patch.delenv("PYTEST_PLUGINS", raising=False)
            pytest.Config.fromdictargs({}, ["-c", os.devnull, "--noconftest"])
        self._hook: Any = next(finder for finder in sys.meta_path if finder not in before)
        self._table: Mapping[str, Source] = {}

    def use(self, table: Mapping[str, Source]) -> None:
        """Take a new table; a module that came from elsewhere is imported again when asked for."""
        for name, source in table.items():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec and source.rewritten and (spec.loader, spec.origin) != (self._hook, source.file):
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
        search = None if source.search is None else list(source.search)
        if source.file is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = search or []
            return spec
        loader = self._hook if source.rewritten else None
        return importlib.util.spec_from_file_location(
            fullname, source.file, loader=loader, submodule_search_locations=search
        )

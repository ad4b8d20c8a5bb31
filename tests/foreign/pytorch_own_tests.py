"""PyTorch's own tests of distributed code: unwatched, and watched by meshcomm.

    python -m tests.foreign.environments pytorch
    python -m tests.foreign.pytorch_own_tests FOLDER [FILE ...]

FOLDER is test/distributed of PyTorch's source, in a version close to the installed torch. Prints a table by file, and each
test with a different outcome when watched. Processes are forked, and not spawned as in PyTorch, which saves the imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import tests
from tests.foreign.environments import make

FILES: Final = (
    "test_device_mesh.py",
    "_tensor/test_redistribute.py",
    "tensor/parallel/test_tp_style.py",
    "tensor/parallel/test_parallelize_api.py",
    "tensor/parallel/test_tp_examples.py",
)
_WAY: Final = "MESHCOMM_TESTS_OF_PYTORCH"
_WAYS: Final = ("plain", "watched")


def pytest_configure(config: Any) -> None:
    """Configure pytest as its plugin, in the processes that run PyTorch's tests."""
    from torch import multiprocessing
    from torch.testing._internal import common_distributed

    from meshcomm.mesh.watched import watch_if_possible

    def forked(self: Any) -> None:
        self._start_processes(multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = forked  # type: ignore[method-assign]
    if os.environ[_WAY] == "watched":
        watch_if_possible(prints=False)


def outcomes(folder: Path, file: str, way: str) -> dict[str, str]:
    """The outcome of each test of a file, by its name."""
    with tempfile.TemporaryDirectory() as told:
        report = Path(told) / "report.xml"
        arguments = [
            "-p",
            "no:meshcomm",
            "-p",
            "no:cacheprovider",
            "-p",
            __spec__.name,
            f"--junitxml={report}",
        ]
        arguments += ["-n", "0", "-q", "--timeout", "200", "--override-ini", "addopts=", file]
        own = str(Path(tests.__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": own, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", _WAY: way}
        python = make("pytorch") / "bin" / "python"
        with (Path(told) / "output").open("w") as output:
            subprocess.run(
                [python, "-m", "pytest", *arguments], cwd=folder, env=env, stdout=output, stderr=output
            )
        if not report.exists():
            raise SystemExit((Path(told) / "output").read_text())
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": _ended(case) for case in cases}


def _ended(case: ElementTree.Element) -> str:
    for kind in ("error", "failure", "skipped"):
        if (found := case.find(kind)) is not None:
            return f"{kind}: {(found.get('message') or '').strip()[:600]}"
    return "passed"


def main(folder: Path, files: tuple[str, ...]) -> None:
    different = []
    print(
        f"| file | tests | {' | '.join(f'passed {way}' for way in _WAYS)} | end alike |\n|---|---|---|---|---|"
    )
    for file in files:
        ends = {way: outcomes(folder, file, way) for way in _WAYS}
        kinds = {way: {name: end.partition(":")[0] for name, end in of.items()} for way, of in ends.items()}
        passed = [str(list(kinds[way].values()).count("passed")) for way in _WAYS]
        names = list(ends["plain"])
        alike = sum(len({kinds[way][name] for way in _WAYS}) == 1 for name in names)
        print(f"| {file} | {len(names)} | {' | '.join(passed)} | {alike} |", flush=True)
        for way in _WAYS[1:]:
            odd = [name for name in names if kinds[way][name] != kinds["plain"][name]]
            different += [(name, way, ends["plain"][name], ends[way][name]) for name in odd]
    for name, way, before, after in different:
        print(f"\n{name}\n  plain: {before}\n  {way}: {after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), tuple(sys.argv[2:]) or FILES)

"""Run the tests on several versions of torch: `python docs/tools/torch_versions.py [--torch VERSION ...] [TEST ...]`

For each version, it creates a virtual environment with the pins in constraints.txt, runs the tests in it, and writes one row
of the table in docs/reference/support.md. Rows of other versions are kept. TEST: files or node ids for pytest, by default the
full suite. Each environment takes about 5 GB of disk space and is deleted before the next one is created. The exit code is 1
if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "support.md"
VERSIONS: Final = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# The free disk space required before an environment is created, including 5 GB for a CUDA build.
NEEDED_BYTES: Final = 30 * 2**30
# Part of the skip reason of tests that need hooks on process groups, on versions of torch without these hooks.
NEEDS_HOOKS: Final = "group hooks"
_HEAD: Final = (
    "| torch | group hooks | passed | skipped | of these, need hooks | failed | tests | Python | date |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
_TABLE: Final = re.compile(r"(?<=<!-- torch versions -->\n).*?(?=<!-- end of torch versions -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """The test results on one version of torch. failed: names of tests that failed or raised an error."""

    torch: str
    hooks: bool
    passed: int
    skipped: int
    skipped_for_hooks: int
    failed: tuple[str, ...]
    tests: str

    def row(self) -> str:
        """The row of the table for this result."""
        cells = [
            self.torch,
            "yes" if self.hooks else "no",
            f"{self.passed:,}",
            f"{self.skipped:,}",
            f"{self.skipped_for_hooks:,}",
            f"{len(self.failed):,}",
            self.tests,
            f"{sys.version_info.major}.{sys.version_info.minor}",
            date.today().isoformat(),
        ]
        return f"| {' | '.join(cells)} |\n"


def main() -> int:
    """Run the tests on each version, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where environments are created; by default, the system's temporary folder",
    )
    parser.add_argument("tests", nargs="*", metavar="TEST")
    given = parser.parse_args()
    failed = False
    for version in given.torch:
        result = tried(version, given.tests, given.folder)
        PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
        print(result.row(), *(f"  failed: {name}\n" for name in result.failed), sep="", flush=True)
        failed = failed or bool(result.failed)
    return int(failed)


def tried(version: str, tests: list[str], folder: Path | None) -> Result:
    """Run the tests on one version of torch, in an environment that is deleted afterwards."""
    with TemporaryDirectory(prefix=f"torch-{version}-", dir=folder) as name:
        place = Path(name)
        free = shutil.disk_usage(place).free
        if free < NEEDED_BYTES:
            raise SystemExit(
                f"{place}: {free / 2**30:.0f} GiB are free, {NEEDED_BYTES / 2**30:.0f} are needed"
            )
        python = str(place / "venv" / "bin" / "python")
        venv.create(place / "venv", with_pip=True)
        (place / "constraints.txt").write_text(constraints(version))
        pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir", "-c", str(place / "constraints.txt")]
        subprocess.run([*pip, "-e", f"{ROOT}[dev]"], check=True)
        asked = "import torch.distributed as d; print(hasattr(d.ProcessGroup, 'register_pre_hook'))"
        hooks = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
        report = place / "report.xml"
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        done = subprocess.run(pytest, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode} on torch {version}")
        what = f"{len(tests)} chosen" if tests else "all"
        return counted(report.read_text(encoding="utf-8"), version, hooks.stdout.strip() == "True", what)


def constraints(version: str) -> str:
    """The pins in constraints.txt with the given version of torch, and with setuptools left to that version's requirements."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    kept = [line for line in pinned if not line.startswith(("torch==", "setuptools=="))]
    return "".join([*kept, f"torch=={version}\n"])


def counted(report: str, version: str, hooks: bool, tests: str) -> Result:
    """The Result from pytest's report in JUnit format."""
    passed, failed, skipped = 0, [], []
    for case in ElementTree.fromstring(report).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            skipped.append(skip.get("message", ""))
        else:
            passed += 1
    for_hooks = sum(NEEDS_HOOKS in reason for reason in skipped)
    return Result(version, hooks, passed, len(skipped), for_hooks, tuple(failed), tests)


def with_row(page: str, result: Result) -> str:
    """The page with the row for this version added to or replaced in the table, which is sorted by version."""
    table = _TABLE.search(page)
    if table is None:
        raise SystemExit(f"{PAGE.name} has no table of torch versions to write into")
    rows = {row.split("|")[1].strip(): row for row in table.group().splitlines(keepends=True)[2:]}
    rows[result.torch] = result.row()
    ordered = sorted(rows, key=lambda version: [int(part) for part in version.split(".")])
    return page[: table.start()] + _HEAD + "".join(rows[version] for version in ordered) + page[table.end() :]


if __name__ == "__main__":
    sys.exit(main())

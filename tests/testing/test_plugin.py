"""The pytest plugin on test suites written for it: the output that it shows, and the suites that it does not touch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# pytester forgets the imports of a suite, and torch cannot be imported twice.
import meshcomm.testing.processes
import meshcomm.testing.simulated

pytestmark = pytest.mark.long

pytest_plugins = ["pytester"]

# These suites run in a process that has already imported meshcomm. pytest would rewrite the asserts of an installed
# plugin's package, and warns that it cannot.
QUIET = (
    *("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"),
    # The tests of the inner suites run in the order of their files, even if this suite is shuffled.
    *("-p", "no:randomly"),
)

SUITE = """
    import os, sys, time, warnings
    import pytest, torch
    from helpers import twice

    def reduced(mesh, x):
        return mesh.all_reduce("tp", x)

    @pytest.fixture
    def number(): return 3

    @pytest.fixture
    def made_up(): return lambda: 3

    @pytest.mark.mesh(dp=2, tp=2)
    @pytest.mark.parametrize("factor", [2, 3])
    def test_values_cross(mesh, number, factor, tmp_path, monkeypatch):
        monkeypatch.setenv("OF_THIS_TEST", "1")
        assert reduced(mesh, torch.full((2,), float(factor * number))).tolist() == [factor * 6.0] * 2
        (tmp_path / f"rank{mesh.rank}").write_text("was here")
        return 5

    @pytest.mark.mesh(dp=2, tp=2)
    def test_nothing_is_left(mesh):
        assert "OF_THIS_TEST" not in os.environ and mesh.coords == {"dp": mesh.rank // 2, "tp": mesh.rank % 2}
        with pytest.raises(ValueError, match="expected"):
            raise ValueError("expected")
        if mesh.rank == 1:
            warnings.warn("careful")

    @pytest.mark.mesh(dp=2, tp=2)
    def test_one_fails(mesh):
        print("printed")
        print("shouted", file=sys.stderr)
        x = reduced(mesh, torch.ones(3))
        if mesh.rank == 1:
            assert x.tolist() == [2, 2, 7]

    @pytest.mark.mesh(tp=4)
    def test_all_fail(mesh):
        assert reduced(mesh, torch.ones(1)) == 5, "in one voice"

    @pytest.mark.mesh(dp=2, tp=2)
    def test_two_fail(mesh):
        if mesh.coord("tp") == 1:
            twice(mesh, None)

    @pytest.mark.mesh(dp=2, tp=2)
    def test_one_stays_away(mesh):
        if mesh.rank == 3:
            raise KeyError("lost")
        reduced(mesh, torch.ones(1))

    @pytest.mark.mesh(tp=2, timeout_s=1.5)
    def test_hang(mesh):
        while mesh.rank == 1:
            time.sleep(0.01)

    @pytest.mark.mesh(dp=2, tp=2)
    def test_after_it(mesh):
        assert reduced(mesh, torch.ones(1)) == 2

    @pytest.mark.mesh(tp=2)
    def test_skipped(mesh): pytest.skip("not here")

    @pytest.mark.mesh(tp=2)
    def test_xfailed(mesh): pytest.xfail("known")

    @pytest.mark.mesh(tp=2)
    @pytest.mark.xfail(strict=True)
    def test_xfail_by_marker(mesh): return 1 / mesh.rank

    @pytest.mark.mesh(tp=2)
    def test_lambda(mesh, made_up): assert made_up() == 3

    @pytest.mark.mesh(tp=2, tiemout_s=3)
    def test_typing_error(mesh): pass

    def test_no_marker(mesh): pass

    @pytest.mark.mesh(tp=2)
    def test_takes_none(): pass

    @pytest.mark.mesh(tp=2)
    class TestClass:
        @pytest.fixture(autouse=True)
        def _set(self): self.x = 4
        def test_method(self, mesh): assert self.x == 4 and reduced(mesh, torch.ones(1)) == 2
        def test_plain(self): assert self.x == 4

    @pytest.fixture
    def early(mesh): return mesh.rank

    @pytest.mark.mesh(tp=2)
    def test_early(mesh, early): pass

    def test_last(): assert "torch" in sys.modules
"""
HELPERS = """
    def twice(mesh, x):
        return 2 * x
"""
DEADLOCK = """
    @pytest.mark.mesh(tp=2)
    def test_deadlock(mesh):
        mesh.recv("tp", torch.ones(1), src=1 - mesh.rank)
"""
KILLED = """
    @pytest.mark.mesh(tp=2)
    def test_killed(mesh):
        print("before")
        if mesh.rank == 1:
            os.kill(os.getpid(), 9)
"""


def lay_out(pytester: pytest.Pytester, **files: str) -> None:
    pytester.makepyfile(**files)
    # The inner suite must not depend on the options of this one.
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider --strict-markers\nfilterwarnings = default\n")


@pytest.mark.parametrize("via", ["gloo", "simulator"])
@pytest.mark.deep_cases(r"\[gloo")
def test_a_suite(pytester: pytest.Pytester, via: str) -> None:
    gloo = via == "gloo"
    lay_out(pytester, test_suite=SUITE + (KILLED if gloo else DEADLOCK), helpers=HELPERS)
    result = pytester.runpytest_inprocess("-rA", f"--mesh-via={via}", *QUIET)
    text = result.stdout.str()
    outcomes = result.parseoutcomes()
    assert outcomes == {
        "passed": 7 if gloo else 8,
        "failed": 8 if gloo else 7,
        "errors": 3,
        "skipped": 1,
        "xfailed": 2,
        "warnings": 1,
    }, text

    def section(test: str) -> str:
        return text.split(f"_ {test} _")[1].split("\n____")[0]

    # One rank fails: its assert explained, its coords, and the prints of all ranks.
    one = section("test_one_fails")
    assert "- rank 1 (dp=0 tp=1) of 4 -" in one
    assert "assert [2.0, 2.0, 2.0] == [2, 2, 7]" in one
    # From processes, only the exception's text is sent.
    assert gloo or "At index 2 diff: 2.0 != 7" in one
    assert "[r0 dp0 tp0] printed\n[r1 dp0 tp1] printed\n[r2 dp1 tp0] printed\n" in one
    assert "[r3 dp1 tp1] shouted" in one
    assert one.count("in test_one_fails\n    assert x.tolist() == [2, 2, 7]\n") == 1
    assert "FAILED test_suite.py::test_one_fails - Failed: [r1 dp0 tp1] assert" in text
    # All ranks fail: shown once.
    whole = section("test_all_fail")
    assert "- all 4 ranks, as reported by rank 0 -" in whole and whole.count("Traceback") == 1
    assert "where tensor([4.]) = reduced(Mesh(tp=4; rank 0, cpu)" in whole
    # Two ranks fail: shown once, with their common coords, and only with frames of the user.
    two = section("test_two_fail")
    assert "- ranks 1 3 (all with tp=1) of 4 -" in two and two.count("Traceback") == 1
    assert 'helpers.py", line 2, in twice\n    return 2 * x' in two
    assert "meshcomm/" not in two and "_pytest" not in two
    # One rank stays away because it failed: its error, and the line where the other rank waits.
    away = section("test_one_stays_away")
    assert "KeyError: 'lost'" in away and away.count("Traceback") == 1
    assert "- rank 2 (dp=1 tp=0) of 4: still running -" in away
    assert "in test_one_stays_away\n    reduced(mesh, torch.ones(1))" in away
    assert "threading.py" not in away and "multiprocessing" not in away
    # A hang: the test's time limit, and where the rank is.
    hang = section("test_hang")
    assert "- rank 1 (tp=1) of 2: did not return within 1.5 s -" in hang
    assert "time.sleep(0.01)" in hang and "in test_hang" in hang
    # Skips and expected failures keep their reasons.
    assert ": not here" in text.split("SKIPPED [1] ")[1].splitlines()[0]
    assert "XFAIL test_suite.py::test_xfailed - known" in text
    assert "UserWarning: careful" in text
    # Mistakes are explained.
    assert "MeshTestError: the mesh marker has an unknown keyword 'tiemout_s'" in text
    assert "try:      timeout_s=..." in text
    assert "MeshTestError: the test uses the mesh fixture but has no mesh marker" in text
    assert "MeshTestError: test_takes_none is marked mesh(tp=...) but takes no mesh" in text
    assert "MeshTestError: mesh.rank is used in the main process" in text
    if not gloo:
        dead = section("test_deadlock")
        assert "DeadlockError: " in dead and "--- all 2 ranks: waits for others" in dead
        assert "FAILED test_suite.py::test_deadlock - Failed: DeadlockError" in text
    else:
        assert "MeshTestError: made_up cannot be given to the ranks of test_lambda" in text
        killed = section("test_killed")
        assert "rank 1 (tp=1) was killed by SIGKILL" in killed
        assert "[r1 tp1] before" in killed and "rank 0 (tp=0) of 2: no failure" in killed
        assert "FAILED test_suite.py::test_killed - Failed: rank 1 (tp=1) was killed by SIGKILL" in text


PACKAGED = """
    import pytest, torch
    from {helpers} import twice

    class Mine(Exception): pass

    def raise_mine(): raise Mine("own")

    @pytest.mark.mesh(dp=1, tp=2, via=("simulator", "gloo"), merge={{"all": ("dp", "tp")}}, validate_calls="always")
    class TestBoth:
        @pytest.mark.parametrize("thrower", [raise_mine])
        def test_it(self, mesh, given, thrower):
            assert twice(mesh, mesh.all_reduce("all", torch.ones(1))) == given
            with pytest.raises(Mine):
                thrower()
"""


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_packages_and_import_modes(pytester: pytest.Pytester, mode: str) -> None:
    # importlib allows two files of one name without packages; prepend needs packages for that.
    packages = mode == "prepend"
    for folder in ("one", "two"):
        inside = pytester.mkpydir(f"tests_{folder}") if packages else pytester.mkdir(f"tests_{folder}")
        helpers = f"tests_{folder}.helpers" if packages else "helpers"
        (inside if packages else pytester.path).joinpath("helpers.py").write_text(
            "def twice(mesh, x):\n    return 2 * x\n"
        )
        (inside / "test_same.py").write_text(
            "\n".join(line[4:] for line in PACKAGED.format(helpers=helpers).splitlines())
        )
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef given(): return 4.0")
    pytester.makeini(f"[pytest]\npythonpath = .\naddopts = --import-mode={mode} -p no:cacheprovider")
    result = pytester.runpytest_inprocess("-v", *QUIET)
    assert result.parseoutcomes() == {"passed": 4}, result.stdout.str()
    both = (
        "tests_one/test_same.py::TestBoth::test_it*simulator* PASSED*",
        "tests_two/*::test_it*gloo* PASSED*",
    )
    result.stdout.fnmatch_lines(both)


QUEUED = """
    import pytest, torch

    @pytest.mark.mesh(dp=2, via="gloo")
    def test_backend(mesh):
        assert mesh.plan.defaults.backend == "emulated_nccl"
        x = mesh.all_reduce("dp", torch.ones(1), async_op=True)
        assert x.wait().tolist() == [2]

    @pytest.mark.mesh(dp=2, not_via={"emulated_nccl": "it needs tags"})
    def test_tags(mesh): pass

    @pytest.mark.mesh(dp=2)
    def test_race(mesh):
        x = torch.ones(1)
        handle = mesh.all_reduce("dp", x, async_op=True)
        try:
            x + 1
        finally:
            handle.wait()

    @pytest.mark.mesh(dp=2)
    def test_after_it(mesh): assert mesh.all_reduce("dp", torch.ones(1)) == 2
"""


def test_a_suite_on_the_emulated_backend(pytester: pytest.Pytester) -> None:
    lay_out(pytester, test_queued=QUEUED)
    result = pytester.runpytest_inprocess("-rs", "--mesh-via=emulated_nccl", *QUIET)
    text = result.stdout.str()
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    assert "not through emulated_nccl: it needs tags" in text
    assert "aten::add touches memory of ALLREDUCE, which has not been waited for" in text


BYSTANDER = """
    import sys
    import pytest

    @pytest.fixture
    def mesh(): return "a net of triangles"

    @pytest.mark.mesh(finite=True)
    def test_their_own(mesh): assert mesh == "a net of triangles"

    def test_what_is_loaded():
        ours = {name for name in sys.modules if name.split(".")[0] == "meshcomm"}
        assert ours == {"meshcomm", "meshcomm.testing", "meshcomm.testing.plugin"}
        assert not {"torch", "numpy", "pydantic", "multiprocessing"} & set(sys.modules)
"""


def test_a_suite_without_mesh_tests_is_left_alone(pytester: pytest.Pytester) -> None:
    lay_out(pytester, test_bystander=BYSTANDER)
    command = [sys.executable, *["-m", "pytest", "-q", "-p", "meshcomm", "-p", "no:hypothesispytest"]]
    path = str(Path(meshcomm.__file__).parents[1])
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=pytester.path, env=env)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_pytest_is_used_by_its_public_names() -> None:
    folder = Path(meshcomm.testing.processes.__file__).parent
    private = re.compile(r"\b(import|from) _pytest|\b_pytest\.\w+\(|item\._")
    assert not [path.name for path in folder.glob("*.py") if private.search(path.read_text())]

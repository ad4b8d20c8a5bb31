"""`init` uses every setting that the job was started with, or refuses; it never ignores one silently."""

from __future__ import annotations

from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from meshcomm import MeshConfig, load_config, simulate
from meshcomm.dryrun.script import Script, mesh_of_script
from meshcomm.errors import LaunchError, RankFailed
from meshcomm.mesh.source import MeshOnly, Settings, settings_of
from meshcomm.simulator.run import simulate_script

CONFIG = (
    '[mesh]\ndims = { dp = 2, tp = 2 }\ndevice = "cpu"\ntimeout_s = 30\n[mesh.options.dp]\ntimeout_s = 60\n'
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a rank of `meshcomm run mesh.toml --set mesh.validate_calls=7 script.py`."""
    path = tmp_path / "mesh.toml"
    path.write_text(CONFIG)
    monkeypatch.setenv("MESHCOMM_CONFIG", str(path))
    monkeypatch.setenv("MESHCOMM_SET", "mesh.validate_calls=7")
    return path


def each(*calls: tuple[Any, dict[str, Any], list[str]]) -> list[Settings]:
    """The settings of consecutive init calls on one rank."""
    return copy_context().run(lambda: [settings_of(*call) for call in calls])


def test_a_mesh_of_the_scripts_own_does_not_put_the_config_aside(job: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        each((None, {"dims": {"dp": 2, "tp": 2}, "device": "cpu"}, []))
    assert "settings of" in str(caught.value) and "would have no effect" in str(caught.value)
    unused = f"{job} --set mesh.validate_calls=7: mesh.timeout_s, mesh.validate_calls, mesh.options;"
    assert str(caught.value.given).startswith(unused)
    assert "meshcomm run (or simulate) --world-size N script.py" in str(caught.value.hint)
    for config, lost in (
        (job, "mesh.validate_calls"),
        (MeshConfig(dims={"tp": 2, "dp": 2}), "mesh.dims, mesh.device"),
        ({"mesh": {"dims": {"dp": 4}}}, "mesh.dims"),
    ):
        with pytest.raises(LaunchError, match=lost):
            each((config, {}, []))


def test_what_says_the_same_or_comes_beside_it_is_taken(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_config(job, ["mesh.validate_calls=7"])
    assert each((job, {}, ["mesh.validate_calls=7"]), (whole, {}, [])) == [whole, whole]
    # The config's own mesh first, then another mesh.
    beside = {"dims": {"all": -1}}
    assert each((None, {}, []), (None, beside, [])) == [whole, MeshOnly(MeshConfig(dims={"all": -1}))]
    # The program may have filled in sizes that the config leaves open.
    monkeypatch.setenv("MESHCOMM_SET", "mesh.dims.dp=-1")
    filled = load_config(job, ["mesh.dims.dp=-1"]).resolved(4)
    assert each((filled, {}, [])) == [filled]
    # A script that leaves sizes open gets the sizes of the config.
    monkeypatch.setenv("MESHCOMM_SET", "")
    script = load_config(job, ["mesh.dims.dp=-1"])
    assert each((script, {}, [])) == [script]
    # A simulation inside the program is not a mesh of the job.
    assert copy_context().run(simulate, lambda mesh: mesh.rank, dims={"x": 3}) == [0, 1, 2]


def test_the_mesh_of_one_job_is_not_that_of_the_next(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = job.with_name("other.toml")
    other.write_text(CONFIG)
    own: tuple[Any, dict[str, Any], list[str]] = (None, {"dims": {"dp": 4}}, [])

    def both_jobs() -> None:
        settings_of(None, {}, [])
        settings_of(*own)
        monkeypatch.setenv("MESHCOMM_CONFIG", str(other))
        with pytest.raises(LaunchError, match="would have no effect"):
            settings_of(*own)

    copy_context().run(both_jobs)


def test_a_dry_run_leaves_no_job_behind(job: Path, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("import meshcomm\nmeshcomm.init()\nmeshcomm.init(dims={'dp': 4})\n")

    def dry_run_then_init() -> None:
        mesh_of_script(Script(script, config=job), 4)
        with pytest.raises(LaunchError, match="would have no effect"):
            settings_of(None, {"dims": {"dp": 4}}, [])

    copy_context().run(dry_run_then_init)


def test_a_simulated_script_is_told_too(tmp_path: Path) -> None:
    config, script = tmp_path / "mesh.toml", tmp_path / "own.py"
    config.write_text(CONFIG)
    script.write_text("import meshcomm\nmeshcomm.init(dims={'dp': 4})\n")
    with pytest.raises(RankFailed, match=r"mesh\.dims, mesh\.device, mesh\.timeout_s, mesh\.options"):
        simulate_script(config, script, [], [], None, 0)


def test_overrides_beside_arguments_are_refused() -> None:
    with pytest.raises(LaunchError, match="overrides have no effect"):
        each((None, {"dims": {"dp": 4}}, ["mesh.dims.dp=2"]))

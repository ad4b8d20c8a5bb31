"""`meshcomm bench`: every operation is measured, tables are complete, and wrong calls are refused."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.commands.bench import fit_facts, view
from meshcomm.commands.measure import Asked, Item, Measured, measured_facts, row_facts
from meshcomm.config import TopologyConfig, load_config
from meshcomm.errors import ConfigError
from meshcomm.predict.fit import MARK, fit_links
from meshcomm.predict.links import known_machine
from meshcomm.predict.times import OPERATIONS, Operation
from meshcomm.reductions import REDUCTIONS
from meshcomm.testing import Pool
from tests.commands.shown import Shown, recorded
from tests.predict.test_fit import SIZES, TRUE, config, model_times

# -- pictures and tables ----------------------------------------------------------------------------


def made_facts(dims: int = 3) -> dict[str, Any]:
    """The facts of a run whose times are linear in the size."""
    names = ["dp", "tp", "all"][:dims]
    rows = [
        row_facts(dim, 4, operation, size, 1, ([1e-4 + size / 1e9], [1.3e-4 + size / 1.1e9]))
        for dim in names
        for operation in OPERATIONS
        for size in SIZES
    ]
    machine = {"date": "2026-11-20T10:00:00+00:00", "hosts": 2, "cpus": 8, "load": 0.25}
    return {
        "machine": machine | {"device": "a <device> & more", "torch": "2.13.0"},
        "mesh": {"dims": {"dp": 2, "tp": 2}, "world_size": 4},
        "rounds": 9,
        "dims": [{"dim": dim, "size": 4, "groups": 1, "backend": "gloo", "link": "node"} for dim in names],
        "rows": rows,
        "skipped": [{"dim": "pp", "operation": None, "why": "one rank: nothing moves"}],
        "fit": None,
    }


def shown(what: Any) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def printed(facts: dict[str, Any]) -> str:
    return shown(view(facts))


def test_the_table_has_every_row_and_what_was_left_out() -> None:
    facts = made_facts()
    settings = config(**TRUE)
    times, live = model_times(settings, "gloo", 0)
    facts["fit"] = fit_facts(fit_links(times, live, known_machine(settings.topology, "here")), ["a note"])
    text = printed(facts)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0].startswith("mesh dp=2 tp=2: 4 ranks on 2 hosts, a <device> & more, torch 2.13.0")
    assert "the median over the rounds of meshcomm's time divided by torch's" in " ".join(text.split())
    # A terminal of 80 columns shows the whole table.
    assert max(len(line) for line in lines if "iB" in line or "links." in line or "GB/s" in line) <= 80
    assert sum("KiB" in line or "MiB" in line for line in lines) == len(facts["rows"])
    # 64 MiB at 1 GB/s and 0.1 ms. The bus bandwidth of all_reduce over 4 ranks is half as much again.
    row = next(line for line in lines if "64 MiB" in line)
    assert row.split() == ["64", "MiB", "67.2", "ms", "0.999", "1.5", "61.1", "ms", "1.10"]
    assert "skipped: all along pp: one rank: nothing moves" in lines
    assert any(
        line.split() == ["links.node", "cp", "tp", "30", "us", "2.5", "40", "0%", "0%"] for line in lines
    )
    assert "a note" in lines


# -- real ranks -------------------------------------------------------------------------------------


def on_ranks(operations: tuple[Operation, ...], lacking: tuple[str, ...]) -> dict[str, Any]:
    """The facts. Under "made", they have this rank's number of calls of either side, for each item."""
    from meshcomm.commands.measure import Call, Pair, pair

    made: list[list[int]] = []

    def counted(*given: Any) -> Pair:
        made.append([0, 0])

        def counting(which: int, call: Call) -> Call:
            def wrapped() -> object:
                made[-1][which] += 1
                return call()

            return wrapped

        return Pair(*(counting(which, call) for which, call in enumerate(pair(*given))))

    mesh_of = {"dims": {"dp": 2, "tp": 2}, "merge": {"all": ("dp", "tp")}}
    lacks = [(op, REDUCTIONS[op]) for op in lacking]
    with (
        patch.dict(
            REDUCTIONS, {op: replace(row, wire=replace(row.wire, lacking=("gloo",))) for op, row in lacks}
        ),
        patch("meshcomm.commands.measure.pair", counted),
        meshcomm.init(**mesh_of, device="cpu", validate_calls=0) as mesh,  # type: ignore[arg-type]
    ):
        asked = Asked(operations, [64, 4099], ("tp", "all"), 1, round_s=0.001)
        facts = measured_facts(mesh, asked, TopologyConfig(ranks_per_node=2), progress=mesh.rank == 0)
    return facts | {"made": made}


def test_four_ranks_measure_every_operation_along_every_dim(pool: Pool) -> None:
    by_rank = pool.run(on_ranks, OPERATIONS, (), ranks=4)
    facts = by_rank[0]
    # All ranks have the figures of the slowest rank.
    assert all(each["rows"] == facts["rows"] for each in by_rank)
    assert [(d["dim"], d["size"], d["groups"], d["link"]) for d in facts["dims"]] == [
        ("tp", 2, 2, "node"),
        ("all", 4, 1, "network"),
    ]
    assert [(row["dim"], row["operation"], row["bytes"]) for row in facts["rows"]] == [
        (dim, operation, size) for dim in ("tp", "all") for operation in OPERATIONS for size in (64, 4096)
    ]
    for row in facts["rows"]:
        assert row["ratio"] == pytest.approx(row["meshcomm"]["seconds"] / row["torch"]["seconds"])
        assert row["calls"] >= 1 and row["meshcomm"]["least_s"] > 0
    # Both sides run equally often, on all ranks as on rank 0.
    assert all(each["made"] == facts["made"] for each in by_rank)
    assert all(ours == theirs for ours, theirs in facts["made"])
    assert facts["machine"]["hosts"] == 1 and facts["skipped"] == []
    assert "all 4 network" in printed(json.loads(json.dumps(facts)))


def test_what_the_backend_lacks_is_skipped_by_name(pool: Pool) -> None:
    facts = pool.run(on_ranks, ("all_reduce", "all_gather"), ("sum",), ranks=4)[0]
    assert {row["operation"] for row in facts["rows"]} == {"all_gather"}
    assert len(facts["skipped"]) == 2
    assert "skipped: all_reduce along tp: " in printed(facts)
    assert "an operation that gloo has" in facts["skipped"][0]["why"]


GPUS = torch.cuda.device_count()


def on_gpus() -> list[dict[str, Any]]:
    with meshcomm.init(dims={"dp": -1}, device="cuda", validate_calls=0) as mesh:
        asked = Asked(OPERATIONS, [4096, 1 << 20], (), 3)
        facts = measured_facts(mesh, asked, TopologyConfig(ranks_per_node=GPUS), progress=False)
        assert facts["dims"][0]["backend"] == "nccl" and facts["machine"]["nccl"]
        rows: list[dict[str, Any]] = facts["rows"]
        return rows


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs; this host has {GPUS}")
def test_nccl_is_measured_on_the_device(pool: Pool) -> None:
    rows = pool.run(on_gpus, ranks=GPUS, timeout_s=120)[0]
    assert len(rows) == 2 * len(OPERATIONS)
    # A figure above any link's bandwidth would mean that the measurement does not wait for the device.
    assert all(0 < row[who]["busbw_gbytes_s"] < 4000 for row in rows for who in ("meshcomm", "torch"))


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, without a launcher's environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    return result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--op allreduce", 'did you mean "all_reduce"?'),
        ("--dim pp", "the mesh has no dim 'pp'"),
        ("--bytes 8", "8 bytes are too few for all_gather along tp"),
        ("--bytes much", "'much' is not a number of bytes"),
        ("--world-size 8", "2*3 = 6"),
        ("--fit fit.json", "--fit fit.toml"),
        ("--fit none/fit.toml", "none/fit.toml cannot be written"),
        ("--fit mesh.toml", "mesh.toml exists, and meshcomm bench did not write it"),
        ("--set mesh.dims={dp=1}", "no dim to measure has two ranks or more"),
        ("--fit fit.toml --bytes 4KiB", "one size cannot separate"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_process_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setattr("meshcomm.commands.processes.launch", lambda *_: pytest.fail("a process was started"))
    (folder / "mesh.toml").write_text('mesh = { dims = { dp = 2, tp = 3 }, device = "cpu" }\n')
    assert said in refused("mesh.toml", *words.split())


def job(folder: str, byte_s: float) -> tuple[str, str, str]:
    """Run `meshcomm bench` on this rank with invented times. Returns its output and its error."""
    from meshcomm.commands.bench import on_a_rank

    def sweep(mesh: Any, wanted: list[Item], rounds: int, *_: Any) -> tuple[list[Measured], list[Any]]:
        times = [(1e-4 + byte_s * item.size_bytes,) * rounds for item in wanted]
        return [Measured(item, 1, t, t) for item, t in zip(wanted, times, strict=True)], []

    out, err, raised = StringIO(), StringIO(), ""
    settings = load_config({"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "topology": {"ranks_per_node": 1}})
    asked = Asked(["sendrecv"], [1024, 1 << 22], (), 1)
    with redirect_stdout(out), redirect_stderr(err), patch("meshcomm.commands.measure.sweep", sweep):
        try:
            on_a_rank(settings, asked, Path(folder, "b.toml"), json=True)
        except ConfigError as error:
            raised = str(error)
    return out.getvalue(), err.getvalue(), raised


def test_a_job_prints_json_and_writes_the_fit(pool: Pool, tmp_path: Path) -> None:
    (text, *errors), other = pool.run(job, str(tmp_path), 1e-9, ranks=2)
    # Only rank 0 prints, and without a terminal there is no progress bar.
    assert (errors, other) == (["", ""], ("", "", ""))
    facts = json.loads(text)
    assert [row["bytes"] for row in facts["rows"]] == [1024, 1 << 22]
    written = load_config(tmp_path / "b.toml")
    assert written.topology.ranks_per_node == 1 and written.topology.links.node is None
    link = written.topology.links.network
    assert link is not None and (link.latency_us, link.bandwidth_gbytes_s) == (100.0, 1.0)
    assert facts["fit"]["links"]["network"]["dims"] == ["dp"]
    assert facts["fit"]["notes"] == ["ranks_per_node = 1, in config; the launcher has 2 on this host"]
    # The measurement runs without the comparison of first calls, which the fit does not contain.
    assert "validate_calls" not in (tmp_path / "b.toml").read_text()
    (text, _, raised), _ = pool.run(job, str(tmp_path / "none"), 0.0, ranks=2)
    # A fit is impossible, but the measurements are still shown.
    assert len(json.loads(text)["rows"]) == 2
    assert raised.startswith("these times show no bandwidth: dp") and not (tmp_path / "none").exists()


def shown_on_a_rank(folder: str) -> list[Shown]:
    """The results of `meshcomm bench --fit` on this rank with invented times: as a table, then as JSON."""
    from meshcomm.commands.bench import on_a_rank

    def sweep(mesh: Any, wanted: list[Item], rounds: int, *_: Any) -> tuple[list[Measured], list[Any]]:
        return [
            Measured(item, 1, (1e-4 + 1e-9 * item.size_bytes,) * rounds, (1e-4,) * rounds) for item in wanted
        ], []

    settings = load_config({"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "topology": {"ranks_per_node": 1}})
    asked = Asked(["sendrecv"], [1024, 1 << 22], (), 1)
    with (
        patch("meshcomm.commands.measure.sweep", sweep),
        recorded() as found,
        redirect_stdout(StringIO()) as out,
    ):
        for json in (False, True):
            on_a_rank(settings, asked, Path(folder, "b.toml"), json)
    path = Path(folder, "b.toml")
    expected = [f"{found[0].table}\nwritten: {path}\n", f"{found[1].json}\n"] if found else []
    assert out.getvalue() == "".join(expected)
    return found


def test_the_table_shows_nothing_that_json_lacks(pool: Pool, tmp_path: Path) -> None:
    (table, as_json), nothing = pool.run(shown_on_a_rank, str(tmp_path), ranks=2)
    assert table.keys == as_json.keys and "links.network" in table.table and nothing == []


def test_the_ranks_are_asked_for_what_was_typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mesh.toml").write_text('mesh = { dims = { dp = -1, tp = 2 }, device = "cpu" }\n')
    # The fit replaces an earlier one.
    (folder / "b.toml").write_text(f"{MARK} --fit`: before\n")
    started: list[tuple[list[str], int]] = []
    bodies: list[tuple[Any, ...]] = []

    def launch(arguments: list[str], world: int, *_: object) -> int:
        started.append((list(arguments), world))
        return 0

    monkeypatch.setattr("meshcomm.commands.processes.launch", launch)
    monkeypatch.setattr("meshcomm.commands.bench.on_a_rank", lambda *given: bodies.append(given))
    monkeypatch.setattr("meshcomm.commands.processes.as_rank", lambda body, *_: body())
    words = "bench mesh.toml --world-size 4 --op reduce --op all_reduce --bytes 4KiB --bytes 64 --dim tp --rounds 3"
    more = "--json --fit b.toml --set mesh.timeout_s=50.0"
    assert CliRunner().invoke(app, [*words.split(), *more.split()]).exit_code == 0
    ((arguments, world),) = started
    assert world == 4 and arguments[:3] == ["-P", "-m", "meshcomm"]
    # A rank parses these arguments under the launcher's environment.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert CliRunner().invoke(app, arguments[3:]).exit_code == 0
    ((settings, asked, *output),) = bodies
    assert settings.mesh.timeout_s == 50.0
    assert asked == Asked(("all_reduce", "reduce"), [4096, 64], ["tp"], 3)
    assert output == [Path("b.toml"), True]
    assert "--world-size 8 inside a job of 4 processes" in refused("mesh.toml", "--world-size", "8")

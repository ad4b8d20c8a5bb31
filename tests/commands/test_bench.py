"""`meshcomm bench`: the fit recovers known constants, figures are consistent, and pictures are to scale."""

from __future__ import annotations

import json
import random
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.commands.bench import fit_facts, view
from meshcomm.commands.measure import (
    Asked,
    Item,
    Measured,
    chosen_dims,
    in_turn,
    items,
    measured_facts,
    row_facts,
)
from meshcomm.config import Config, TopologyConfig, load_config
from meshcomm.errors import ConfigError, UnknownDim
from meshcomm.layout import Plan
from meshcomm.predict.fit import ASSUMED, MARK, Time, assumed, fit, fit_links, measured_text, work
from meshcomm.predict.links import Hop, Route, known_machine, span
from meshcomm.predict.times import COUNTED, OPERATIONS, Operation, bus_factor, counted_bytes, lines
from meshcomm.reductions import REDUCTIONS
from meshcomm.testing import Pool
from tests.commands.shown import Shown, recorded

ROOT = Path(__file__).parents[2]
SIZES = [1 << power for power in range(10, 27, 4)]


# -- sizes and bandwidths -----------------------------------------------------------------------------


def test_bandwidths_by_hand() -> None:
    # 4 ranks, 3 MB in 2 ms: the algorithm bandwidth is 1.5 GB/s, and the bus bandwidth is half as much again.
    facts = row_facts("dp", 4, "all_reduce", 3_000_000, 7, ([0.001, 0.002, 0.009], [0.004, 0.001, 0.006]))
    ours, theirs = facts["meshcomm"], facts["torch"]
    assert (ours["seconds"], ours["least_s"], ours["most_s"]) == (0.002, 0.001, 0.009)
    assert (ours["algbw_gbytes_s"], ours["busbw_gbytes_s"]) == (pytest.approx(1.5), pytest.approx(2.25))
    assert theirs["busbw_gbytes_s"] == pytest.approx(2.25 / 2)
    # The rounds' ratios are 0.25, 2 and 1.5. The ratio of the medians would be 0.5.
    assert facts["ratio"] == pytest.approx(1.5)
    assert set(OPERATIONS) == set(COUNTED) == set(get_args(Operation))


def test_a_size_is_what_nccl_tests_counts() -> None:
    for operation in OPERATIONS:
        parts = operation in ("all_gather", "reduce_scatter", "all_to_all")
        assert counted_bytes(operation, 4096, "dp", 4) == 4096
        assert counted_bytes(operation, 4099, "dp", 3) == (4092 if parts else 4096)
        least = 12 if parts else 4
        assert counted_bytes(operation, least, "dp", 3) == least
        with pytest.raises(
            ConfigError, match=rf"bytes are too few for {operation} along dp\n(.*\n)*.*--bytes {least}"
        ):
            counted_bytes(operation, least - 1, "dp", 3)


def test_the_guide_has_the_sizes_and_factors() -> None:
    guide = (ROOT / "docs/guide/performance.md").read_text()
    for operation in OPERATIONS:
        (row,) = [line for line in guide.splitlines() if line.startswith(f"| {operation} | `mesh.")]
        *_, counted, factor = row.strip("| ").split(" | ")
        assert counted == COUNTED[operation]
        for n in (2, 7):
            assert eval(factor.replace("2 (", "2 * ("), {"n": n}) == pytest.approx(
                float(bus_factor(operation, n))
            )


def plan(**mesh: Any) -> Plan:
    return load_config({"mesh": {"device": "cpu", **mesh}}).plan(None).on("cpu", "gloo")


def test_dims_are_measured_once_and_the_others_are_named() -> None:
    several = plan(
        dims={"pp": 1, "dp": 2, "tp": 2},
        merge={"model": ["pp", "tp"], "all": ["dp", "tp"]},
        views={"expert": {"edp": 1, "ep": 4}},
    )
    found, skipped = chosen_dims(several, ())
    assert [family.name for family in found] == ["dp", "tp", "all"]
    assert {each.dim: each.why for each in skipped} == {
        "pp": "one rank: nothing moves",
        "model": "it shares the groups of tp",
        "edp": "one rank: nothing moves",
        "ep": "it shares the groups of all",
    }
    found, skipped = chosen_dims(several, ["model"])
    assert [family.name for family in found] == ["model"] and skipped == []
    with pytest.raises(UnknownDim, match=r"no dim 'tpp'\n(.*\n)*.*did you mean"):
        chosen_dims(several, ["tpp"])
    with pytest.raises(ConfigError, match=r"two ranks or more\n.*pp = 1.*--dim pp\n(.*\n)*.*leave --dim out"):
        chosen_dims(several, ["pp"])
    three = plan(dims={"dp": 3})
    # 4,097 and 4,096 bytes are rounded to the same three parts.
    assert items(chosen_dims(three, ())[0], ["all_gather", "reduce"], [4097, 8, 4096][::2]) == [
        Item("dp", "all_gather", 4092),
        Item("dp", "reduce", 4096),
    ]


def test_rounds_go_forwards_and_backwards_and_the_device_is_waited_for() -> None:
    said: list[str] = []
    ways = {"a": lambda: said.append("a"), "b": lambda: said.append("b")}
    found = in_turn(ways, 2, 2, align=lambda: said.append("|"), finish=lambda: said.append("."))
    assert "".join(said) == "|bb.|aa." + "|aa.|bb." + "|bb.|aa."
    assert {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}


# -- the fit ----------------------------------------------------------------------------------------


def config(ranks_per_node: int = 4, **links: Any) -> Config:
    return load_config(
        {
            "mesh": {"dims": {"dp": 2, "cp": 2, "tp": 2}, "device": "cpu"},
            "topology": {
                "ranks_per_node": ranks_per_node,
                "nodes_per_rack": 7,
                "tflops": 5.0,
                "links": links,
            },
        }
    )


TRUE = {
    "node": {"latency_us": 30.0, "bandwidth_gbytes_s": 2.5},
    "network": {"latency_us": 200.0, "bandwidth_gbytes_s": 0.125},
}


def model_times(settings: Config, backend: str, noise: float) -> tuple[list[Time], Plan]:
    """The cost model's times of the assumed algorithms, each changed by up to `noise`."""
    chance = random.Random(3)
    live = settings.plan(None).on("cpu", backend)
    machine = known_machine(settings.topology, "here")
    times = []
    for family in live.families:
        way = span(live.layout.groups(family.name), machine).route
        for operation, name in ASSUMED[backend].items():
            (line,) = [each for each in lines(operation, way) if each.name == name]
            for size in SIZES:
                off = 1 + chance.uniform(-noise, noise)
                times.append(Time(family.name, operation, size, line.seconds(size) * off))
    return times, live


@pytest.mark.parametrize("backend", ASSUMED)
@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-9), (0.05, 0.03)])
def test_the_constants_that_made_the_times_come_back(backend: str, noise: float, within: float) -> None:
    links = {**TRUE, "rack": TRUE["network"]}
    settings = config(**links)
    times, live = model_times(settings, backend, noise)
    found = fit_links(times, live, known_machine(settings.topology, "here"))
    assert {name: each.dims for name, each in found.links.items()} == {"node": ("cp", "tp"), "rack": ("dp",)}
    assert set(found.dims) == {"dp", "cp", "tp"} and found.left_out == ()
    for name, each in [*found.links.items(), ("node", found.dims["tp"]), ("network", found.dims["dp"])]:
        true = links[name]
        assert each.latency_s * 1e6 == pytest.approx(true["latency_us"], rel=within)
        assert each.bytes_s / 1e9 == pytest.approx(true["bandwidth_gbytes_s"], rel=within)
        assert each.error <= max(noise, 1e-9) and each.worst <= 2 * noise + 1e-9 and each.notes == ()


def test_steps_and_bytes_by_hand() -> None:
    assert work("gloo", "all_reduce", 4000, 5) == (8, 6400)
    assert work("gloo", "all_gather", 4000, 5) == work("gloo", "all_to_all", 4000, 5) == (4, 3200)
    assert work("nccl", "reduce_scatter", 4000, 5) == (4, 3200)
    assert work("gloo", "sendrecv", 4000, 5) == work("mpi", "sendrecv", 4000, 5) == (1, 4000)
    # Gloo's reduce_scatter is an all_reduce of a copy, and its trees differ from the model's.
    assert [assumed("gloo", operation) for operation in ("reduce_scatter", "broadcast", "reduce")] == [
        None
    ] * 3
    assert assumed("mpi", "all_reduce") is None
    for backend in ASSUMED:
        for operation, name in ASSUMED[backend].items():
            flat = Route((Hop(6, Fraction(1), Fraction(1)),))
            assert name in {line.name for line in lines(operation, flat)}


def straight(alpha: float, byte_s: float, sizes: list[int]) -> list[Time]:
    return [Time("dp", "sendrecv", size, alpha + byte_s * size) for size in sizes]


def fitted(times: list[Time]) -> Any:
    return fit(times, [work("gloo", time.operation, time.size_bytes, 2) for time in times])


def test_small_calls_count_as_much_as_large_ones() -> None:
    # The largest call is off by half, and would dominate a fit to absolute times.
    times = straight(1e-4, 1e-9, SIZES)
    times[-1] = times[-1]._replace(seconds=times[-1].seconds * 1.5)
    assert fitted(times).latency_s == pytest.approx(1e-4, rel=0.05)


def test_times_that_say_too_little_are_refused_or_noted() -> None:
    with pytest.raises(
        ConfigError, match=r"one size cannot separate.*\n.*only 4096 bytes\n(.*\n)*.*--bytes 4KiB"
    ):
        fitted([*straight(1e-4, 1e-9, [4096]), Time("dp", "all_reduce", 4096, 1e-3)])
    # A line through these times would start below zero.
    found = fitted(straight(-1e-6, 1e-9, [1 << 14, 1 << 20]))
    assert found.latency_s == 0 and found.bytes_s == pytest.approx(1e9, rel=0.1)
    assert found.link.latency_us == 0 and found.notes == ("latency too small to measure: use smaller sizes",)
    for byte_s in (0.0, -1e-12, 5e-13):
        with pytest.raises(
            ConfigError, match=r"these times show no bandwidth: dp\n.*from 1024 to 67108864 bytes"
        ):
            fitted(straight(1e-3, byte_s, SIZES))
    settings = config(**TRUE)
    live = settings.plan(None).on("cpu", "gloo")
    with pytest.raises(
        ConfigError,
        match=r"latency and bandwidth cannot be computed from.*\n.*reduce along tp: gloo's algorithm",
    ):
        fit_links([Time("tp", "reduce", 4096, 1e-3)], live, known_machine(settings.topology, "here"))


def test_an_exchange_over_two_kinds_of_link_is_left_out() -> None:
    settings = load_config(
        {"mesh": {"dims": {"dp": 4}, "device": "cpu"}, "topology": {"ranks_per_node": 2, "links": TRUE}}
    )
    times, live = model_times(settings, "gloo", 0)
    found = fit_links(times, live, known_machine(settings.topology, "here"))
    assert found.left_out == (("dp", "all_to_all", "its messages cross links of two classes"),)
    assert found.links["network"].latency_s == pytest.approx(200e-6) and list(found.links) == ["network"]


def test_what_is_written_loads_and_predicts_what_was_measured(tmp_path: Path) -> None:
    settings = config(**TRUE)
    times, live = model_times(settings, "gloo", 0.04)
    found = fit_links(times, live, known_machine(settings.topology, "here"))
    path = tmp_path / "measured.toml"
    path.write_text(measured_text(settings, settings.topology, found.links, "2026, here"))
    assert path.read_text().startswith(f"{MARK} --fit`: 2026, here\n# links.node: ")
    written = load_config(path)
    assert written.mesh.dims == settings.mesh.dims and written.topology.tflops == 5.0
    assert written.topology.ranks_per_node == 4 and written.topology.call_us == 0
    machine = known_machine(written.topology, "here")
    worst = max(each.worst for each in found.links.values())
    assert worst < 0.12
    words = ["costs", str(path), "--json", *(f"--bytes={size}" for size in SIZES)]
    told: dict[str, Any] = json.loads(CliRunner().invoke(app, words).stdout)
    least = {(e["dim"], e["operation"], r["bytes"]): r["seconds"] for e in told["dims"] for r in e["rows"]}
    for time in times:
        way = span(live.layout.groups(time.dim), machine).route
        (line,) = [e for e in lines(time.operation, way) if e.name == ASSUMED["gloo"][time.operation]]
        assert line.seconds(time.size_bytes) == pytest.approx(time.seconds, rel=1.1 * worst)
        # Gloo's ring is not the cheapest algorithm for two ranks.
        compared = least[time[:3]], line.seconds(time.size_bytes)
        assert compared[0] < compared[1] if time.operation == "all_reduce" else compared[0] == compared[1]
    assert CliRunner().invoke(app, ["plan", str(path)]).exit_code == 0


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

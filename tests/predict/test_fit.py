"""Fits of links to times recover known constants, and the written file predicts the measured times."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError
from meshcomm.layout import Plan
from meshcomm.predict.fit import ASSUMED, MARK, Time, assumed, fit, fit_links, measured_text, work
from meshcomm.predict.links import Hop, Route, known_machine, span
from meshcomm.predict.times import lines

SIZES = [1 << power for power in range(10, 27, 4)]


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

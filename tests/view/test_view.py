"""`meshcomm view`: its facts, its server, and the page itself in a headless Chromium."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, TrainingError, ViewError
from meshcomm.mesh.stats import CallStats, Stats
from meshcomm.predict.estimate import workload
from meshcomm.predict.place import rank_placements
from meshcomm.show.plan import dims_table, plan_facts
from meshcomm.train import Start, Step, Summary
from meshcomm.train.run_files import MetricsFile, put_aside, recorded
from meshcomm.view.facts import page_facts
from meshcomm.view.page import document, export_page
from meshcomm.view.run import find_target, run_news
from meshcomm.view.server import Server
from tests.show.shown import run
from tests.view.browser import Browser, Tab, find_browser

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
# Merged dims, a view that shares a dim, a dim of size 1, and nodes that cut groups.
MESH: dict[str, Any] = {
    "mesh": {
        "dims": {"pp": 2, "one": 1, "dp": 4, "tp": 2},
        "merge": {"model": ["pp", "tp"], "batch": ["dp", "one"]},
        "views": {"expert": {"pp": 2, "edp": 2, "ep": 4}},
    },
    "topology": {"ranks_per_node": 4},
}
BIG = CONFIGS / "gpt_1024.toml"


def facts_of(settings: Config, world: int | None = None) -> dict[str, Any]:
    facts = page_facts(settings, world, settings.topology)
    # The browser gets the facts as JSON.
    assert json.loads(json.dumps(facts)) == facts
    return facts


# -- facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [
        MESH["mesh"],
        {**MESH["mesh"], "rank_order": [*range(15, -1, -1)]},
        {"dims": {"b": 2, "a": 3}, "ranks": [1, 2, 5, 6, 8, 9]},
    ],
    ids=["merged dims and views", "reversed", "part of a world"],
)
def test_every_group_follows_from_the_strides_that_are_sent(mesh: dict[str, Any]) -> None:
    settings = load_config({"mesh": mesh})
    facts, layout = facts_of(settings), settings.layout(None)
    world = facts["world_size"]
    order = facts["rank_order"] or list(range(world))
    assert order == layout.ranks.tolist()
    for dim in facts["dims"]:
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for position, rank in enumerate(order):
            coord, rest, left = 0, position, []
            for size, stride in dim["digits"]:
                coord = coord * size + position // stride % size
                rest -= position // stride % size * stride
            left.append(rest)
            groups.setdefault(tuple(left), []).append((coord, rank))
        found = sorted([rank for _, rank in sorted(group)] for group in groups.values())
        assert found == sorted(layout.groups(dim["name"]).tolist()), dim["name"]
        home = dict(facts["views"]).get(dim["home"], facts["base"])
        assert {name for name, _ in home} >= set(dim["dims"])


def test_facts_of_131072_ranks_are_as_short_as_those_of_8() -> None:
    big = facts_of(load_config(BIG), 131072)
    assert big["world_size"] == 131072 and big["ranks_per_node"] == 8
    assert len(json.dumps(big)) < 2000
    assert [dim["nodes"]["most"] for dim in big["dims"]] == [8, 2048, 1]


def test_a_dim_is_described_by_its_row_in_the_table_of_plan() -> None:
    settings = load_config(MESH)
    facts = facts_of(settings)
    table = dims_table(plan_facts(settings.plan(None), topology=settings.topology)["dims"])
    for dim, row in zip(facts["dims"], table.rows, strict=True):
        cells = dict(zip(table.columns, row, strict=True))
        assert (dim["name"], dim["size"], dim["groups"]) == (
            cells.pop("dim"), int(cells.pop("size")), int(cells.pop("groups")),
        )  # fmt: skip
        assert dim["record"] == [f"{name} {cell}" for name, cell in cells.items() if cell != "-"]


def test_predicted_traffic_is_that_of_place() -> None:
    settings = load_config(CONFIGS / "llama_405b.toml")
    assert settings.parallel is not None
    keep = {part: settings.mesh.dims[dim] for part, dim in settings.parallel.parts.items()}
    roomy = settings.topology.model_copy(update={"memory_gbytes": 1e6})
    ranking = rank_placements(workload(settings), 16384, roomy, keep)
    rows = facts_of(settings)["traffic"]["rows"]
    # Calls and sizes do not depend on the order of dims, which `place` chooses.
    found = [(row["operation"], row["what"], row["calls"], row["size_bytes"], row["size"]) for row in rows]
    shares = ranking.placements[0].shares
    assert found == [(e.flow.operation, e.flow.what, e.calls, e.flow.size_bytes, e.ranks) for e in shares]
    by_what = {row["what"]: row for row in rows}
    gathered = by_what["weights gathered"]
    # Weights are sharded along 8 ranks of dp and 16 of cp.
    assert gathered["sent_bytes"] == pytest.approx(gathered["calls"] * gathered["size_bytes"] * 127 / 128)
    # Each message takes 10 us and the time of its bytes at 50 GB/s.
    sent = by_what["activations and their gradients"]
    assert sent["seconds"] == pytest.approx(sent["calls"] * (10e-6 + sent["size_bytes"] / 50e9))
    assert {tuple(row["along"]): row["link"] for row in rows} == {
        **dict.fromkeys((("dp", "cp"), ("pp",), ("cp",)), "network"),
        ("tp",): "node",
    }


def test_the_mesh_of_a_model_that_code_builds_is_shown_without_its_traffic() -> None:
    settings = load_config(
        {
            "mesh": {"dims": {"dp": 2}},
            "parallel": {"data": "dp"},
            "model": {"build": "module:function"},
            "data": {"seq_len": 8},
            "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
        }
    )
    assert page_facts(settings, None, settings.topology)["traffic"] is None


def test_predicted_traffic_by_hand_whoever_sits_where() -> None:
    settings = load_config(CONFIGS / "quickstart.toml").resolved(8)
    traffic = facts_of(settings, 8)["traffic"]
    rows = {row["along"][0]: row for row in traffic["rows"]}
    assert traffic["links"] is None and list(rows) == ["tp", "pp", "dp"]
    # At least 4 all_reduces in each of 2 layers, for 4 micro-batches of 4 * 128 tokens of width 128 in float32.
    assert rows["tp"]["calls"] >= 2 * 4 * 4 and rows["tp"]["size_bytes"] == 4 * 128 * 128 * 4
    assert rows["tp"]["sent_bytes"] == rows["tp"]["calls"] * rows["tp"]["size_bytes"]
    assert (rows["pp"]["calls"], rows["pp"]["seconds"], rows["pp"]["link"]) == (2 * 4, None, None)
    # Each micro-batch sends an activation one way and its gradient the other way.
    assert rows["pp"]["sent_bytes"] == rows["pp"]["received_bytes"] == 4 * 4 * 128 * 128 * 4
    assert rows["tp"]["received_bytes"] is rows["dp"]["received_bytes"] is None
    # `place` refuses another order of ranks or a view, but neither changes the bytes.
    for change in ("mesh.rank_order = [7, 6, 5, 4, 3, 2, 1, 0]", "mesh.views = { other = { a = 4, b = 2 } }"):
        assert facts_of(load_config(settings, [change]), 8)["traffic"] == traffic
    assert facts_of(load_config(CONFIGS / "mesh.toml"))["traffic"] is None


def test_experts_gradients_go_along_the_dims_of_their_view() -> None:
    rows = facts_of(load_config(CONFIGS / "ep4_edp2.toml"))["traffic"]["rows"]
    assert {(*row["along"], row["size"]) for row in rows} == {("ep", 4), ("dp", 8), ("edp", 2)}
    both = load_config(CONFIGS / "cp2_dp2_tp2.toml")
    (row,) = [row for row in facts_of(both)["traffic"]["rows"] if len(row["along"]) == 2]
    assert row["along"] == ["dp", "cp"] and row["size"] == 4 and row["digits"] == [[2, 2], [2, 4]]


def test_every_fact_that_the_page_reads_is_sent() -> None:
    facts = facts_of(load_config(MESH))
    text = "".join(path.read_text() for path in (ROOT / "meshcomm" / "view").glob("*.js"))
    read = {name: set(re.findall(rf"\b{name}\??\.(\w+)", text)) for name in ("facts", "family")}
    assert read["facts"] - {"json"} <= set(facts)  # facts.json is a file name
    # The page itself gives a family its hue and adds `rest`.
    assert read["family"] - {"hue", "rest"} <= set.intersection(*(set(dim) for dim in facts["dims"]))


# -- the run's folder -------------------------------------------------------------------------------

# The page does not know the last dim.
STATS = Stats(
    "rank 0",
    4.0,
    (
        CallStats("dp", "barrier", False, 2, 2, 0, 0.001, 0.001),
        CallStats("dp", "all_reduce", False, 2, 7, 2_000_000, 0.5, 0.5),
        CallStats("made_later", "send", True, 2, 1, 4096, 0.0, 0.2),
    ),
)
START = Start(steps=30, tokens_per_step=100, parameters=1234, text_bytes=5000, text_files=3, threads=1)


def step(number: int) -> Step:
    return Step(number, 5.0 - number / 10, 1.0, 0.001, number * 100, 1000.0 + number, number / 10)


def settings_for(out: Path, *overrides: str) -> Config:
    dims = "mesh.dims={ pp = 2, dp = 2, tp = 2 }"
    return load_config(
        CONFIGS / "quickstart.toml", [dims, f'train.out="{out}"', "train.steps=30", *overrides]
    )


@contextlib.contextmanager
def running(out: Path, settings: Config, after: int | None = None) -> Iterator[MetricsFile]:
    """A run that writes into `out` like a training."""
    if after is None:
        put_aside(out)
    with MetricsFile(out, after or 0) as file, recorded(out, settings, settings.plan(None), START) as ended:
        yield file
        ended.append(Summary(7, (5.0, 4.0), 700, 3.5, file.path, {"dp": (3, 0.0021)}, STATS, 5))


def steps_of(news: dict[str, Any]) -> list[int]:
    found: list[int] = news["columns"]["step"]
    return found


def test_news_of_a_run_from_before_it_begins_until_after_it_has_gone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run_news(None)["state"] == "none"
    news = run_news(out)
    assert (news["state"], news["id"], steps_of(news), news["age_s"]) == ("waiting", "", [], None)
    with running(out, settings_for(out)) as file:
        file.write(step(1))
        file.write(step(2))
        news = run_news(out, news["id"], news["offset"])
        assert (news["state"], steps_of(news), news["reset"], news["more"]) == (
            "running",
            [1, 2],
            True,
            False,
        )
        assert news["columns"]["loss"] == [4.9, 4.8] and 0 <= news["age_s"] < 60
        assert news["about"]["steps"] == 30 and news["about"]["dims"] == {"pp": 2, "dp": 2, "tp": 2}
        # An incomplete line does not count yet.
        with file.path.open("a") as more:
            more.write('{"step": 3, "lo')
            more.flush()
            news = run_news(out, news["id"], news["offset"])
            assert (steps_of(news), news["reset"]) == ([], False)
            more.write('ss": NaN, "tokens_per_s": Infinity}\nnonsense\n[1]\n')
        news = run_news(out, news["id"], news["offset"])
        assert steps_of(news) == [3] and news["columns"]["loss"] == [None] == news["columns"]["tokens_per_s"]
        assert json.dumps(news, allow_nan=False)
    news = run_news(out, news["id"], news["offset"])
    assert (news["state"], steps_of(news), news["reset"]) == ("finished", [], False)
    assert news["about"]["ended"]["late"] == {"dp": {"rank": 3, "mean_s": 0.0021}}
    assert news["about"]["ended"]["stats"] == STATS.facts()["rows"]
    # A run that resumes from a checkpoint truncates the file and continues it.
    with running(out, settings_for(out), after=1) as file:
        for number in range(2, 9):
            file.write(step(number))
        again = run_news(out, news["id"], news["offset"])
        assert (again["state"], steps_of(again), again["reset"]) == ("running", [1, *range(2, 9)], True)
    # A new run renames the old run's files.
    with running(out, settings_for(out)) as file:
        file.write(step(1))
        new = run_news(out, again["id"], again["offset"])
        assert (steps_of(new), new["reset"]) == ([1], True)
        # An offset in the middle of a line does not belong to this file.
        assert run_news(out, new["id"], new["offset"] - 3)["reset"]
    (out / "run.json").write_text("no JSON")
    assert run_news(out)["state"] == "unknown"
    for file_ in out.iterdir():
        file_.unlink()
    gone = run_news(out, new["id"], new["offset"])
    assert (gone["state"], gone["reset"]) == ("waiting", True)


def test_a_run_that_goes_on_is_read_anew_where_its_lines_look_the_same(tmp_path: Path) -> None:
    with running(tmp_path, settings_for(tmp_path)) as file:
        for number in (1, 2, 3):
            file.write(step(number))
    news = run_news(tmp_path)
    with running(tmp_path, settings_for(tmp_path), after=1) as file:
        for number in (2, 3, 4):
            file.write(step(number))
        again = run_news(tmp_path, news["id"], news["offset"])
    # The resumed run's file is longer and has a line end at the same offset.
    assert again["offset"] > news["offset"] and (again["reset"], steps_of(again)) == (True, [1, 2, 3, 4])


def test_a_long_file_comes_in_pieces(tmp_path: Path) -> None:
    with running(tmp_path, settings_for(tmp_path)) as file:
        for number in range(1, 31):
            file.write(step(number))
    news, found = run_news(tmp_path, most_bytes=500), []
    for turn in range(100):
        assert news["reset"] == (turn == 0)
        found += steps_of(news)
        if not news["more"]:
            break
        news = run_news(tmp_path, news["id"], news["offset"], most_bytes=500)
    assert found == [*range(1, 31)] and turn > 3
    page = tmp_path / "page.html"
    export_page(page, facts_of(settings_for(tmp_path)), tmp_path)
    inside = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert inside is not None and json.loads(inside[1])["run"]["columns"]["step"] == found


def test_what_stopped_a_run_is_written_down_and_a_full_disk_is_said(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    with pytest.raises(TrainingError), running(tmp_path, settings):
        raise TrainingError("the loss of step 3 is nan", given="something")
    about = run_news(tmp_path)["about"]
    assert about["state"] == "stopped"
    assert about["ended"] == {"reason": "TrainingError: the loss of step 3 is nan"}
    with pytest.raises(KeyboardInterrupt), running(tmp_path, settings):
        raise KeyboardInterrupt
    assert run_news(tmp_path)["about"]["ended"]["reason"] == "interrupted"
    (tmp_path / "run.json.tmp").mkdir()
    said = r"the record of the run cannot be written: .*\n.*run\.json"
    with pytest.raises(TrainingError, match=said), running(tmp_path, settings):
        pytest.fail("not reached")


def test_the_configuration_that_a_run_leaves_is_the_one_that_was_trained(tmp_path: Path) -> None:
    given = load_config(CONFIGS / "quickstart.toml", ["mesh.dims.dp=-1", f'train.out="{tmp_path}"'])
    with MetricsFile(tmp_path) as _, recorded(tmp_path, given, given.plan(16), START):
        pass
    left = load_config(tmp_path / "config.json")
    assert left == given.resolved(16) and left.mesh.dims == {"pp": 2, "dp": 4, "tp": 2}
    assert find_target(tmp_path) == (left, tmp_path)


def test_a_target_is_a_configuration_or_a_run(tmp_path: Path) -> None:
    assert find_target(CONFIGS / "mesh.toml").folder is None
    assert find_target(CONFIGS / "quickstart.toml", ['train.out="x/y"']).folder == Path("x/y")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(
        ViewError, match=r"folder without config\.json: metrics\.jsonl\n(.*\n)+.*meshcomm view CONFIG"
    ):
        find_target(tmp_path)
    with pytest.raises(ViewError, match=r"there is no .*/nothing\n(.*\n)+.*waits for train\.out"):
        find_target(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"did you mean .*mesh\.toml\?"):
        find_target(CONFIGS / "mehs.toml")


# -- the page and its server --------------------------------------------------------------------------


def rgb_of_oklch(lightness: float, chroma: float, hue: float) -> list[float]:
    """Linear red, green and blue, as CSS Color 4 has it."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    cone = (
        lightness + 0.3963377774 * a + 0.2158037573 * b,
        lightness - 0.1055613458 * a - 0.0638541728 * b,
        lightness - 0.0894841775 * a - 1.2914855480 * b,
    )
    rows = (
        (4.0767416621, -3.3077115913, 0.2309699292),
        (-1.2684380046, 2.6097574011, -0.3413193965),
        (-0.0041960863, -0.7034186147, 1.7076147010),
    )
    return [min(max(sum(w * x**3 for w, x in zip(row, cone, strict=True)), 0), 1) for row in rows]


def rgb_of_hex(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def light(rgb: list[float]) -> float:
    return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_is_written_can_be_read(dark: bool) -> None:
    css = (ROOT / "meshcomm/view/page.css").read_text(encoding="utf-8")
    for rule in (
        "section { background: var(--card)",
        ".quiet { color: var(--quiet)",
        "#picture text { fill: var(--ink)",
    ):
        assert rule in css
    assert ".cell rect { fill: oklch(var(--fill-l) var(--fill-c) var(--hue))" in css
    style = dict(re.findall(r"--([\w-]+): ([^;]+);", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[dark]))
    paper = light(rgb_of_hex(style["paper"]))
    assert paper < 0.05 if dark else paper > 0.8
    ink, card = rgb_of_hex(style["ink"]), rgb_of_hex(style["card"])
    # WCAG 2.1 requires 4.5 for text.
    assert min(contrast(ink, card), contrast(rgb_of_hex(style["quiet"]), card)) > 4.5
    fills = [rgb_of_oklch(float(style["fill-l"]), float(style["fill-c"]), hue) for hue in range(360)]
    assert min(contrast(ink, fill) for fill in fills) > 4.5


@pytest.mark.parametrize("embedded", [False, True])
def test_the_page_refers_to_nothing_outside(embedded: bool) -> None:
    page = document(facts_of(load_config(MESH)), None) if embedded else document()
    html = re.sub(r"xmlns='http://www\.w3\.org/2000/svg'|\"http://www\.w3\.org/2000/svg\"", "", page.html)
    assert re.findall(r"https?:|src=|@import|url\(|//cdn|import\(|<iframe|style=|@@", html) == []
    assert not re.search(r"<[^>]*\son\w+=", html)
    assert [link for link in re.findall(r"<link[^>]*>", html) if 'href="data:' not in link] == []
    # The policy allows only this style and this script.
    for kind, tag in (("style", "style"), ("script", "script")):
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", page.html, re.DOTALL)
        assert len(text) == 1
        digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in page.policy
    assert page.policy.startswith("default-src 'none'; ") and "unsafe" not in page.policy
    assert f"connect-src {chr(39)}{'none' if embedded else 'self'}{chr(39)}" in page.policy
    assert page.policy.removesuffix("; frame-ancestors 'none'") in page.html


def test_facts_cannot_end_the_element_they_stand_in() -> None:
    facts = {"title": "</script><script>alert(1)</script><!--"}
    html = document(facts, None).html
    assert "alert(1)</script>" not in html and html.count("</script>") == 2
    inside = re.search(r'id="data">(.*?)</script>', html)
    assert inside is not None and json.loads(inside[1]) == {"facts": facts, "run": None}


@contextlib.contextmanager
def served(settings: Config, world: int | None = None, folder: Path | None = None) -> Iterator[Server]:
    with Server(facts_of(settings, world), folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: Server, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    connection.putrequest(method, path, skip_host=headers is not None)
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_what_is_served_and_what_is_not(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run")
    with served(settings, folder=tmp_path / "run") as server:
        assert (
            server.server_address[0] == "127.0.0.1"
            and server.url == f"http://127.0.0.1:{server.server_port}/"
        )
        status, headers, page = ask(server, "/")
        assert (status, page.decode()) == (200, document().html)
        assert headers["content-security-policy"] == document().policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "access-control-allow-origin" not in headers and "python" not in headers["server"].lower()
        assert json.loads(ask(server, "/facts.json")[2]) == facts_of(settings)
        assert json.loads(ask(server, "/run.json?id=&offset=0")[2])["state"] == "waiting"
        head = ask(server, "/", "HEAD")
        assert (head[0], head[1]["content-length"], head[2]) == (200, str(len(page)), b"")
        for path in ("/page.js", "/../pyproject.toml", "//etc/passwd", "/%2e%2e/x", "/favicon.ico"):
            assert ask(server, path)[0] == 404, path
        with socket.create_connection(server.server_address[:2], timeout=60) as raw:
            raw.sendall(b"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert raw.recv(64).startswith(b"HTTP/1.1 400 ")
        for offset in ("-1", "x", "9" * 30, "1e3"):
            assert ask(server, f"/run.json?offset={offset}")[0] == 400, offset
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            status, headers, _ = ask(server, "/", method)
            assert (status, headers["allow"], headers["connection"]) == (405, "GET, HEAD", "close"), method
        assert ask(server, "/", "BREW")[0] == 501


def test_only_names_of_this_machine_are_answered() -> None:
    mine = ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:80")
    foreign = ("mesh.example", "127.0.0.1.mesh.example:80", "mesh.example:127.0.0.1", "localhost.", "", None)
    with served(load_config(MESH)) as server:
        for host in (*mine, *foreign):
            for path in ("/", "/facts.json", "/run.json"):
                status, _, body = ask(server, path, headers={} if host is None else {"Host": host})
                assert status == (200 if host in mine else 421), (host, path)
                assert host in mine or b"dims" not in body


def test_nothing_listens_on_other_addresses() -> None:
    with served(load_config(MESH)) as server, socket.socket() as other:
        # Another address of the loopback interface is refused if only 127.0.0.1 is bound.
        other.settimeout(10)
        with pytest.raises(OSError):
            other.connect(("127.0.0.2", server.server_port))


def test_a_port_that_is_taken_is_said() -> None:
    said = r"address already in use\n  given:    --port \d+ on 127.0.0.1\n(.*\n)+  try:      leave out --port"
    with served(load_config(MESH)) as server, pytest.raises(ViewError, match=said):
        Server({}, None, server.server_port)


def test_the_command_prints_its_address_and_ends_quietly_on_ctrl_c() -> None:
    words = ["view", "configs/gpt_1024.toml", "--world-size", "1024"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "meshcomm", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Handle SIGINT as in a terminal, even if the tests run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(
                r"http://127\.0\.0\.1:(\d+)/  \(configs/gpt_1024\.toml; Ctrl-C ends it\)\n", line
            )
            assert found is not None, line
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=100)
            connection.request("GET", "/facts.json")
            assert json.loads(connection.getresponse().read())["world_size"] == 1024
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=100)
            assert (process.returncode, rest.strip(), errors) == (0, "", "")
            connection.close()
        finally:
            process.kill()


def test_the_command_says_what_is_wrong_and_writes_a_page(tmp_path: Path) -> None:
    page, pdf = tmp_path / "page.html", tmp_path / "x.pdf"
    for words, said in (
        ([str(tmp_path)], "is not the folder of a run"),
        (["configs/mesh.toml", "--export", str(pdf)], "given: the extension .pdf"),
        (["configs/mesh.toml", "--export", str(pdf)], str(pdf.with_suffix(".html"))),
        (
            ["configs/mesh.toml", "--export", str(tmp_path / "no" / "page.html")],
            "cannot be written: no such file",
        ),
    ):
        shown = run("view", *words)
        # The text is folded to the console's width.
        assert (shown.code, shown.out) == (2, "") and said in " ".join(shown.err.split()), words
    assert list(tmp_path.iterdir()) == []
    shown = run("view", "configs/mesh.toml", "--set", "topology.ranks_per_node=4", "--export", str(page))
    assert shown == (0, f"written: {page} ({page.stat().st_size:,} bytes)\n", "")


# -- in a browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium): the page is not looked at")
    with Browser(path, tmp_path_factory.mktemp("profile")) as found:
        yield found


@contextlib.contextmanager
def opened(browser: Browser, url: str, width: int = 1200, *, dark: bool = False) -> Iterator[Tab]:
    """Open a page. It must log no errors and send requests only to its origin."""
    tab = browser.open(url, width, dark=dark)
    try:
        yield tab
        assert tab.complaints() == []
        origin = url if url.startswith("file:") else re.match(r"http://[^/]+/", url)[0]  # type: ignore[index]
        assert [asked for asked in tab.requested() if not asked.startswith((origin, "data:"))] == []
    finally:
        tab.close()


def cells(tab: Tab) -> dict[int, tuple[float, float, str]]:
    """rank -> the place and the colour of its cell."""
    found = tab.ask("""[...document.querySelectorAll(".cell")].map((c) => { const r = c.getBoundingClientRect();
        return [Number(c.dataset.rank), Math.round(r.x), Math.round(r.y), getComputedStyle(c.children[0]).fill]; })""")
    return {rank: (x, y, colour) for rank, x, y, colour in found}


def gathered(found: Mapping[int, Any], by: int) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank, cell in found.items():
        groups.setdefault(cell[by], []).append(rank)
    return sorted(sorted(group) for group in groups.values())


def in_order(groups: Any) -> list[list[int]]:
    return sorted(sorted(group) for group in groups.tolist())


def ranks_in_panel(tab: Tab) -> dict[str, str]:
    """family -> the ranks that the panel lists."""
    pairs: list[tuple[str, str]] = tab.ask(
        "[...document.querySelectorAll('.group')].map((g) => [g.dataset.family, g.querySelector('.ranks').innerText.trim()])"
    )
    return dict(pairs)


@pytest.mark.parametrize("order", [None, [*range(15, -1, -1)]], ids=["ascending", "reversed"])
def test_the_mesh_turns_by_every_dim(browser: Browser, order: list[int] | None) -> None:
    settings = load_config(
        {**MESH, "mesh": {**MESH["mesh"], **({} if order is None else {"rank_order": order})}}
    )
    layout = settings.layout(None)
    with served(settings) as server, opened(browser, server.url) as tab:
        summary = tab.text("#summary")
        assert summary.startswith("16 ranks · ") and settings.plan(None).fingerprint in summary
        for name in layout.names:
            tab.click(f'input[name=turn][value="{name}"] + span')
            tab.wait(f"document.querySelector('#caption').textContent.startsWith('{name}: ')")
            found = cells(tab)
            assert sorted(found) == [*range(16)]
            # Each group of the layout has one colour.
            assert gathered(found, 2) == in_order(layout.groups(name)), name
            # Each group is a row and begins with coord 0.
            for group in layout.groups(name).tolist():
                assert len({found[rank][1] for rank in group}) == 1, (name, group)
                columns = [found[rank][0] for rank in group]
                assert columns == sorted(set(columns)), (name, group)
        # Arranged by node: each block has the ranks of one node.
        tab.click("input[name=arrange][value=node] + span")
        labels = tab.ask("[...document.querySelectorAll('.labels .strong')].map((t) => t.textContent)")
        assert labels == ["node 0", "node 1", "node 2", "node 3"]
        assert gathered(cells(tab), 2) == in_order(layout.groups(layout.names[-1]))


def test_a_rank_that_is_pointed_at_shows_its_groups(browser: Browser) -> None:
    settings = load_config(MESH)
    layout = settings.layout(None)
    with served(settings) as server, opened(browser, server.url) as tab:
        tab.hover('.cell[data-rank="5"]')
        assert tab.text("#rank h3").split("\n")[0].startswith("rank 5")
        assert "pp=0 one=0 dp=2 tp=1" in tab.text("#rank") and "expert: pp=0 edp=1 ep=1" in tab.text("#rank")
        own = {name: layout.group_of(5, name).tolist() for name in layout.names}
        alone = "alone: no group"
        assert ranks_in_panel(tab) == {
            name: " ".join(map(str, group)) if len(group) > 1 else alone for name, group in own.items()
        }
        lit = {int(rank) for rank in tab.attribute(".cell.mate", "data-rank")}
        assert lit == {rank for group in own.values() for rank in group} - {5}
        assert tab.attribute(".cell.self", "data-rank") == ["5"]
        # Each rank has the colour of the dim that turns the mesh if they share it, else of their smallest common group.
        shared = {rank: tab.attribute(f'.cell[data-rank="{rank}"]', "data-shared")[0] for rank in sorted(lit)}
        assert shared == {13: "pp", 4: "tp", 1: "dp", 3: "dp", 7: "dp", 12: "model", 6: "ep"}
        assert (
            f"ring: from {layout.neighbor_rank(5, 'dp', -1)}, to {layout.neighbor_rank(5, 'dp', 1)}"
            in tab.text(".group[data-family=dp]")
        )
        assert "inside one node" in tab.text(".group[data-family=tp]")
        assert "over 2 nodes" in tab.text(".group[data-family=pp]")
        # Pointing at a group in the panel highlights only this group.
        tab.hover(".group[data-family=ep]")
        assert {int(rank) for rank in tab.attribute(".cell.mate", "data-rank")} == set(own["ep"]) - {5}
        tab.hover("h1")
        assert tab.attribute(".cell.mate", "data-rank") == []
        # A click selects the rank until Escape is pressed.
        tab.click('.cell[data-rank="5"]')
        tab.hover("h1")
        for held in (".cell.self", '.cell[aria-pressed="true"]'):
            assert tab.attribute(held, "data-rank") == ["5"]
        tab.key("Escape")
        assert tab.attribute(".cell.self", "data-rank") == []


def test_the_page_by_keyboard_alone(browser: Browser) -> None:
    with served(load_config(MESH)) as server, opened(browser, server.url) as tab:
        here = "document.activeElement"
        for _ in range(10):
            tab.key("Tab")
            if tab.ask(f"{here}.classList.contains('cell')"):
                break
        assert tab.ask(f"{here}.getAttribute('aria-label')") == "rank 0, pp=0 one=0 dp=0 tp=0, node 0"
        assert tab.text("#said").startswith("rank 0, pp=0 one=0 dp=0 tp=0. pp: 0, 8. dp: 0, 2, 4, 6.")
        # Rows are groups along pp, so right leads to the next coord of pp and down to the next of tp.
        tab.key("ArrowRight")
        assert tab.ask(f"{here}.dataset.rank") == "8"
        tab.key("ArrowDown")
        assert tab.ask(f"{here}.dataset.rank") == "9"
        tab.key("Enter")
        tab.ask("document.querySelector('h1').click()")
        assert tab.attribute('.cell[aria-pressed="true"]', "data-rank") == ["9"]
        assert tab.ask("[...document.querySelectorAll('.cell[tabindex=\"0\"]')].length") == 1


def test_on_a_phone_by_touch(browser: Browser) -> None:
    with served(load_config(MESH)) as server, opened(browser, server.url, 400, dark=True) as tab:
        assert tab.ask("document.documentElement.scrollWidth") <= 400
        tab.tap('.cell[data-rank="6"]')
        tab.wait("document.querySelector('.cell.self')?.dataset.rank === '6'")
        # The panel is visible, although it comes after the picture.
        assert tab.ask(
            "(() => { const r = document.querySelector('#panel').getBoundingClientRect(); return r.bottom <= innerHeight && r.top > 0; })()"
        )
        tab.tap(".hold")
        tab.wait("!document.querySelector('.cell.self')")


def test_131072_ranks_are_folded_and_every_one_can_be_found(browser: Browser) -> None:
    settings = load_config(BIG)
    layout = settings.layout(131072)
    with served(settings, 131072) as server, opened(browser, server.url) as tab:
        drawn = cells(tab)
        assert 100 < len(drawn) <= 500 and {0, 131071} <= drawn.keys() and 77777 not in drawn
        assert f"{len(drawn)} of 131,072 ranks drawn" in tab.text("#note")
        for name in layout.names:
            tab.click(f'input[name=turn][value="{name}"] + span')
            tab.wait(f"document.querySelector('#caption').textContent.startsWith('{name}: ')")
            found = cells(tab)
            groups = gathered(found, 1)
            for group in groups:
                # The drawn ranks of a row belong to groups of the layout, side by side.
                owners = {tuple(layout.group_of(rank, name).tolist()) for rank in group}
                assert sum(len(set(owner) & set(group)) for owner in owners) == len(group)
        find = "(() => { const f = document.querySelector('#find'); f.value = '%d'; f.dispatchEvent(new Event('input')); })()"
        tab.ask(find % 77777)
        assert 77777 in cells(tab)
        panel = ranks_in_panel(tab)
        assert panel["pp"] == " ".join(map(str, layout.group_of(77777, "pp").tolist()))
        listed = [int(number) for number in panel["dp"].replace("…", " ").split()]
        assert 77777 in listed and len(listed) <= 16
        assert set(listed) < set(layout.group_of(77777, "dp").tolist())
        tab.ask(find % 131072)
        refused = tab.ask("document.querySelector('#find').validationMessage")
        assert refused == "the mesh does not have this rank"


def test_ranks_whose_numbers_do_not_fit_say_them_and_can_be_made_larger(browser: Browser) -> None:
    numbers = (
        "[...document.querySelectorAll('.num')].filter((n) => getComputedStyle(n).visibility === 'visible')"
    )
    choose = "document.querySelector('#choose-cells')"
    settings = load_config(BIG)
    with served(settings, 1024) as server, opened(browser, server.url) as tab:
        assert (len(cells(tab)), tab.ask(f"{numbers}.length")) == (1024, 0)
        tab.hover('.cell[data-rank="777"]')
        lens = "document.querySelector('.lens')"
        assert tab.ask(f"{lens}.textContent") == "rank 777: pp=6 dp=1 tp=1"
        # The lens is inside the picture and does not cover the cell or the pointer.
        inside = f"""(() => {{ const l = {lens}.getBoundingClientRect(), p = document.querySelector('#picture svg').getBoundingClientRect(),
            c = document.querySelector('.cell[data-rank="777"]').getBoundingClientRect();
            return l.left >= p.left && l.right <= p.right && (l.bottom <= c.top || l.top >= c.bottom); }})()"""
        assert tab.ask(inside)
        tab.hover("h1")
        assert tab.ask(f"getComputedStyle({lens}).visibility") == "hidden"
        tab.click("input[name=cells][value=numbers] + span")
        assert tab.ask(f"{numbers}.length") == 1024
        assert tab.ask(f"Math.min(...{numbers}.map((n) => parseFloat(getComputedStyle(n).fontSize)))") >= 6.5
        tab.hover('.cell[data-rank="777"]')
        assert tab.ask(f"getComputedStyle({lens}).visibility") == "hidden"
        # The choice stays visible, so that the user can go back.
        assert not tab.ask(f"{choose}.hidden")
        tab.click("input[name=cells][value=fit] + span")
        assert tab.ask(f"{numbers}.length") == 0
    with served(load_config(MESH)) as server, opened(browser, server.url) as tab:
        assert tab.ask(f"{choose}.hidden") and tab.ask(f"{numbers}.length") == 16


def test_traffic_of_a_step_and_what_the_run_counted(browser: Browser, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "topology.ranks_per_node=4")
    facts = facts_of(settings)
    rows, (tp,) = facts["traffic"]["rows"], [dim for dim in facts["dims"] if dim["name"] == "tp"]
    with served(settings, folder=tmp_path) as server, opened(browser, server.url) as tab:
        sent = {row["along"][0]: row["sent_bytes"] for row in rows}
        assert sorted(sent, key=sent.__getitem__) == ["dp", "pp", "tp"]
        assert tab.attribute(".flow", "data-along") == ["tp", "pp", "dp"]
        widths = tab.ask(
            "[...document.querySelectorAll('.track div')].map((d) => d.getBoundingClientRect().width)"
        )
        assert [width / widths[0] for width in widths] == pytest.approx(
            [sent[dim] / sent["tp"] for dim in ("tp", "pp", "dp")], rel=0.02
        )
        first = rf"all_reduce: activations; {rows[0]['calls']} × 262 kB → [\d.]+ MB sent, \d+ us on node"
        assert re.search(first, tab.text("#bars"))
        assert "not measured" in tab.text("#bars") and "(assumed)" in tab.text("#bars")
        tab.click("input[name=measure][value=time] + span")
        took = {row["along"][0]: row["seconds"] for row in rows}
        assert [float(x) for x in tab.attribute(".flow", "data-total")] == sorted(took.values(), reverse=True)
        tab.click(".flow[data-along=tp] button")
        assert tab.text("#caption") == " · ".join(("tp: 4 groups of 2 ranks", *tp["record"], "plays tensor"))
        # Values that the run counted are labelled as counted.
        with running(tmp_path, settings) as file:
            file.write(step(1))
        tab.ask("document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait("document.querySelector('input[name=measure][value=measured]')")
        tab.click("input[name=measure][value=measured] + span")
        assert tab.attribute(".flow", "data-along") == ["dp", "made_later"]
        assert "all_reduce: 7 calls, 2 MB, 500 ms inside them" in tab.text("#bars")
        assert "Counted by rank 0 over 5 steps" in tab.text("#bars")
        assert "send, asynchronous: 1 call, 4.1 kB, 0 us inside it" in tab.text("#bars")


def test_a_run_is_followed_from_before_it_begins(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = settings_for(out)

    def shows(words: str) -> None:
        # A page that becomes visible again asks for news at once.
        tab.ask("document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait(f"document.querySelector('#state').textContent === {json.dumps(words)}")

    with served(settings, folder=out) as server, opened(browser, server.url) as tab:
        shows("not started yet")
        assert tab.text("#progress") == f"Waiting for {out} and its metrics.jsonl."
        with running(out, settings) as file:
            for number in (1, 2, 3):
                file.write(step(number))
            points = "document.querySelector('[data-chart=loss]').dataset.points"
            tab.wait(f"{points} === '3'")
            shows("running, step 3 of 30, 3 s left")
            curve = "document.querySelector('[data-chart=loss] .curve').getAttribute('d')"
            before = tab.ask(curve)
            for number in range(4, 11):
                file.write(step(number))
            tab.wait(f"{points} === '10'")
            assert tab.ask(curve) != before and tab.ask(curve).count("L") == 9
            label = "loss: 4.9000 nats per byte at step 1, 4.0000 nats per byte at step 10"
            assert tab.attribute("[data-chart=loss] svg", "aria-label") == [label]
            assert tab.attribute("#meter", "aria-valuenow") == ["10"]
            # The chart shows the value under the pointer.
            tab.hover("[data-chart='tokens/s'] svg")
            assert re.fullmatch(r"1,00[56] at step [56]", tab.text("[data-chart='tokens/s'] b"))
        shows("finished, step 10 of 30")
        assert "rank 3, 2.1 ms after the first" in tab.text("#outcome")
        # Another run in the same folder has another mesh.
        other = settings_for(out, "mesh.dims={ pp = 1, dp = 4, tp = 2 }")
        with pytest.raises(KeyboardInterrupt), running(out, other) as file:
            file.write(step(1))
            tab.wait(f"{points} === '1'")
            tab.wait("!document.querySelector('#problem').hidden")
            assert "a different mesh from the one on this page: pp 1, dp 4, tp 2." in tab.text("#problem")
            raise KeyboardInterrupt
        shows("stopped after step 1 of 30")
        assert "interrupted" in tab.text("#outcome")
        # The run's folder is removed.
        for left in out.iterdir():
            left.unlink()
        out.rmdir()
        shows("not started yet")


def test_a_run_that_says_nothing_for_long_is_not_called_running(browser: Browser, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    with running(tmp_path, settings) as file, served(settings, folder=tmp_path) as server:
        file.write(step(1))
        os.utime(file.path, (1, 1))
        with opened(browser, server.url) as tab:
            tab.wait("document.querySelector('#state').dataset.state === 'silent'")
            assert re.match(r"no news for [\d ]+ h \d+ min, step 1 of 30", tab.text("#state"))


def test_a_page_without_its_server_says_so(browser: Browser, tmp_path: Path) -> None:
    with served(settings_for(tmp_path), folder=tmp_path) as server:
        tab = browser.open(server.url)
    tab.wait("document.querySelector('#state').textContent === 'meshcomm view has ended'")
    tab.close()


def test_the_policy_keeps_the_page_from_talking_to_others(browser: Browser) -> None:
    with served(load_config(MESH)) as server, served(load_config(MESH)) as other:
        tab = browser.open(server.url)
        asked = (
            f"fetch({json.dumps(other.url)}, {{ mode: 'no-cors' }}).then(() => 'reached', () => 'refused')"
        )
        assert tab.ask(asked) == "refused"
        tab.ask(
            "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); })()"
        )
        assert tab.ask("window.ran === undefined") is True
        assert any("Content Security Policy" in said for said in tab.complaints())
        tab.close()


def test_an_exported_page_needs_no_server(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = settings_for(out)
    page = tmp_path / "page.html"
    with running(out, settings) as file:
        for number in range(1, 6):
            file.write(step(number))
        export_page(page, facts_of(settings), out)
    with opened(browser, page.as_uri()) as tab:
        assert len(cells(tab)) == 8
        assert tab.text("#state") == "step 5 of 30 when this was written"
        assert tab.attribute("[data-chart=loss]", "data-points") == ["5"]
        tab.hover('.cell[data-rank="3"]')
        assert ranks_in_panel(tab) == {"pp": "3 7", "dp": "1 3", "tp": "2 3"}
        assert tab.requested() == [page.as_uri()]

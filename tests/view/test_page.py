"""The page of `meshcomm view`: its document, and the page itself in a headless Chromium."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import load_config
from meshcomm.view.page import document, export_page
from tests.view.browser import Browser, Tab, find_browser
from tests.view.test_facts import BIG, MESH, facts_of, gathered
from tests.view.test_run import running, settings_for, step
from tests.view.test_server import served

ROOT = Path(__file__).parents[2]


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
        alone = "one rank: no group"
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
            f"ring neighbors: previous {layout.neighbor_rank(5, 'dp', -1)}, next {layout.neighbor_rank(5, 'dp', 1)}"
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
            for row in gathered(found, 1):
                # The drawn ranks of a group of the layout are side by side.
                ranks = sorted(row, key=lambda rank: found[rank][0])
                groups = [tuple(layout.group_of(rank, name).tolist()) for rank in ranks]
                assert len([*groupby(groups)]) == len({*groups})
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
        assert tab.text("#caption") == " · ".join(
            ("tp: 4 groups of 2 ranks", *tp["record"], "tensor parallelism")
        )
        # Values that the run counted are labelled as counted.
        with running(tmp_path, settings) as file:
            file.write(step(1))
        tab.ask("document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait("document.querySelector('input[name=measure][value=measured]')")
        tab.click("input[name=measure][value=measured] + span")
        assert tab.attribute(".flow", "data-along") == ["dp", "made_later"]
        assert "all_reduce: 7 calls, 2 MB, 500 ms in the calls" in tab.text("#bars")
        assert "Counted by rank 0 over 5 steps" in tab.text("#bars")
        assert "send, asynchronous: 1 call, 4.1 kB, 0 us in the call" in tab.text("#bars")


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
            assert re.match(r"no new metrics for [\d ]+ h \d+ min, step 1 of 30", tab.text("#state"))


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

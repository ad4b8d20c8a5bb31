"""The news of a run, read from its folder, and what a target names."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, TrainingError, ViewError
from meshcomm.mesh.stats import CallStats, Stats
from meshcomm.train import Start, Step, Summary
from meshcomm.train.run_files import MetricsFile, put_aside, recorded
from meshcomm.view.page import export_page
from meshcomm.view.run import find_target, run_news
from tests.view.test_facts import CONFIGS, facts_of

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

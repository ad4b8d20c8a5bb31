"""`meshcomm doctor`: its facts as JSON, its findings for people, and its exit code."""

from __future__ import annotations

import json
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from meshcomm.commands import app

pytestmark = pytest.mark.usefixtures("no_launcher")

KEYS = ["findings", "versions", "host", "interfaces", "limits", "launch", "ranks"]


def run(*arguments: str, columns: int = 110) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": str(columns)})
    return done.exit_code, done.output


def test_json_has_all_keys_and_is_right_about_this_host() -> None:
    code, text = run("configs/mesh.toml", "--json")
    facts = json.loads(text)
    assert (code, list(facts)) == (0, KEYS)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"gloo"} <= set(facts["versions"]["backends"].split()) <= set(dist.Backend.backend_list)
    assert (facts["launch"], facts["ranks"]) == (None, None)
    assert list(facts["host"]) == ["name", "addresses", "cuda", "cores"]
    assert [each["name"] for each in facts["interfaces"]] == [n for _, n in socket.if_nameindex()]
    loopback = next(each for each in facts["interfaces"] if each["name"] == "lo")
    assert loopback["up"] is True and loopback["addresses"][0] == "127.0.0.1"
    assert all(list(each) == ["level", "what", "given", "expected", "try"] for each in facts["findings"])
    assert {each["level"] for each in facts["findings"]} <= {"warn"}
    assert [list(each) for each in facts["limits"]] == [["name", "limit", "used", "needed"]]


def test_a_person_is_shown_findings_and_with_all_the_facts_and_the_exit_code_says_the_worst() -> None:
    titles = ("versions", "host", "interfaces", "limits")
    code, text = run()
    assert code == 0 and text.startswith("0 errors, ") and not any(f"\n{title}\n" in text for title in titles)
    wrong = ("configs/mesh.toml", "--set", 'network.interfaces=["loo"]')
    code, text = run(*wrong)
    assert code == 1 and text.startswith("1 error, ") and text.splitlines()[1].startswith("error: ")
    code, everything = run(*wrong, "--all")
    assert code == 1 and [line.rstrip() for line in everything.splitlines()][: len(text.splitlines())] == [
        line.rstrip() for line in text.splitlines()
    ]
    assert [line for line in everything.splitlines() if line in titles] == [*titles]
    assert (
        f"\n  python {sys.version.split()[0]}" in everything and "name file descriptors, limit " in everything
    )
    assert "name lo, up yes, addresses 127.0.0.1" in everything
    assert "None" not in everything and "True" not in everything
    for columns in (80, 40):
        narrow = run("configs/mesh.toml", "--all", columns=columns)[1]
        assert max(map(len, narrow.splitlines())) <= columns and "…" not in narrow
    names = ", ".join(name for _, name in socket.if_nameindex())
    assert (
        "error: this host has no interface loo\n"
        "  given:    loo in [network] interfaces\n"
        f"  expected: one of {names}\n"
        '  try:      did you mean "lo"?'
    ) in "\n".join(line.rstrip() for line in text.splitlines())


def test_overrides_without_a_config_are_refused() -> None:
    code, text = run("--set", "a=1")
    assert code == 2 and text.startswith("--set has no effect without a CONFIG\n  given:    --set a=1\n")

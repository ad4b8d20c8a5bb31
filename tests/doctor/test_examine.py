"""Findings about this process, its host and its installation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshcomm.config import load_config
from meshcomm.doctor import Finding, examine, host

pytestmark = pytest.mark.usefixtures("no_launcher")

MESH = {"dims": {"pp": 2, "dp": 2}, "device": "cpu", "timeout_s": 30.0}


def found(facts: dict[str, Any], what: str) -> str:
    """The text of the finding whose first line begins with `what`. There must be only one."""
    texts = [str(Finding.read(each)) for each in facts["findings"] if each["what"].startswith(what)]
    assert len(texts) == 1, [each["what"] for each in facts["findings"]]
    return texts[0]


def test_a_mesh_of_open_size_is_not_compared() -> None:
    facts = examine(load_config({"mesh": {**MESH, "dims": {"dp": -1}}}))
    shown = found(facts, "limits and devices")
    assert shown.startswith("warn: ") and shown.endswith("try:      meshcomm doctor CONFIG --world-size N")
    assert all(all(each.values()) for each in facts["findings"] if "its size is open" in each["what"])
    assert all(each["needed"] is None for each in facts["limits"])
    facts = examine(load_config({"mesh": {**MESH, "dims": {"dp": -1}}}), 4)
    assert all(each["needed"] is not None for each in facts["limits"])


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RANK", "1", "error: the environment has only some"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn: TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_a_wrong_environment_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, what: str
) -> None:
    monkeypatch.setenv(name, value)
    assert found(examine(load_config({"mesh": MESH})), what.partition(": ")[2]).startswith(what)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a host without a GPU")
def test_a_device_or_backend_that_is_not_there() -> None:
    shown = found(examine(load_config({"mesh": {**MESH, "device": "cuda"}})), "this host has no cuda device")
    assert shown.startswith("error: ") and 'given:    device = "cuda"\n' in shown
    assert shown.endswith('try:      mesh.device = "cpu", or "auto"')
    facts = examine(load_config({"mesh": {**MESH, "options": {"dp": {"backend": "gloos"}}}}))
    shown = found(facts, "this installation of torch has no backend gloos")
    assert f"given:    gloos for dp, torch {torch.__version__}" in shown
    assert shown.endswith('try:      mesh.options.dp.backend = "gloo"')
    cores = facts["host"]["cores"]
    shared = [each["given"] for each in facts["findings"] if each["what"] == "ranks share cores"]
    assert shared == ([f"4 ranks on {cores} core{'' if cores == 1 else 's'}"] if cores < 4 else [])


def test_a_name_matters_to_several_hosts_that_are_given_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "resolve", lambda host: ["127.0.1.1"])

    def warned(**settings: Any) -> bool:
        facts = examine(load_config({"mesh": MESH, **settings}))
        return any("is the loopback address" in each["what"] for each in facts["findings"])

    nodes = {"topology": {"ranks_per_node": 2}}
    assert warned(**nodes) and not warned() and not warned(**nodes, network={"interfaces": ["lo"]})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert not warned(**nodes)

"""Calls that torch's hooks report: one that the backend refused does not stay in the record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshcomm.transport.torch_private import HOOK_NAMES
from meshcomm.watching.hooks import hooked
from meshcomm.watching.recorder import FlightRecorder
from tests.group_hooks import needs_group_hooks


@needs_group_hooks
def test_a_call_that_the_backend_refused_is_not_ended_by_the_next_one() -> None:
    kinds = {name: number for number, name in HOOK_NAMES.items()}
    recorder = FlightRecorder("dp", [0, 1], lambda *_: pytest.fail("nobody asked"))
    work = SimpleNamespace(is_completed=lambda: False)

    def given(kind: str) -> Any:
        x = torch.ones(2)
        return SimpleNamespace(name=kinds[kind], input_tensors=[x], output_tensors=[], root=1, work=work)

    hooks = hooked(SimpleNamespace(group_name="dp"), lambda: recorder, "dp", "rank 0")
    hooks.before(given("ALLREDUCE"))
    hooks.before(given("SEND"))
    hooks.after(given("SEND"))
    assert {key[1]: counter.calls for key, counter in recorder.counters.items()} == {
        "all_reduce": 0,
        "send": 1,
    }
    assert [each.call for each in recorder.messages.unfinished()] == ["send"]
    assert recorder.work is None

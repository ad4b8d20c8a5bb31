"""Each fact of each operation, changed on one rank while all calls are compared, and the table of docs/reference/promises.md."""

from __future__ import annotations

import pytest

from meshcomm.testing import Pool
from tests.comm import compared
from tests.comm.compared import ALONE, DONE, EVERY, OPERATIONS, OWN, PAGE, TOLD
from tests.group_hooks import needs_group_hooks

# The only ones of which the other ranks learn nothing: they have the right results.
ALONE_IN = {
    ("`mesh.gather` to the changed rank", "shape of out"),
    ("`mesh.all_to_all`, `output_split_sizes=`", "received sizes"),
}
# Processes go by the number of elements.
STRICTER = {"`mesh.send` to the changed rank": {"shape of equally many elements"}}


@pytest.fixture(scope="module")
def tried(pool: Pool) -> dict[str, dict[str, str]]:
    return compared.all_tried(pool)


@needs_group_hooks
def test_a_changed_fact_is_refused_or_may_differ(tried: dict[str, dict[str, str]]) -> None:
    wrong = []
    for name, operation in EVERY.items():
        for fact, ended in tried[name].items():
            expected = (DONE,) if fact not in operation.odd else (TOLD, OWN)
            if (name, fact) in ALONE_IN:
                expected = (ALONE,)
            if ended not in expected:
                wrong.append(f"{name}, {fact or 'unchanged'}: {ended}")
    assert wrong == []


@needs_group_hooks
def test_the_table_of_the_page_is_what_was_found(tried: dict[str, dict[str, str]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == compared.page(compared.table(tried)), "run: python -m tests.comm.compared"


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_simulator_refuses_the_same(name: str) -> None:
    operation = OPERATIONS[name]
    ended = {fact: compared.simulated(operation, changed) for fact, changed in operation.facts().items()}
    refused = {fact for fact, verdict in ended.items() if verdict in (TOLD, OWN)}
    assert refused == operation.odd.keys() | STRICTER.get(name, set()), ended
    assert compared.simulated(operation, {}) == DONE

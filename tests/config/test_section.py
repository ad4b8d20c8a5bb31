"""Sections are frozen and strict, keep the order of their tables, and take rules of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshcomm.config import Config, Problem, Resolved, Section, load_config
from meshcomm.config.section import Table
from meshcomm.errors import ConfigError


def test_nothing_of_a_config_changes() -> None:
    config = load_config({"mesh": {"dims": {"pp": 2, "dp": 2}, "merge": {"all": ["pp", "dp"]}}})
    mesh: Any = config.mesh
    changes: list[Callable[[], object]] = [
        lambda: setattr(mesh, "timeout_s", 3.0),
        lambda: delattr(mesh, "dims"),
        lambda: setattr(config, "mesh", mesh),
        lambda: mesh.dims.__setitem__("pp", 3),
        lambda: mesh.dims.__delitem__("pp"),
        lambda: mesh.dims.update(pp=3),
        lambda: mesh.dims.pop("pp"),
        lambda: mesh.merge.setdefault("x", ()),
        lambda: mesh.options.clear(),
    ]
    for change in changes:
        with pytest.raises(
            ConfigError, match=r"^a configuration cannot be changed\n  given:    a change to "
        ):
            change()
    assert config == load_config({"mesh": {"dims": {"pp": 2, "dp": 2}, "merge": {"all": ["pp", "dp"]}}})


def test_the_order_of_dims_is_part_of_a_config() -> None:
    one, other = (load_config({"mesh": {"dims": dims}}) for dims in ({"a": 2, "b": 3}, {"b": 3, "a": 2}))
    assert one != other and one.mesh != other.mesh
    assert one.mesh.dims == {"b": 3, "a": 2}
    assert not one.mesh.dims != Table(a=2, b=3)  # noqa: SIM202 (both operators are our own)


class Budget(Section):
    """`[budget]`: what the program that reads it may use."""

    place = "budget"
    ranks_of_data: int = 1
    """The most ranks along dp."""


def _data_in_budget(resolved: Resolved) -> Iterator[Problem]:
    size, most = resolved.mesh.dims["dp"], resolved.config.budget.ranks_of_data  # type: ignore[attr-defined]
    if size > most:
        yield Problem("budget.ranks_of_data", f"{size} > {most}", f"{size} or more")


class WithBudget(Config):
    budget: Budget = Budget()
    """What may be used."""
    rules = (*Config.rules, _data_in_budget)


def test_a_rule_of_ones_own_reads_numbers() -> None:
    raw = {"mesh": {"dims": {"dp": 4}}, "budget": {"ranks_of_data": 2}}
    with pytest.raises(ConfigError, match=r"^config: 1 problem\n  budget\.ranks_of_data: 4 > 2\n"):
        load_config(raw, kind=WithBudget)
    with pytest.raises(ConfigError, match=r"budget: unknown key"):
        load_config(raw)
    # The size -1 is open, so the rule waits for the number of ranks. A list of ranks gives that number, too.
    waiting = load_config(raw, ["mesh.dims.dp=-1"], kind=WithBudget)
    assert isinstance(waiting.resolved(2), WithBudget) and isinstance(
        load_config(waiting, ["mesh.dims.dp=2"]), WithBudget
    )
    with pytest.raises(ConfigError, match=r"budget\.ranks_of_data: 4 > 2"):
        waiting.resolved(4)
    with pytest.raises(ConfigError, match=r"budget\.ranks_of_data: 4 > 2"):
        load_config(waiting, ["mesh.ranks=[0, 1, 2, 3]"])
    # Rules do not run if a value is invalid.
    with pytest.raises(ConfigError, match=r"(?s)^config .*: 2 problems.*mesh\.dims\.dp.*timeout_s"):
        load_config(raw, ["mesh.dims.dp='x'", "mesh.timeout_s=0"], kind=WithBudget)


def models(model: type[Section] = Section) -> Iterator[type[Section]]:
    for inner in model.__subclasses__():
        yield inner
        yield from models(inner)


def test_every_section_is_frozen_strict_and_shows_an_example_of_what_it_needs() -> None:
    found = [model for model in models() if model.__module__.startswith("meshcomm.config")]
    assert len(found) == 16
    for model in found:
        settings = model.model_config
        assert settings["frozen"] and settings["strict"] and settings["extra"] == "forbid"
        assert all(not field.is_required() or field.examples for field in model.model_fields.values()), model

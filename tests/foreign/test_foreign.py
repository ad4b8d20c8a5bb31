"""Third-party programs, unchanged: torchtitan, picotron, accelerate, transformers' Trainer and Lightning.

Some need a separate environment, made by `python -m tests.foreign.environments`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dryrun.test_torch_groups import Rows, most_of, told
from tests.foreign.programs import FAULTS, PROGRAMS, SCRIPTS, ran
from tests.forked_jobs import after_start
from tests.group_hooks import needs_group_hooks

pytestmark = [
    needs_group_hooks,
    pytest.mark.faults,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MESHES = [name for name, program in PROGRAMS.items() if program.sizes]


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    program = PROGRAMS[request.node.callspec.params["name"]]
    if not program.environment:
        pytest.importorskip(program.name)
    program.python()


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_is_named(tmp_path: Path, name: str, fault: str) -> None:
    found = PROGRAMS[name].ended(tmp_path, fault)
    assert found.code != 0 and found.seconds < 60
    found.who(FAULTS[name, fault])


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_fault_nothing_is_said(tmp_path: Path, name: str) -> None:
    code, out, err, _ = PROGRAMS[name].ended(tmp_path)
    assert code == 0 and "trained" in out and "meshcomm" not in "".join(after_start(err)), err


def losses(text: str) -> set[str]:
    """The losses of all ranks and steps, with all printed digits; they differ by rank if pipeline stages do."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    return {
        " ".join(each) for each in re.findall(r"step: +(\d+) +(loss: *\S+) +(grad_norm: *\S+)", plain)
    } | set(re.findall(r"rank \d loss [\d.]+", plain))


@pytest.mark.parametrize("name", MESHES)
def test_it_trains_the_same_and_a_dry_run_calls_the_same(tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    plain = program.ended(tmp_path / "plain", watched=False)
    counts = tmp_path / "counts"
    counts.mkdir()
    watched = program.ended(tmp_path / "watched", counts=counts)
    assert plain.code == watched.code == 0, watched.err[-6000:]
    assert losses(plain.out + plain.err) == losses(watched.out + watched.err)
    assert len(losses(plain.out + plain.err)) >= 4
    made: list[Rows] = []
    for path in sorted(counts.iterdir()):
        rows = json.loads(path.read_text())
        made.append({(lane, call): (calls, nbytes) for lane, call, calls, nbytes in rows})
    assert len(made) == 4
    folder = tmp_path / "dry"
    folder.mkdir()
    script, env = program.prepared(folder)
    dry = ["-m", "meshcomm", "dryrun", "--json", "--world-size", "4", "--steps", "1000", *script]
    found = ran(dry, folder, program.python(), env)
    if name == "torchtitan, pp2 dp_shard2":
        # torchtitan gives stages no shapes, so torch asks other ranks for them, and a dry run cannot.
        assert "Stage 0 requires dynamic shape inference" in found.err
        return
    assert found.code == 0, found.err[-6000:]
    facts = json.loads(found.out)
    most = most_of(made)
    if name == "torchtitan, dp_shard2 tp2":
        # torchtitan draws weights until all are in bounds: three times here, but once in a dry run, without values.
        for key, nbytes in ((("dp_shard", "all_gather"), 524_288), (("tp", "all_gather"), 1_048_576)):
            most[key] = (most[key][0] - nbytes, most[key][1] - 2)
    assert not facts["findings"] and told(facts) == most


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_dry_run_of_many_ranks(tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    script, env = program.prepared(tmp_path)
    dry = ["-m", "meshcomm", "dryrun", "--json", "--world-size", "1024", *script, "none"]
    found = ran(dry, tmp_path, program.python(), env)
    assert found.code == 0, found.err[-6000:]
    facts = json.loads(found.out)
    assert not facts["findings"] and {row["dim"] for row in facts["calls"]} == {"default group"}

"""Run `tests.benchmarks.training` on several meshes, a line for each: `python -m tests.benchmarks.meshes [--rounds 5]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.show.units import seconds_text
from tests.benchmarks.table import markdown

Facts = Mapping[str, Any]


class Case(NamedTuple):
    """A mesh, the roles of its dims, and further settings."""

    name: str
    dims: str
    parallel: str
    more: tuple[str, ...] = ()
    ranks: int = 4


_EXPERTS: Final = (
    "model={ num_layers = 4, hidden_size = 256, num_heads = 8, num_kv_heads = 8, intermediate_size = 512, experts = 8,"
    " experts_per_token = 2 }",
    "data={ seq_len = 256 }",
    "train={ steps = 1, global_batch_size = 64, micro_batch_size = 4 }",
)
CASES: Final = (
    Case("dp=4", "dp = 4", 'data = "dp"'),
    Case("dp=2 tp=2", "dp = 2, tp = 2", 'data = "dp", tensor = "tp"'),
    Case("tp=4", "tp = 4", 'tensor = "tp"'),
    Case("pp=2 dp=2 tp=2", "pp = 2, dp = 2, tp = 2", 'pipeline = "pp", data = "dp", tensor = "tp"', ranks=8),
    Case("dp=2 cp=2, ring", "dp = 2, cp = 2", 'data = "dp", context = "cp"'),
    Case("HSDP: dp=2 fsdp=2", "dp = 2, fsdp = 2", 'data = "dp", shard = "fsdp"'),
    Case("cp=4, ring", "cp = 4", 'context = "cp"'),
    Case("dp=4, 8 experts, ep=4", "dp = 4", 'data = "dp", expert = "ep"', _EXPERTS),
    Case("tp=2, a core for each rank", "tp = 2", 'tensor = "tp"', ranks=2),
    Case("pp=2, a core for each rank", "pp = 2", 'pipeline = "pp"', ranks=2),
    Case("dp=2, a core for each rank", "dp = 2", 'data = "dp"', ranks=2),
)


def measured(case: Case, rounds: int) -> Facts:
    """Return the output of `tests.benchmarks.training --json` for a mesh."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "mesh.toml")
        views = "views.expert = { edp = 1, ep = 4 }\n" if "expert" in case.parallel else ""
        config.write_text(f'[mesh]\ndims = {{ {case.dims} }}\ndevice = "cpu"\ntimeout_s = 300.0\n{views}')
        sets = [f"parallel={{ {case.parallel} }}", *case.more]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(case.ranks),
        ]
        command += [
            "-m",
            "tests.benchmarks.training",
            str(config),
            "--rounds",
            str(rounds),
            "--steps",
            "1",
            "--json",
        ]
        for each in sets:
            command += ["--set", each]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    facts: Facts = json.loads(said[said.index("{") :])
    return facts


def main() -> None:
    """Print a table of speeds, and one of predicted and measured times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = [(case, measured(case, given.rounds)) for case in CASES]

    def ratio(facts: Facts, start: str) -> str:
        return next((f"{way['ratio']:.2f}" for way in facts["ways"] if way["way"].startswith(start)), "-")

    def own(facts: Facts) -> str:
        ways = [
            way
            for way in facts["ways"][1:]
            if way["way"].startswith("torch: ") and "DDP on all" not in way["way"]
        ]
        return f"{ways[0]['ratio']:.2f} ({ways[0]['way'].removeprefix('torch: ')})" if ways else "-"

    columns: dict[str, Callable[[tuple[Case, Facts]], str]] = {
        "mesh": lambda row: row[0].name,
        "tokens/s": lambda row: f"{row[1]['ways'][0]['tokens_s']:,.0f}",
        "of the limit": lambda row: ratio(row[1], "limit"),
        "of DDP on all ranks": lambda row: ratio(row[1], "torch: DDP on all"),
        "of torch's own along the same dims": lambda row: own(row[1]),
    }
    predicted = [
        (case.name, name, facts["step"].get(name, 0.0) - facts["late"].get(name, 0.0), seconds)
        for case, facts in found
        for name, seconds in facts.get("predicted", {}).items()
    ]
    compared: dict[str, Callable[[tuple[str, str, float, float]], str]] = {
        "mesh": lambda row: row[0],
        "in a step": lambda row: (
            row[1] if row[1] == "bubble" else f"along {row[1]}, waits for a late rank left out"
        ),
        "measured": lambda row: seconds_text(row[2]),
        "predicted": lambda row: seconds_text(row[3]),
    }
    print(markdown(columns, found) + "\n\n" + markdown(compared, predicted))


if __name__ == "__main__":
    main()

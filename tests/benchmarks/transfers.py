"""Plans of transfers between two meshes, without processes: `python -m tests.benchmarks.transfers`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from meshcomm.config import TopologyConfig
from meshcomm.show.units import seconds_text
from meshcomm.transfer.explain import cost
from tests.benchmarks.table import markdown
from tests.transfer.models import ROWS

_LARGE = """
import resource, sys, time
from meshcomm.config import TopologyConfig
from meshcomm.transfer.explain import cost
from meshcomm.transfer.plan import Ends, Plan
from tests.transfer.models import llama_405b

source, target, entries = llama_405b()
stripes = tuple(sys.argv[2:])
began = time.process_time()
if sys.argv[1] == "plan":
    ends = Ends.of(source, target, lambda ranks: ranks // 8)
    plan = Plan(ends, entries, stripes=ends.levels(stripes))
    plan.rounds(), plan.loads()
else:
    cost(source, target, entries, TopologyConfig(ranks_per_node=8), stripes)
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def large(what: str, *stripes: str) -> dict[str, Any]:
    """Plan or explain the transfer of Llama 405B in a process of its own."""
    said = subprocess.run(
        [sys.executable, "-c", _LARGE, what, *stripes], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    seconds, peak_kb = map(float, said.split())
    return {
        "what": what,
        "stripes": " ".join(stripes) or "none",
        "seconds": seconds,
        "peak": peak_kb * 1024 / 1e6,
    }


def row_of(name: str) -> dict[str, Any]:
    """Return the figures of a transfer: direct, with stripes along all copies, and as `meshcomm.link` chooses."""
    (source, target, entries), *_ = ROWS[name]
    topology = TopologyConfig(ranks_per_node=8)
    direct, striped, chosen = (
        cost(source, target, entries, topology, dims).facts() for dims in ((), ("copy",), None)
    )
    seconds = {
        **striped["seconds"],
        "chosen": chosen["seconds"]["striped" if chosen["stripes"] else "direct"],
    }
    return {"name": name, "direct": direct, "striped": striped, "chosen": chosen, "seconds": seconds}


def gigabytes(nbytes: float) -> str:
    """Return a number of bytes in GB."""
    return f"{nbytes / 1e9:.3g}"


def main() -> None:
    """Print both tables."""
    columns = {
        "Llama 405B, 16,384 ranks to 1,024": lambda row: row["what"],
        "stripes along": lambda row: row["stripes"],
        "processor time": lambda row: seconds_text(row["seconds"]),
        "peak memory": lambda row: f"{row['peak']:.0f} MB",
    }
    print(markdown(columns, [large(what, *dims) for what in ("plan", "explain") for dims in ((), ("copy",))]))
    print()
    figures = {
        "transfer": lambda row: row["name"],
        "GB": lambda row: gigabytes(row["direct"]["bytes"]),
        "received": lambda row: gigabytes(row["chosen"]["loads"][3]["max_bytes"]),
        "/ bound": lambda row: f"{row['chosen']['loads'][3]['ratio']:.2f}",
        "sent directly": lambda row: gigabytes(row["direct"]["loads"][0]["max_bytes"]),
        "in stripes": lambda row: gigabytes(row["striped"]["loads"][0]["max_bytes"]),
        "in stripes / bound": lambda row: f"{row['striped']['loads'][0]['ratio']:.3f}",
        "no plan below": lambda row: seconds_text(row["seconds"]["bound"]),
        "direct": lambda row: seconds_text(row["seconds"]["direct"]),
        "striped": lambda row: seconds_text(row["seconds"]["striped"]),
        "by default": lambda row: seconds_text(row["seconds"]["chosen"]),
        "legs": lambda row: str(row["chosen"]["legs"]),
        "gather, broadcast": lambda row: seconds_text(row["seconds"]["gather_broadcast"]),
    }
    print(markdown(figures, map(row_of, ROWS)))


if __name__ == "__main__":
    main()

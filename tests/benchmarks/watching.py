"""What `meshcomm.watch` adds to a call that a program makes by torch: two Gloo processes, the same calls with and without."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist

import meshcomm
from meshcomm.show.units import seconds_text
from meshcomm.testing import Pool
from tests.benchmarks.table import markdown

_ROUNDS: Final = 15
_CALLS: Final = 200
SIZES: Final = {"4 B": 1, "64 kB": 16_000, "1 MB": 250_000}
CALLS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "all_reduce": lambda x, out: dist.all_reduce(x),
    "all_gather_into_tensor": lambda x, out: dist.all_gather_into_tensor(out, x),
    "all_reduce, async": lambda x, out: dist.all_reduce(x, async_op=True).wait(),
}


def measured() -> dict[tuple[str, str], tuple[float, float]]:
    """Median microseconds of a call without and with, by call and size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, call in CALLS.items():
        for size, elements in SIZES.items():
            x, out = torch.zeros(elements), torch.zeros(2 * elements)
            each: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(2 * _ROUNDS):
                watch = meshcomm.watch(validate_calls=0, reports="") if turn % 2 else None
                for _ in range(5):
                    call(x, out)
                began = perf_counter()
                for _ in range(_CALLS):
                    call(x, out)
                each[watch is not None].append((perf_counter() - began) / _CALLS * 1e6)
                if watch is not None:
                    watch.close()
            found[name, size] = (median(each[False]), median(each[True]))
    dist.destroy_process_group()
    return found


def main() -> None:
    """Print the table."""
    # By its name, as the ranks import it.
    from tests.benchmarks import watching

    pool = Pool()
    try:
        found = pool.run(watching.measured, ranks=2, timeout_s=600)[0]
    finally:
        pool.close()
    columns: dict[str, Callable[[tuple[str, str]], str]] = {
        "call": lambda key: key[0],
        "size": lambda key: key[1],
        "without": lambda key: seconds_text(found[key][0] / 1e6),
        "watched": lambda key: seconds_text(found[key][1] / 1e6),
        "ratio": lambda key: f"{found[key][1] / found[key][0]:.2f}",
    }
    print(markdown(columns, found))


if __name__ == "__main__":
    main()

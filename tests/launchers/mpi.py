"""Open MPI and MPICH from Debian's packages: python -m tests.launchers.mpi"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.launchers.checks import Checks, install, named, program, summed, version

# Each program's message about a rank that was ended by a signal, and the program that prints it.
_OPEN_MPI: Final = "mpirun.openmpi", r"process rank 2 .* exited on signal 9"
_MPICH: Final = "mpiexec.hydra", r"PID \d+ RUNNING AT"
_OTHERS: Final = r"rank 2 does not answer: its process has ended"


def main() -> int:
    """Run the checks of both. Return 0 if all passed."""
    install("openmpi-bin", "mpich")
    as_root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    openmpi = Checks(f"Open MPI {version('mpirun.openmpi', '--version')}", as_root)
    _both(openmpi, [_OPEN_MPI[0]])
    with openmpi.case("rank 2 killed") as case:
        job = case.start([_OPEN_MPI[0], "-n", "4", *program(dies=2)]).end()
        case.said = named(job, _OPEN_MPI[1], _OPEN_MPI[0])
    failed = openmpi.code()
    mpich = Checks(f"MPICH {version('mpiexec.hydra', '--version')}")
    _both(mpich, [_MPICH[0]])
    with mpich.case("rank 2 killed") as case:
        job = case.start([_MPICH[0], "-n", "4", *program(dies=2)]).end()
        case.said = named(job, _MPICH[1], _MPICH[0])
    # With a shell around each rank, mpiexec sees only an exit code, and then waits for the other ranks.
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *program(dies=2)]
    with mpich.case("-disable-auto-cleanup, a shell around each rank, rank 2 killed") as case:
        job = case.start([_MPICH[0], "-disable-auto-cleanup", "-n", "4", *shell]).end()
        case.said = named(job, _OTHERS, "another rank")
    return mpich.code() or failed


def _both(checks: Checks, mpirun: Sequence[str]) -> None:
    with checks.case("-n 4 script.py") as case:
        case.said = summed(case.start([*mpirun, "-n", "4", *program()]).end())
    with checks.case("two jobs at once") as case:
        jobs = {tag: case.start([*mpirun, "-n", "4", *program(tag=tag, calls=200)]) for tag in (1, 10)}
        case.said = "; ".join(summed(job.end(), tag) for tag, job in jobs.items())


if __name__ == "__main__":
    raise SystemExit(main())

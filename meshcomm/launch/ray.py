"""Ranks as actors of Ray: `python -m meshcomm.launch.ray --world-size 8 train CONFIG`, or `... run SCRIPT`."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.launch.reaper import DISMISSED, JOB_VARIABLE, end_all, start_reaper
from meshcomm.launch.root_cause import root_cause, without_error
from meshcomm.mesh.rank_failure import Failure, collect

# How long the cause may take to be told after errors that follow from it.
_CAUSE_S: Final = 5.0


class _Rank:
    """The actor: one rank is a process that it starts, and that ends with it."""

    def where(self) -> tuple[str, str, int]:
        """Node, its address, and a port that is free there."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(self, words: Sequence[str], variables: Mapping[str, str], cwd: str) -> Iterator[Any]:
        """Each line that `meshcomm WORDS` prints; at last its exit code and its failure, [] where it has left none."""
        # Its name is the job's: as under meshcomm's own launcher, the rank leaves its error there.
        folder = Path(tempfile.mkdtemp(prefix="meshcomm-")) / variables["TORCHELASTIC_RUN_ID"]
        folder.mkdir()
        reaper = start_reaper(folder)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "meshcomm", *words],
                env={**os.environ, **variables, JOB_VARIABLE: str(folder)},
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            assert process.stdout is not None
            for line in process.stdout:  # noqa: UP028  Ray drives this generator by `send`
                yield line
            yield process.wait(), collect(folder, 0)
        finally:
            end_all(folder)
            reaper.communicate(DISMISSED)
            shutil.rmtree(folder.parent, ignore_errors=True)


def launch(
    words: Sequence[str], world_size: int, cpus: float = 1.0, gpus: float = 0.0, timeout_s: float = 60.0
) -> int:
    """Run `meshcomm WORDS` as `world_size` actors of a placement group; return the job's exit code.

    cpus, gpus: of each rank. timeout_s: how long the cluster may take to have room for them.

    Joins the cluster of RAY_ADDRESS, or starts one on this host. What ranks print is printed here. Where a rank fails, or
    its actor dies, all actors are killed, and the last lines on stderr name the root cause, as under `meshcomm run`.
    Every host has config and script at the same path.
    Raises LaunchError without Ray, and where the cluster has no room.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise LaunchError(
            "Ray is not installed", given=str(error), expected="the package ray", hint="pip install ray"
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = ray.util.placement_group([resources] * world_size, strategy="PACK")
    actors = []
    try:
        if not group.wait(timeout_s):
            raise LaunchError(
                f"the Ray cluster has no room for {world_size} ranks",
                given=f"after {timeout_s:g} s free: {ray.available_resources()}",
                expected=f"{world_size} times {resources}",
                hint="fewer ranks, --cpus-per-rank, or more nodes",
            )
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        kind = ray.remote(_Rank).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place)
        actors = [kind.remote() for _ in range(world_size)]
        places = ray.get([actor.where.remote() for actor in actors], timeout=timeout_s)
        # Ranks of one node are neighbours.
        nodes = list(dict.fromkeys(node for node, _, _ in places))
        order = sorted(range(world_size), key=lambda at: nodes.index(places[at][0]))
        actors, places = [actors[at] for at in order], [places[at] for at in order]
        variables = _variables([node for node, _, _ in places], *places[0][1:])
        streams = {
            actor.run.remote(list(words), own, os.getcwd()): rank
            for rank, (actor, own) in enumerate(zip(actors, variables, strict=True))
        }
        return _follow(streams, [address for _, address, _ in places])
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _variables(nodes: Sequence[str], address: str, port: int) -> list[dict[str, str]]:
    """What torchrun would set, by rank. nodes: of the ranks; address, port: where rank 0 is met."""
    common = {
        "WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": address if len({*nodes}) > 1 else "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"ray-{uuid.uuid4().hex[:12]}",
    }
    return [
        {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
        }
        for rank, node in enumerate(nodes)
    ]


def _follow(streams: dict[Any, int], addresses: Sequence[str]) -> int:
    """Print what ranks print until all have ended or one has failed; then name it. Returns the exit code."""
    import ray

    failures: list[Failure] = []
    ended: list[int] = []
    last = float("inf")
    while streams and time.monotonic() < last and all(failure.follows for failure in failures):
        ready, _ = ray.wait(list(streams), timeout=0.5)
        for stream in ready:
            rank = streams[stream]
            try:
                said = ray.get(next(stream))
            except ray.exceptions.RayError as error:
                gone = without_error(rank, 1, time.time(), "rank {}".format)
                reason = str(error).strip().splitlines()
                failures.append(replace(gone, what=f"lost its actor on {addresses[rank]}: {reason[0]}"))
            else:
                if isinstance(said, str):
                    print(said, end="", flush=True)
                    continue
                code, left = said
                ended += [rank] * (code == 0)
                failures += left or (
                    [] if code == 0 else [without_error(rank, code, time.time(), "rank {}".format)]
                )
            del streams[stream]
            if failures:
                last = min(last, time.monotonic() + _CAUSE_S)
    if not failures:
        return 0
    root, others = root_cause(failures, len(addresses), "rank {}".format, ended)
    lines = [root.text] if root.text else []
    lines += [f"meshcomm: {line}" for line in (root.summary, *others)]
    print("\n".join(lines), file=sys.stderr)
    return root.code


def _main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m meshcomm.launch.ray", description=__doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--cpus-per-rank", type=float, default=1.0)
    parser.add_argument("--gpus-per-rank", type=float, default=0.0)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="train CONFIG, or run [CONFIG] SCRIPT")
    given = parser.parse_args()
    try:
        code = launch(given.words, given.world_size, given.cpus_per_rank, given.gpus_per_rank)
    except MeshcommError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    _main()

"""Run ranks as Ray actors: `python -m meshcomm.job.ray --world-size 8 train CONFIG`, or `... run SCRIPT`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, final

import torch.distributed as dist

from meshcomm.config import Config, load_config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.job.reaper import DISMISSED, JOB_VARIABLE, end_all, start_reaper
from meshcomm.job.replacing import Replacing, sizes_of
from meshcomm.job.standby import COMMAND
from meshcomm.job.supervisor import LOOPBACK, STORE_TIMEOUT, Label, Supervisor, labels_of
from meshcomm.rendezvous.exposure import serve_on_loopback
from meshcomm.rendezvous.generation import ANNOUNCED_VARIABLE, VARIABLE
from meshcomm.watching.ending import Failure, without_error

# How long Ray may take to detect that a node is dead.
_ANNOUNCED_S: Final = 60
_LOOK_S: Final = 0.1


class _Rank:
    """The actor of a rank. It starts the rank's process, which ends together with the actor."""

    def where(self) -> tuple[str, str, int]:
        """Return the actor's node, the node's address, and a free port on the node."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(self, words: Sequence[str], variables: Mapping[str, str], cwd: str) -> Iterator[Any]:
        """Yield the lines that `meshcomm WORDS` prints, then its exit code and failure report, which is "" if there is none.

        This does not import torch, because the import would take longer than starting the actor.
        """
        # The folder has the job's name. As under meshcomm's own launcher, the rank writes its error there.
        folder = Path(tempfile.mkdtemp(prefix="meshcomm-")) / variables["TORCHELASTIC_RUN_ID"]
        folder.mkdir()
        reaper = start_reaper(folder)
        try:
            process = subprocess.Popen(
                [sys.executable, *COMMAND, *words],
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
            code = process.wait()
            yield code, next((path.read_text() for path in folder.glob("0-[cf]*.json")), "")
        finally:
            end_all(folder)
            reaper.communicate(DISMISSED)
            shutil.rmtree(folder.parent, ignore_errors=True)


def launch(
    words: Sequence[str],
    world_size: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
    timeout_s: float = 60.0,
    replace: int | None = None,
) -> int:
    """Run `meshcomm WORDS` as `world_size` actors of a placement group; return the job's exit code.

    cpus, gpus: resources per rank. timeout_s: how long to wait for room in the cluster for all actors, or for a new actor.
    replace: overrides elastic.replace in the configuration.

    Joins the cluster at RAY_ADDRESS, or starts a cluster on this host. The ranks' output is printed by this process. If a
    rank fails or its actor dies, a new actor replaces it, or the job continues with fewer ranks, as `[elastic]`
    specifies. Otherwise all actors are killed, and the last lines on stderr name the root cause, as with `meshcomm run`.
    The config and the script must be at the same path on every host.
    Raises LaunchError if Ray is not installed or the cluster has no room; ConfigError for an invalid configuration.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise LaunchError(
            "Ray is not installed", given=str(error), expected="the package ray", hint="pip install ray"
        ) from error
    words, settings, elastic = _read(words, replace)
    sizes = None
    if settings is not None:
        settings.resolved(world_size)
        sizes = sizes_of(settings, world_size)
    replacing = Replacing(world_size, elastic, sizes)
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = ray.util.placement_group([resources] * world_size, strategy="PACK")
    ranks = None
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
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        address = LOOPBACK if nodes == 1 else ray.util.get_node_ip_address()
        store = _serve(address) if replacing.is_elastic else None
        ranks = _Ranks(
            kind.remote, words, replacing, timeout_s, labels_of(settings, world_size), (address, store, nodes)
        )
        return ranks.run()
    finally:
        if ranks is not None:
            ranks.close()
        ray.util.remove_placement_group(group)


def _read(words: Sequence[str], replace: int | None) -> tuple[list[str], Config | None, ElasticConfig]:
    """Return the words with `--replace` added, the configuration that they name, if any, and the policy for lost ranks."""
    command, *rest = words or [""]
    if command not in ("train", "run"):
        raise LaunchError(
            f"meshcomm.job.ray cannot start {command or 'ranks without a command'}",
            given=" ".join(words) or "no words",
            expected="train CONFIG, or run [CONFIG] SCRIPT",
            hint="python -m meshcomm.job.ray --world-size 8 train CONFIG",
        )
    if replace is not None:
        rest = ["--replace", str(replace), *rest]
    # Words after a script's name belong to the script.
    script = next((index for index, word in enumerate(rest) if word.endswith(".py")), len(rest))
    parser = argparse.ArgumentParser(prog=f"meshcomm {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--replace", type=int)
    for name in ("--world-size", "--max-restarts"):
        parser.add_argument(name)
    options, words_left = parser.parse_known_args(rest[: script if command == "run" else None])
    config = next((word for word in words_left if not word.startswith("-")), None)
    if config is None:
        return [command, *rest], None, ElasticConfig(replace=options.replace or 0)
    overrides = options.overrides
    if options.replace is not None:
        overrides = [*overrides, f"elastic.replace={options.replace}"]
    settings = load_config(Path(config), overrides)
    return [command, *rest], settings, settings.elastic


def _serve(address: str) -> dist.TCPStore:
    """Return a store for the job that listens at the given address of the driver's host."""
    store = serve_on_loopback(address, 0, STORE_TIMEOUT)
    try:
        return store or dist.TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"the driver cannot serve a store at {address}",
            given=str(error).splitlines()[0],
            expected="a free port of this node, chosen by the system",
            hint="meshcomm doctor shows the limits of this host",
        ) from error


class _Place(NamedTuple):
    """Where a rank runs: its node, the node's address, and its local rank."""

    node: str
    address: str
    local_rank: int


@final
class _Ranks(Supervisor):
    """The ranks of a job, whose processes are started by actors.

    make: a function that creates a new actor in the job's placement group. patience_s: how long an actor may take to start.
    served: the address of the driver's host, the job's store there (None if rank 0 serves it), and the cluster's node count.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        words: Sequence[str],
        replacing: Replacing,
        patience_s: float,
        label: Label,
        served: tuple[str, dist.TCPStore | None, int],
    ) -> None:
        super().__init__(replacing, label)
        self._make, self._words, self._patience_s, self._served = make, [*words], patience_s, served
        self._actors: dict[int, Any] = {}
        self._places: dict[int, _Place] = {}
        # By awaited reference: the process that produces the output, or the process whose actor is starting, and since when.
        self._streams: dict[Any, int] = {}
        self._coming: dict[Any, tuple[int, float]] = {}
        self._several_nodes = False

    def run(self) -> int:
        """Start all ranks. Wait until all ranks have ended, or one has failed and is not replaced. Return the exit code."""
        self._start_all()
        failures = self.follow()
        if not failures:
            return 0
        code, lines = self.told(failures)
        print(lines, file=sys.stderr)
        return code

    def close(self) -> None:
        """End all actors and their ranks."""
        for process in [*self._actors]:
            self.end(process)

    def _start_all(self) -> None:
        import ray

        count = self.replacing.places.count
        actors = [self._make() for _ in range(count)]
        self._actors = dict(enumerate(actors))
        places = ray.get([actor.where.remote() for actor in actors], timeout=self._patience_s)
        # Place ranks of one node next to each other.
        nodes = list(dict.fromkeys(node for node, _, _ in places))
        order = sorted(range(count), key=lambda index: nodes.index(places[index][0]))
        self._actors = {process: actors[index] for process, index in enumerate(order)}
        for process, index in enumerate(order):
            self._take_place(process, *places[index][:2])
        address, store, several = self._served
        self._several_nodes = len(nodes) > 1 or (store is not None and several > 1)
        if store is None:
            _, address, port = places[order[0]]
            address = address if self._several_nodes else LOOPBACK
        else:
            port = store.port
            self.common[ANNOUNCED_VARIABLE] = str(_ANNOUNCED_S)
        self.common["WORLD_SIZE"] = str(count)
        self.meet_at(address, port, f"ray-{uuid.uuid4().hex[:12]}", store)
        for process in range(count):
            self._run(process)

    def start(self, process: int) -> None:
        self._actors[process] = self._make()
        self._coming[self._actors[process].where.remote()] = process, time.monotonic()

    def end(self, process: int) -> None:
        """See Supervisor. Ray also reports an unreachable actor as lost. That actor's rank must not meet the new one."""
        import ray

        if (actor := self._actors.pop(process, None)) is not None:
            # Also frees the actor's share of the placement group.
            ray.kill(actor)
        self._forget(process)
        self._places.pop(process, None)

    def forget_errors(self, process: int) -> None:
        """See Supervisor. An actor returns the error with the exit code, and leaves nothing."""

    def _forget(self, process: int) -> None:
        """Expect nothing more from the actor of a process."""
        self.running.discard(process)
        self._streams = {stream: other for stream, other in self._streams.items() if other != process}
        self._coming = {request: start for request, start in self._coming.items() if start[0] != process}

    def _take_place(self, process: int, node: str, address: str) -> None:
        taken = {place.local_rank for place in self._places.values() if place.node == node}
        local_rank = next(number for number in itertools.count() if number not in taken)
        self._places[process] = _Place(node, address, local_rank)

    def _run(self, process: int, generation: int | None = None) -> None:
        """Start a rank in its actor. generation: the number of the generation that the rank joins, if a lost one is replaced."""
        variables = self._variables(process)
        if generation is not None:
            variables[VARIABLE] = str(generation)
        stream = self._actors[process].run.remote(self._words, self.common | variables, os.getcwd())
        self._streams[stream] = process
        self.running.add(process)

    def _variables(self, process: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for this rank only."""
        place, count = self._places[process], self.replacing.places.count
        neighbors = sum(other.node == place.node for other in self._places.values())
        # If all ranks are on one host, Gloo chooses the loopback interface, but later ranks may be on other hosts.
        local = max(1, min(max(neighbors, place.local_rank + 1), count - 1)) if self._several_nodes else count
        return {
            "RANK": str(process),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(local),
        }

    def look(self) -> dict[int, Failure]:
        """See Supervisor. Prints the ranks' output."""
        import ray

        if not (waited := [*self._streams, *self._coming]):
            time.sleep(_LOOK_S)
            return {}
        ray.wait(waited, timeout=_LOOK_S)
        ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        failures = {}
        for reference in ready:
            starts = reference in self._coming
            process = self._coming[reference][0] if starts else self._streams[reference]
            try:
                failure = self._hear(reference, process)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                what = f"could not be placed: {reason}"
                if place := self._places.get(process):
                    what = f"lost its actor on {place.address}: {reason}"
                failure = dataclasses.replace(without_error(process, 1, time.time(), self.name), what=what)
                if process in self._places and self.loses_nothing(failure):
                    self.end(process)
                    continue
            if failure is not None:
                # Before a new generation is announced: an actor that is only unreachable would meet the others in it.
                self.end(process)
                failures[process] = failure
        return failures

    def _hear(self, ready: Any, process: int) -> Failure | None:
        """Handle a rank's output line, its exit, or its actor's location. Return a failure. Raises RayError for a lost
        actor.
        """
        import ray

        if ready in self._coming:
            node, address, _ = ray.get(ready)
            del self._coming[ready]
            self._take_place(process, node, address)
            self._run(process, self.replacing.started(process))
            return None
        output = ray.get(next(ready))
        if isinstance(output, str):
            print(output, end="", flush=True)
            return None
        code, record = output
        if record:
            return Failure(**json.loads(record))
        if code:
            return without_error(process, code, time.time(), self.name)
        self._forget(process)
        self.completed.add(process)
        return None

    def hopeless(self) -> Mapping[int, Failure]:
        """Return the awaited processes for which the cluster has had no room for too long. The result is empty if the job can
        continue with fewer ranks.
        """
        last, until = self.replacing.last, time.monotonic() - self._patience_s
        if self.replacing.places.sizes is not None:
            return {}
        late = [process for process, since in self._coming.values() if since < until and process in last]
        why = f"for {self._patience_s:g} s the cluster had no room for a new process"
        return {
            process: dataclasses.replace(last[process], what=f"{last[process].what}; {why}")
            for process in late
        }


def _main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m meshcomm.job.ray", description=__doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--cpus-per-rank", type=float, default=1.0)
    parser.add_argument("--gpus-per-rank", type=float, default=0.0)
    parser.add_argument(
        "--replace",
        type=int,
        metavar="N",
        help="replace up to N lost ranks with new processes while the others continue; overrides elastic.replace, see "
        "docs/guide/elastic.md",
    )
    parser.add_argument(
        "--room-s", type=float, default=60.0, metavar="S", help="how long to wait for room in the cluster"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="train CONFIG, or run [CONFIG] SCRIPT")
    options = parser.parse_args()
    try:
        code = launch(
            options.words,
            options.world_size,
            options.cpus_per_rank,
            options.gpus_per_rank,
            options.room_s,
            options.replace,
        )
    except MeshcommError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    _main()

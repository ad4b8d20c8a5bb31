"""`meshcomm doctor`: what it finds, in which words; and who else could reach the place where ranks meet."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import meshcomm
from meshcomm.cli import app
from meshcomm.config import Config, MeshConfig, ProcessConfig, load
from meshcomm.doctor import Finding, examine, installation, limits, network, together
from meshcomm.doctor.limits import Cost, Limit
from meshcomm.doctor.network import Interface
from meshcomm.errors import ConfigError
from meshcomm.jobs.doctor import doctor as doctor_job
from meshcomm.mesh import exposure
from meshcomm.mesh.environment import Launch, find_launch
from meshcomm.mesh.exposure import ExposedRendezvous
from meshcomm.mesh.rendezvous import meet
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
MESH = {"dims": {"pp": 2, "dp": 2}, "device": "cpu", "timeout_s": 30.0}
LO, ETH = Interface("lo", True, ("127.0.0.1", "::1")), Interface("eth0", True, ("10.0.0.7",))
HERE = [LO, ETH, Interface("eth1", False, ())]

KEYS = [
    "versions", "backends", "support", "launch", "host", "devices", "gloo_group", "limits", "environment",
    "ranks", "findings",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "NCCL_SOCKET_IFNAME") or name.startswith(("GLOO_", "SLURM_")):
            monkeypatch.delenv(name)


def found(facts: dict[str, Any], what: str) -> str:
    """The text of the only finding whose first line begins so."""
    texts = [str(Finding.read(each)) for each in facts["findings"] if each["what"].startswith(what)]
    assert len(texts) == 1, [each["what"] for each in facts["findings"]]
    return texts[0]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "110"})
    return done.exit_code, done.output


# -- the whole ------------------------------------------------------------------------------------------


def test_json_has_all_keys_and_is_right_about_this_host() -> None:
    code, text = run("configs/mesh.toml", "--json")
    facts = json.loads(text)
    assert (code, list(facts)) == (0, KEYS)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["backends"]["available"]["gloo"] and "gloo" in facts["backends"]["registered"]
    assert facts["backends"]["auto"]["cpu"] == "gloo" and facts["backends"]["auto"]["cuda"] == "nccl"
    assert (facts["launch"], facts["ranks"]) == (None, None)
    assert list(facts["host"]) == ["name", "addresses", "interfaces", "lookup_s"]
    assert [each["name"] for each in facts["host"]["interfaces"]] == [n for _, n in socket.if_nameindex()]
    loopback = next(each for each in facts["host"]["interfaces"] if each["name"] == "lo")
    assert loopback["up"] is True and loopback["addresses"][0] == "127.0.0.1"
    assert all(list(each) == ["level", "what", "given", "expected", "try"] for each in facts["findings"])
    assert {each["level"] for each in facts["findings"]} <= {"ok", "warn"}
    assert [list(each) for each in facts["limits"]] == [
        ["name", "scope", "limit", "used", "needed"] for _ in facts["limits"]
    ]
    assert len(facts["support"]) == 28


def test_without_a_config_the_host_is_looked_at() -> None:
    code, text = run()
    assert code == 0
    for title in ("versions", "backends", "reductions", "host ", "limits"):
        assert f"\n{title}" in "\n" + text
    assert "\n0 errors, " in text


def test_an_error_ends_in_exit_code_1_and_its_text() -> None:
    code, text = run("configs/mesh.toml", "--set", 'network.interfaces=["loo"]')
    assert code == 1
    names = ", ".join(name for _, name in socket.if_nameindex())
    assert (
        "error: this host has no interface loo\n"
        "  given:    loo in [network] interfaces\n"
        f"  expected: one of {names}\n"
        '  try:      did you mean "lo"?'
    ) in "\n".join(line.rstrip() for line in text.splitlines())
    assert "\n1 error, " in text


def test_overrides_without_a_config_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--set has no effect without a CONFIG\n  given:    --set a=1\n"):
        doctor_job(None, ["a=1"], None, False)


def test_a_mesh_of_open_size_is_not_compared() -> None:
    facts = examine(load({"mesh": {**MESH, "dims": {"dp": -1}}}))
    assert found(facts, "limits and devices").endswith("try:      meshcomm doctor CONFIG --world N")
    assert all(each["needed"] is None for each in facts["limits"])
    facts = examine(load({"mesh": {**MESH, "dims": {"dp": -1}}}), 4)
    assert all(each["needed"] is not None for each in facts["limits"])


def test_a_wrong_environment_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert found(examine(load({"mesh": MESH})), "the environment has half").startswith("error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a host without a GPU")
def test_a_device_or_backend_that_is_not_there() -> None:
    facts = examine(load({"mesh": {**MESH, "device": "cuda"}}))
    assert found(facts, "this host has no cuda device") == (
        "error: this host has no cuda device\n"
        '  given:    device = "cuda"\n'
        "  expected: a cuda device, and a torch built for it\n"
        '  try:      mesh.device = "cpu", or "auto"'
    )
    facts = examine(load({"mesh": {**MESH, "options": {"dp": {"backend": "gloos"}}}}))
    shown = found(facts, "this torch has no backend gloos")
    assert f"given:    gloos for dp, torch {torch.__version__}" in shown
    assert shown.endswith('try:      did you mean "gloo"?')


# -- limits ---------------------------------------------------------------------------------------------


def spent(sizes: dict[str, int]) -> tuple[int, int, int, int]:
    gc.collect()  # groups that other tests left in this process
    before = limits.in_use()
    with meshcomm.init(dims=sizes, merge={"all": list(sizes)}, device="cpu", timeout_s=30) as mesh:
        for name in (*sizes, "all"):
            mesh.all_reduce(name, torch.ones(8))
            mesh.all_to_all(name, torch.ones(8))
        files, threads = (now - then for now, then in zip(limits.in_use(), before, strict=True))
        cost = limits.gloo_cost({"GLOO_SOCKET_IFNAME": "lo"})
        return (files, threads, *limits.needs(mesh.plan, mesh.device, cost))


def test_the_need_of_a_plan_is_what_a_mesh_then_uses(pool: Pool) -> None:
    for files, threads, most_files, most_threads in pool.run(spent, {"pp": 2, "dp": 2, "tp": 2}):
        assert most_threads == 17
        assert most_threads - 1 <= threads <= most_threads
        assert most_files - 4 <= files <= most_files


def test_the_cost_of_a_group_is_measured() -> None:
    assert limits.gloo_cost({"GLOO_SOCKET_IFNAME": "lo"}) == Cost(4, 3)
    with pytest.raises(RuntimeError):
        limits.gloo_cost({"GLOO_SOCKET_IFNAME": "nothing7"})
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_too_small_a_limit_is_an_error() -> None:
    small = Limit("file descriptors", "process", 1024, 20, 4000)
    enough = Limit("threads", "container", 5000, 20, 4000)
    open_end = Limit("threads", "user", None, 20, 4000)
    shown = [str(each) for each in limits.limit_findings([small, enough, open_end])]
    assert shown == [
        "error: the plan needs more file descriptors than a process may have\n"
        "  given:    20 in use, 4000 more for the plan, the limit is 1024\n"
        "  expected: a limit of at least 4020\n"
        "  try:      ulimit -n 4020, or fewer dims with groups of their own",
        "ok: enough threads of the container\n  given:    4020 at most; the limit is 5000",
        "ok: enough threads of the user\n  given:    4020 at most; no limit",
    ]


# -- environment ----------------------------------------------------------------------------------------


def test_secrets_are_hidden() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "MESHCOMM_API_KEY": "sesame",
        "TORCH_STORE_PASSWORD": "sesame",
        "SLURM_JWT_TOKEN": "sesame",
        "TORCH_LOGS_URL": "https://me:sesame@host/",
        "HOME": "sesame",
        "RANK": "3",
    }
    shown = installation.matter(env)
    assert "sesame" not in str(shown)
    assert shown == {
        "MESHCOMM_API_KEY": "(hidden)",
        "NCCL_DEBUG": "INFO",
        "RANK": "3",
        "SLURM_JWT_TOKEN": "(hidden)",
        "TORCH_LOGS_URL": "(hidden)",
        "TORCH_STORE_PASSWORD": "(hidden)",
    }


def test_slow_debugging_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert found(examine(), "TORCH_DISTRIBUTED_DEBUG").startswith("warn: ")


# -- network --------------------------------------------------------------------------------------------


def test_an_interface_set_twice_or_down_or_missing_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    down = load({"mesh": MESH, "network": {"interfaces": ["eth1"]}})
    shown = [str(each) for each in network.interface_findings(down, HERE, dict(os.environ))]
    assert shown[0].startswith("error: GLOO_SOCKET_IFNAME is set twice, differently\n")
    assert shown[1] == (
        "error: interface eth1 cannot carry anything\n"
        "  given:    eth1 in [network] interfaces: down\n"
        "  expected: an interface that is up and has an address\n"
        "  try:      one of lo, eth0"
    )
    shown = [str(each) for each in network.interface_findings(load({"mesh": MESH}), HERE, dict(os.environ))]
    assert shown[0].startswith(
        "error: this host has no interface eth7\n  given:    eth7 in GLOO_SOCKET_IFNAME"
    )


def test_a_host_name_that_means_the_loopback() -> None:
    def judged(addresses: list[str], one_host: bool, told: bool) -> list[str]:
        return [str(network.name_finding("node7", addresses, HERE, one_host, told))]

    assert judged(["127.0.1.1"], False, False) == [
        "warn: this host's name node7 means the loopback\n"
        "  given:    node7 -> 127.0.1.1\n"
        "  expected: an address that the other hosts reach\n"
        '  try:      network.interfaces = ["eth0"]'
    ]
    assert [text[:4] for text in judged(["127.0.1.1"], True, False)] == ["ok: "]
    assert [text[:4] for text in judged(["127.0.1.1"], False, True)] == ["ok: "]
    assert judged([], False, False)[0].startswith("warn: this host's name node7 has no address\n")
    assert judged(["10.0.0.7"], False, False) == [
        "ok: this host's name node7 has an address\n  given:    10.0.0.7"
    ]


def test_a_slow_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.lookup_finding(0.02).level == "ok"
    assert str(network.lookup_finding(5.01)) == (
        "warn: the name server is slow to say who 127.0.0.1 is\n"
        "  given:    5.0 s\n"
        "  expected: at most 1 s: torch's TCPStore asks for each process that connects\n"
        '  try:      export RES_OPTIONS="timeout:1 attempts:1", or 127.0.0.1 in /etc/hosts'
    )
    asked: list[str] = []

    def look(address: str) -> None:
        asked.append(address)
        raise OSError("nobody knows")

    assert network.lookup_s(look) < 1
    assert asked == ["127.0.0.1", "::ffff:127.0.0.1"]


def test_what_gloo_will_choose() -> None:
    assert network.chosen(HERE, {"GLOO_SOCKET_IFNAME": "eth0,lo"}, True, "x") == ("eth0", "10.0.0.7")
    assert network.chosen(HERE, {"GLOO_SOCKET_IFNAME": "eth9"}, True, "x") == ("eth9", "none")
    assert network.chosen(HERE, {}, True, "x") == ("lo", "127.0.0.1")
    assert network.chosen(HERE, {}, False, "10.0.0.7") == ("eth0", "10.0.0.7")
    assert network.chosen(HERE, {}, False, "127.0.0.1") == ("lo", "127.0.0.1")


def test_the_meeting_place_by_tcp() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        taken = ProcessConfig(init="tcp", address=f"127.0.0.1:{port}")
        shown = [str(each) for each in network.process_findings(taken, HERE, True)]
        assert len(shown) == 1
        assert shown[0].startswith(
            f"error: rank 0 could not listen on port {port} of 127.0.0.1\n"
            "  given:    Address already in use\n"
            "  expected: a free port\n"
            '  try:      process.address = "127.0.0.1:'
        )
    assert [str(each) for each in network.process_findings(taken, HERE, True)] == [
        f"ok: port {port} of 127.0.0.1 is free"
    ]
    elsewhere = ProcessConfig(init="tcp", address="10.9.9.9:29500")
    levels = [(each.level, each.what) for each in network.process_findings(elsewhere, HERE, True)]
    assert levels == [
        ("warn", "others can reach the job's store at 10.9.9.9:29500"),
        ("ok", "rank 0 listens at 10.9.9.9:29500, on another host"),
    ]


def test_the_meeting_place_by_file(tmp_path: Path) -> None:
    def judged(path: Path) -> list[str]:
        place = ProcessConfig(init="file", path=str(path))
        return [str(each) for each in network.process_findings(place, HERE, True)]

    file = tmp_path / "meet"
    assert judged(file) == [f"ok: the rendezvous file {file} can be made"]
    assert judged(tmp_path / "no" / "meet")[0].startswith(
        f"error: the rendezvous file {tmp_path / 'no' / 'meet'} cannot be made\n"
        f"  given:    the folder {tmp_path / 'no'}, which does not exist\n"
    )
    file.write_text("old")
    assert judged(file)[0].startswith(
        f"warn: the rendezvous file {file} is there already\n  given:    3 bytes"
    )


# -- inside a launcher ----------------------------------------------------------------------------------


def as_job() -> tuple[dict[str, Any] | None, int]:
    return together.examine_together(Config(mesh=MeshConfig(**MESH)), find_launch(os.environ), 30)


def test_every_rank_says_where_it_is(pool: Pool) -> None:
    (facts, code), *others = pool.run(as_job, ranks=4)
    assert others == [(None, code)] * 3
    assert code == 0
    assert facts is not None and list(facts) == KEYS
    assert [(row["rank"], row["coords"], row["address"]) for row in facts["ranks"]] == [
        (rank, {"pp": rank // 2, "dp": rank % 2}, "127.0.0.1") for rank in range(4)
    ]
    assert {row["host"] for row in facts["ranks"]} == {socket.gethostname()}
    assert found(facts, "every rank has an address").endswith("given:    4 on one host")


def row(rank: int, host: str, address: str, device: str = "cpu", torch_version: str = "2") -> dict[str, Any]:
    return {
        "rank": rank,
        "host": host,
        "address": address,
        "device": device,
        "versions": {"meshcomm": "1", "python": "3", "torch": torch_version},
        "hint": 'network.interfaces = ["eth0"]',
    }


def test_the_loopback_is_refused_where_hosts_differ() -> None:
    rows = [
        row(0, "a", "10.0.0.1"),
        row(1, "a", "10.0.0.1"),
        row(2, "b", "127.0.0.1"),
        row(3, "b", "127.0.0.1"),
    ]
    shown = [str(each) for each in together.judge(rows)]
    assert shown == [
        "error: ranks 2 3 would be reached at the loopback, from other hosts\n"
        "  given:    a: ranks 0 1 at 10.0.0.1\n"
        "            b: ranks 2 3 at 127.0.0.1\n"
        "  expected: addresses that all 2 hosts reach\n"
        '  try:      network.interfaces = ["eth0"], or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME'
    ]
    good = [row(0, "a", "10.0.0.1"), row(1, "b", "10.0.0.2")]
    assert [str(each) for each in together.judge(good)] == [
        "ok: every rank has an address for the others\n  given:    2 on 2 hosts"
    ]


def test_one_device_twice_and_two_versions() -> None:
    rows = [row(0, "a", "10.0.0.1", "cuda:0"), row(1, "a", "10.0.0.1", "cuda:0", "2.1")]
    shown = [str(each) for each in together.judge(rows)]
    assert shown[1].startswith("error: ranks 0 1 are on one device, cuda:0 of a\n")
    assert shown[2].startswith(
        "error: ranks have different versions of torch\n  given:    rank 0: 2; rank 1: 2.1\n"
    )
    apart = [row(0, "a", "10.0.0.1", "cuda:0"), row(1, "a", "10.0.0.1", "cuda:1")]
    assert [each.level for each in together.judge(apart)] == ["ok"]


def test_two_hosts_with_loopback_names_are_refused_by_all(pool: Pool) -> None:
    results = pool.run(as_two_hosts, ranks=4)
    facts = results[0][0]
    assert [code for _, code in results] == [1] * 4
    assert [row["host"] for row in facts["ranks"]] == ["here", "here", "there", "there"]
    assert found(facts, "ranks 0 1 2 3 would be reached at the loopback").startswith("error: ")


def as_two_hosts() -> tuple[dict[str, Any] | None, int]:
    rank = int(os.environ["RANK"])
    usual = socket.gethostname, network.resolve
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    socket.gethostname = lambda: "here" if rank < 2 else "there"
    network.resolve = lambda host: ["127.0.1.1"]
    try:
        return together.examine_together(Config(mesh=MeshConfig(**MESH)), find_launch(os.environ), 30)
    finally:
        socket.gethostname, network.resolve = usual


def test_torchrun_prints_one_table(pool: Pool, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshcomm", "doctor", "--json"]  # fmt: skip
    code, out, err = Job(pool, tmp_path, *command, env={"OMP_NUM_THREADS": "1"}).finish()
    assert code == 0, err
    facts = json.loads(out)
    assert [each["rank"] for each in facts["ranks"]] == [0, 1]
    assert facts["launch"]["kind"] == "torchrun"
    # The store of torchrun's agent listens on every address, whatever it was told.
    shown = found(facts, "others can reach the job's store at localhost:")
    assert shown.startswith("warn: ")
    assert f"; it listens on {everywhere()}\n" in shown


# -- who else could come ---------------------------------------------------------------------------------


def test_torchs_store_listens_everywhere_and_ours_on_the_loopback() -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert exposure.listening(theirs.port) in (["::"], ["0.0.0.0"])
    port = free_port()
    ours = exposure.serve_on_loopback("127.0.0.1", port, timedelta(seconds=10))
    assert ours is not None and exposure.listening(port) == ["127.0.0.1"]
    assert exposure.exposed_store("127.0.0.1", port, "x", 2) is None
    # Taken, or no loopback: torch decides.
    assert exposure.serve_on_loopback("127.0.0.1", port, timedelta(seconds=10)) is None
    assert exposure.serve_on_loopback("10.0.0.7", port, timedelta(seconds=10)) is None


def test_a_job_by_tcp_on_one_host_is_not_reachable_and_warns_of_nothing() -> None:
    port = free_port()
    place = ProcessConfig(init="tcp", address=f"127.0.0.1:{port}", rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = meet(place, Launch("single", 0, 1, 0, 1), 20)
    assert exposure.listening(port) == ["127.0.0.1"]
    joined.store.set("key", "value")
    assert joined.store.get("key") == b"value"


def everywhere() -> str:
    """The address at which torch's store listens; another one where this system has no IPv6."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (found,) = exposure.listening(store.port) or []
    return found


def own_name() -> str:
    """The name of this host, if it leads anywhere."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        pytest.skip(f"the name of this host, {name}, leads nowhere: {error}")
    return name


def test_a_store_that_others_reach_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    name = own_name()
    port = free_port()
    place = ProcessConfig(init="tcp", address=f"{name}:{port}", rank=0, world_size=1)
    with pytest.warns(ExposedRendezvous) as caught:
        joined = meet(place, Launch("single", 0, 1, 0, 1), 20)
    assert [str(each.message) for each in caught] == [
        f"others can reach the job's store at {name}:{port}, though all its ranks are on this host: "
        f'process.address = "127.0.0.1:{port}", or see meshcomm doctor'
    ]
    # The doctor says all of it.
    assert str(exposure.exposed_store(name, port, "MASTER_ADDR=127.0.0.1", 1)) == (
        f"others can reach the job's store at {name}:{port}, though its one rank is on this host\n"
        f"  given:    {name}:{port}; it listens on {everywhere()}\n"
        "  expected: an address that only this host reaches, 127.0.0.1: torch's TCPStore has no authentication,\n"
        "            who reaches it can read and change all that the ranks tell each other\n"
        "  try:      MASTER_ADDR=127.0.0.1"
    )
    del joined


def test_a_job_on_several_hosts_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = ProcessConfig(init="tcp", address=f"{own_name()}:{free_port()}", rank=0, world_size=1)
    # One process here, of how many more elsewhere nobody says.
    meet(place, Launch("torchrun", 0, 1, 0, 2), 20)


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o1777, False), (0o755, False), (0o775, False)])
def test_a_rendezvous_file_that_all_can_replace(tmp_path: Path, mode: int, warned: bool) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    place = ProcessConfig(init="file", path=str(folder / "meet"), rank=0, world_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meet(place, Launch("single", 0, 1, 0, 1), 20)
    texts = [str(each.message) for each in caught if each.category is ExposedRendezvous]
    assert texts == (
        [
            f"everybody can replace the rendezvous file {folder}/meet\n"
            f"  given:    the folder {folder} with mode 0777\n"
            "  expected: a folder that others cannot write, or a sticky one as /tmp is\n"
            f"  try:      chmod o-w {folder}, or another process.path"
        ]
        if warned
        else []
    )

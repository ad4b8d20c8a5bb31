"""`meshcomm doctor`: its findings and their words, and its warnings about a rendezvous that others can reach."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.config import Config, MeshConfig, NetworkConfig, ProcessConfig, load_config
from meshcomm.doctor import Finding, examine, host, together
from meshcomm.doctor.host import Interface, Limit
from meshcomm.predict.lint import GLOO_DESCRIPTORS, footprint
from meshcomm.rendezvous import exposure
from meshcomm.rendezvous.exposure import ExposedRendezvous
from meshcomm.rendezvous.launcher import Launch, find_launch
from meshcomm.rendezvous.meeting import meet
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
MESH = {"dims": {"pp": 2, "dp": 2}, "device": "cpu", "timeout_s": 30.0}
LO, ETH = Interface("lo", True, ("127.0.0.1", "::1")), Interface("eth0", True, ("10.0.0.7",))
HERE = [LO, ETH, Interface("eth1", False, ())]

KEYS = ["findings", "versions", "host", "interfaces", "limits", "launch", "ranks"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "NCCL_SOCKET_IFNAME") or name.startswith(("GLOO_", "SLURM_")):
            monkeypatch.delenv(name)


def found(facts: dict[str, Any], what: str) -> str:
    """The text of the finding whose first line begins with `what`. There must be only one."""
    texts = [str(Finding.read(each)) for each in facts["findings"] if each["what"].startswith(what)]
    assert len(texts) == 1, [each["what"] for each in facts["findings"]]
    return texts[0]


def run(*arguments: str, columns: int = 110) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": str(columns)})
    return done.exit_code, done.output


# -- the whole ------------------------------------------------------------------------------------------


def test_json_has_all_keys_and_is_right_about_this_host() -> None:
    code, text = run("configs/mesh.toml", "--json")
    facts = json.loads(text)
    assert (code, list(facts)) == (0, KEYS)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"gloo"} <= set(facts["versions"]["backends"].split()) <= set(dist.Backend.backend_list)
    assert (facts["launch"], facts["ranks"]) == (None, None)
    assert list(facts["host"]) == ["name", "addresses", "cuda", "cores"]
    assert [each["name"] for each in facts["interfaces"]] == [n for _, n in socket.if_nameindex()]
    loopback = next(each for each in facts["interfaces"] if each["name"] == "lo")
    assert loopback["up"] is True and loopback["addresses"][0] == "127.0.0.1"
    assert all(list(each) == ["level", "what", "given", "expected", "try"] for each in facts["findings"])
    assert {each["level"] for each in facts["findings"]} <= {"warn"}
    assert [list(each) for each in facts["limits"]] == [["name", "limit", "used", "needed"]]


def test_a_person_is_shown_findings_and_with_all_the_facts_and_the_exit_code_says_the_worst() -> None:
    titles = ("versions", "host", "interfaces", "limits")
    code, text = run()
    assert code == 0 and text.startswith("0 errors, ") and not any(f"\n{title}\n" in text for title in titles)
    wrong = ("configs/mesh.toml", "--set", 'network.interfaces=["loo"]')
    code, text = run(*wrong)
    assert code == 1 and text.startswith("1 error, ") and text.splitlines()[1].startswith("error: ")
    code, everything = run(*wrong, "--all")
    assert code == 1 and [line.rstrip() for line in everything.splitlines()][: len(text.splitlines())] == [
        line.rstrip() for line in text.splitlines()
    ]
    assert [line for line in everything.splitlines() if line in titles] == [*titles]
    assert (
        f"\n  python {sys.version.split()[0]}" in everything and "name file descriptors, limit " in everything
    )
    assert "name lo, up yes, addresses 127.0.0.1" in everything
    assert "None" not in everything and "True" not in everything
    for columns in (80, 40):
        narrow = run("configs/mesh.toml", "--all", columns=columns)[1]
        assert max(map(len, narrow.splitlines())) <= columns and "…" not in narrow
    names = ", ".join(name for _, name in socket.if_nameindex())
    assert (
        "error: this host has no interface loo\n"
        "  given:    loo in [network] interfaces\n"
        f"  expected: one of {names}\n"
        '  try:      did you mean "lo"?'
    ) in "\n".join(line.rstrip() for line in text.splitlines())


def test_overrides_without_a_config_are_refused() -> None:
    code, text = run("--set", "a=1")
    assert code == 2 and text.startswith("--set has no effect without a CONFIG\n  given:    --set a=1\n")


def test_a_mesh_of_open_size_is_not_compared() -> None:
    facts = examine(load_config({"mesh": {**MESH, "dims": {"dp": -1}}}))
    shown = found(facts, "limits and devices")
    assert shown.startswith("warn: ") and shown.endswith("try:      meshcomm doctor CONFIG --world-size N")
    assert all(all(each.values()) for each in facts["findings"] if "its size is open" in each["what"])
    assert all(each["needed"] is None for each in facts["limits"])
    facts = examine(load_config({"mesh": {**MESH, "dims": {"dp": -1}}}), 4)
    assert all(each["needed"] is not None for each in facts["limits"])


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RANK", "1", "error: the environment has only some"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn: TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_a_wrong_environment_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, what: str
) -> None:
    monkeypatch.setenv(name, value)
    assert found(examine(load_config({"mesh": MESH})), what.partition(": ")[2]).startswith(what)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a host without a GPU")
def test_a_device_or_backend_that_is_not_there() -> None:
    shown = found(examine(load_config({"mesh": {**MESH, "device": "cuda"}})), "this host has no cuda device")
    assert shown.startswith("error: ") and 'given:    device = "cuda"\n' in shown
    assert shown.endswith('try:      mesh.device = "cpu", or "auto"')
    facts = examine(load_config({"mesh": {**MESH, "options": {"dp": {"backend": "gloos"}}}}))
    shown = found(facts, "this installation of torch has no backend gloos")
    assert f"given:    gloos for dp, torch {torch.__version__}" in shown
    assert shown.endswith('try:      mesh.options.dp.backend = "gloo"')
    cores = facts["host"]["cores"]
    shared = [each["given"] for each in facts["findings"] if each["what"] == "ranks share cores"]
    assert shared == ([f"4 ranks on {cores} core{'' if cores == 1 else 's'}"] if cores < 4 else [])


# -- limits ---------------------------------------------------------------------------------------------


def spent(sizes: dict[str, int]) -> tuple[int, int]:
    gc.collect()  # other tests left groups in this process
    before = host.descriptors(None).used
    with meshcomm.init(dims=sizes, merge={"all": list(sizes)}, device="cpu", timeout_s=30) as mesh:
        for name in (*sizes, "all"):
            mesh.all_reduce(name, torch.ones(8))
            mesh.all_to_all(name, torch.ones(8))
        used = host.descriptors(None).used - before
        settings = load_config({"mesh": {"dims": sizes, "merge": {"all": list(sizes)}, "device": "cpu"}})
        return used, footprint(settings, mesh.plan, mesh.world_size).descriptors


def test_the_need_of_a_plan_is_what_a_mesh_then_uses(pool: Pool) -> None:
    for files, most in pool.run(spent, {"pp": 2, "dp": 2, "tp": 2}):
        assert most - 4 <= files <= most


def test_the_cost_of_a_group_is_what_gloo_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # The first group may also use descriptors that all groups share.
    groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))]
    before = host.descriptors(None).used
    groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10)))
    assert host.descriptors(None).used - before == GLOO_DESCRIPTORS


def test_too_small_a_limit_is_an_error() -> None:
    small = Limit(1024, 20, 4000)
    assert lines(host.limit_findings(small)) == [
        "error | the plan needs more file descriptors than a process may open"
        " | 20 in use, 4000 more for the plan, the limit is 1024"
        " | ulimit -n 4020, or fewer dims with separate groups",
    ]
    for enough in ({"limit": 5000}, {"limit": None}, {"needed": None}):
        assert lines(host.limit_findings(small._replace(**enough))) == []  # type: ignore[arg-type]


# -- network --------------------------------------------------------------------------------------------


def lines(findings: Iterable[Finding]) -> list[str]:
    """The level, the text, the given value and the hint of each finding."""
    return [" | ".join(filter(None, (one.level, one.what, one.given, one.hint))) for one in findings]


def test_an_interface_set_twice_or_down_or_missing_in_the_environment() -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        down = load_config({"mesh": MESH, "network": {"interfaces": ["eth1"]}})
        twice, cannot = lines(host.interface_findings(down.network, HERE, env))
    assert twice.startswith("error | GLOO_SOCKET_IFNAME is set twice, to different values")
    assert cannot == (
        "error | interface eth1 cannot carry traffic | eth1 in [network] interfaces: down | one of lo, eth0"
    )
    (missing,) = lines(host.interface_findings(NetworkConfig(), HERE, env))
    assert missing.startswith("error | this host has no interface eth7 | eth7 in GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.1.1"], ['warn | this host\'s name n is the loopback address | n -> 127.0.1.1 | network.interfaces = ["eth0"]']),
        ([], ['warn | this host\'s name n has no address | n: unknown to the resolver | network.interfaces = ["eth0"]']),
        (["10.0.0.7"], []),
    ],
)  # fmt: skip
def test_whether_others_find_this_host_by_its_name(addresses: list[str], expected: list[str]) -> None:
    assert lines(host.name_findings("n", addresses, HERE)) == expected


def test_a_name_matters_to_several_hosts_that_are_given_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "resolve", lambda host: ["127.0.1.1"])

    def warned(**settings: Any) -> bool:
        facts = examine(load_config({"mesh": MESH, **settings}))
        return any("is the loopback address" in each["what"] for each in facts["findings"])

    nodes = {"topology": {"ranks_per_node": 2}}
    assert warned(**nodes) and not warned() and not warned(**nodes, network={"interfaces": ["lo"]})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert not warned(**nodes)


def test_a_slow_name_server() -> None:
    assert lines(host.lookup_findings(0.02)) == []
    (slow,) = lines(host.lookup_findings(5.01))
    assert slow.startswith("warn | the name server is slow to look up 127.0.0.1 | 5.0 s | export RES_OPTIONS")
    asked: list[str] = []

    def look(address: str) -> None:
        asked.append(address)
        raise OSError("nobody knows")

    assert host.lookup_s(look) < 1
    assert asked == ["127.0.0.1", "::ffff:127.0.0.1"]


@pytest.mark.parametrize(
    ("env", "one_host", "name", "expected"),
    [
        ("eth0,lo", True, "x", ("eth0", "10.0.0.7")),
        ("eth9", True, "x", ("eth9", "none")),
        ("", True, "x", ("lo", "127.0.0.1")),
        ("", False, "10.0.0.7", ("eth0", "10.0.0.7")),
        ("", False, "127.0.0.1", ("lo", "127.0.0.1")),
        ("", False, "127.0.1.1", (None, "127.0.1.1")),
        ("", False, "10.9.9.9", (None, "127.0.0.1")),
    ],
)
def test_what_gloo_will_choose(env: str, one_host: bool, name: str, expected: tuple[str | None, str]) -> None:
    assert host.chosen(HERE, {"GLOO_SOCKET_IFNAME": env}, one_host, name) == expected


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


def judged(*rows: tuple[str, str, str], config: Config | None = None) -> list[str]:
    """Findings about ranks with these hosts, addresses and versions of torch."""
    common = {"meshcomm": "1", "python": "3", "hint": 'network.interfaces = ["eth0"]'}
    return lines(
        together.judge(
            [
                {"rank": rank, "host": host, "address": address, "torch": version, **common}
                for rank, (host, address, version) in enumerate(rows)
            ],
            config,
        )
    )


def test_ranks_that_cannot_talk_with_each_other() -> None:
    a, b, lost = ("a", "10.0.0.1", "2"), ("b", "10.0.0.2", "2"), ("b", "127.0.0.1", "2")
    (cyclic,) = judged(a, b, a, b)
    assert cyclic.startswith(
        "warn | ranks of one host are not consecutive: the last dims cross the network | a: ranks 0 2; b: "
    )
    mesh = {"mesh": {"dims": {"dp": 2, "tp": 2}}}
    (of_mesh,) = judged(a, b, a, b, config=load_config(mesh))
    assert of_mesh.startswith(
        "warn | tp crosses nodes, because the ranks of a node are not consecutive | a: ranks 0 2; b: "
    )
    assert of_mesh.endswith("or mesh.rank_order = [0, 2, 1, 3]")
    assert judged(a, b, a, b, config=load_config(mesh, ["mesh.rank_order = [0, 2, 1, 3]"])) == []
    assert judged(a, b) == judged(a, a, b, b) == judged(lost, lost) == []
    assert judged(a, a, lost, lost) == [
        "error | other hosts would connect to ranks 2 3 at the loopback address"
        " | a: ranks 0 1 at 10.0.0.1\nb: ranks 2 3 at 127.0.0.1"
        ' | network.interfaces = ["eth0"], or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME'
    ]
    (versions,) = judged(a, ("a", "10.0.0.1", "2.1"))
    assert versions.startswith("error | ranks have different versions of torch | rank 0: 2; rank 1: 2.1 | ")


def test_two_hosts_with_loopback_names_are_refused_by_all(pool: Pool) -> None:
    results = pool.run(as_two_hosts, ranks=4)
    facts = results[0][0]
    assert [code for _, code in results] == [1] * 4
    assert [row["host"] for row in facts["ranks"]] == ["here", "here", "there", "there"]
    assert found(facts, "other hosts would connect to ranks 0 1 2 3 at the loopback").startswith("error: ")


def as_two_hosts() -> tuple[dict[str, Any] | None, int]:
    rank = int(os.environ["RANK"])
    usual = socket.gethostname, host.resolve
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    socket.gethostname = lambda: "here" if rank < 2 else "there"
    host.resolve = lambda host: ["127.0.1.1"]
    try:
        return together.examine_together(Config(mesh=MeshConfig(**MESH)), find_launch(os.environ), 30)
    finally:
        socket.gethostname, host.resolve = usual


def test_torchrun_prints_one_table(pool: Pool, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshcomm", "doctor", "--json"]  # fmt: skip
    code, out, err = Job(pool, tmp_path, *command, env={"OMP_NUM_THREADS": "1"}).finish()
    assert code == 0, err
    facts = json.loads(out)
    assert [each["rank"] for each in facts["ranks"]] == [0, 1]
    assert facts["launch"]["kind"] == "torchrun"
    # The store of torchrun's agent listens on every address, whatever its settings.
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
    # If the port is taken or the address is not the loopback, torch decides.
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
    """The address at which torch's store listens. It depends on whether this system has IPv6."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (found,) = exposure.listening(store.port) or []
    return found


def own_name() -> str:
    """The name of this host. Skips the test if the name does not resolve."""
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
    # The doctor prints the whole finding.
    assert str(exposure.exposed_store(name, port, "MASTER_ADDR=127.0.0.1", 1)) == (
        f"others can reach the job's store at {name}:{port}, though its one rank is on this host\n"
        f"  given:    {name}:{port}; it listens on {everywhere()}\n"
        "  expected: an address that only this host can reach, 127.0.0.1: torch's TCPStore has no authentication,\n"
        "            so anyone who reaches it can read and change everything that the ranks exchange\n"
        "  try:      MASTER_ADDR=127.0.0.1"
    )
    del joined


def test_a_job_on_several_hosts_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = ProcessConfig(init="tcp", address=f"{own_name()}:{free_port()}", rank=0, world_size=1)
    # One process runs here, and the number on other hosts is unknown.
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
            f"any user can replace the rendezvous file {folder}/meet\n"
            f"  given:    the folder {folder} with mode 0777\n"
            "  expected: a folder that others cannot write to, or one with the sticky bit, like /tmp\n"
            f"  try:      chmod o-w {folder}, or another process.path"
        ]
        if warned
        else []
    )

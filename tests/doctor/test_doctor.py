"""`meshcomm doctor`: what it finds, in which words; and who else could reach the place where ranks meet."""

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


def test_a_person_is_shown_tables_and_findings_and_the_exit_code_says_the_worst() -> None:
    code, text = run()
    assert code == 0 and text.startswith("0 errors, ")
    for title in ("versions", "backends", "reductions", "host ", "limits"):
        assert f"\n{title}" in "\n" + text
    code, text = run("configs/mesh.toml", "--set", 'network.interfaces=["loo"]')
    # Findings come first, the worst first; then the facts.
    assert code == 1 and text.startswith("1 error, ") and text.splitlines()[1].startswith("error: ")
    assert text.index("error: ") < text.index("\nok: ") < text.index("\nversions")
    for columns in (80, 40):
        narrow = run("configs/mesh.toml", columns=columns)[1]
        assert max(map(len, narrow.splitlines())) <= columns and "…" not in narrow
    names = ", ".join(name for _, name in socket.if_nameindex())
    assert (
        "error: this host has no interface loo\n"
        "  given:    loo in [network] interfaces\n"
        f"  expected: one of {names}\n"
        '  try:      did you mean "lo"?'
    ) in "\n".join(line.rstrip() for line in text.splitlines())


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
    shown = found(examine(load({"mesh": {**MESH, "device": "cuda"}})), "this host has no cuda device")
    assert shown.startswith("error: ") and 'given:    device = "cuda"\n' in shown
    assert shown.endswith('try:      mesh.device = "cpu", or "auto"')
    facts = examine(load({"mesh": {**MESH, "options": {"dp": {"backend": "gloos"}}}}))
    shown = found(facts, "this torch has no backend gloos")
    assert f"given:    gloos for dp, torch {torch.__version__}" in shown
    assert shown.endswith('try:      mesh.options.dp.backend = "gloo"')
    shared = [
        each for each in facts["findings"] if each["what"] in ("ranks share cores", "a core for each rank")
    ]
    cores = facts["devices"]["cpus"]
    assert [each["level"] for each in shared] == ["warn" if cores < 4 else "ok"]
    assert shared[0]["given"].startswith(f"4 ranks on {cores} core")


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
    assert lines(limits.limit_findings([small, enough, open_end, enough._replace(needed=None)])) == [
        "error | the plan needs more file descriptors than a process may have"
        " | 20 in use, 4000 more for the plan, the limit is 1024"
        " | ulimit -n 4020, or fewer dims with groups of their own",
        "ok | enough threads of the container | 4020 at most; the limit is 5000",
        "ok | enough threads of the user | 4020 at most; no limit",
    ]


# -- environment ----------------------------------------------------------------------------------------


def test_secrets_are_hidden() -> None:
    secrets = ("MESHCOMM_API_KEY", "SLURM_JWT_TOKEN", "TORCH_STORE_PASSWORD")
    env = {"NCCL_DEBUG": "INFO", "HOME": "sesame", "RANK": "3", **dict.fromkeys(secrets, "sesame")}
    env["TORCH_LOGS_URL"] = "https://me:sesame@host/"
    hidden = dict.fromkeys((*secrets, "TORCH_LOGS_URL"), "(hidden)")
    assert installation.matter(env) == {"NCCL_DEBUG": "INFO", "RANK": "3", **hidden}


def test_slow_debugging_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert found(examine(), "TORCH_DISTRIBUTED_DEBUG").startswith("warn: ")


# -- network --------------------------------------------------------------------------------------------


def lines(findings: Iterable[Finding] | Finding) -> list[str]:
    """Level, key and try of each."""
    each = [findings] if isinstance(findings, Finding) else findings
    return [" | ".join(filter(None, (one.level, one.what, one.given, one.hint))) for one in each]


def test_an_interface_set_twice_or_down_or_missing_in_the_environment() -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        down = load({"mesh": MESH, "network": {"interfaces": ["eth1"]}})
        twice, cannot = lines(network.interface_findings(down, HERE, env))
    assert twice.startswith("error | GLOO_SOCKET_IFNAME is set twice, differently")
    assert cannot == (
        "error | interface eth1 cannot carry anything | eth1 in [network] interfaces: down | one of lo, eth0"
    )
    (missing,) = lines(network.interface_findings(load({"mesh": MESH}), HERE, env))
    assert missing.startswith("error | this host has no interface eth7 | eth7 in GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("addresses", "one_host", "told", "expected"),
    [
        (["127.0.1.1"], False, False, 'warn | this host\'s name n means the loopback | n -> 127.0.1.1 | network.interfaces = ["eth0"]'),
        ([], False, False, 'warn | this host\'s name n has no address | n: unknown to the resolver | network.interfaces = ["eth0"]'),
        (["127.0.1.1"], True, False, "ok | this host's name n means the loopback | n -> 127.0.1.1; one host needs none"),
        (["127.0.1.1"], False, True, "ok | this host's name n means the loopback | n -> 127.0.1.1; the interface is given"),
        (["10.0.0.7"], False, False, "ok | this host's name n has an address | 10.0.0.7"),
    ],
)  # fmt: skip
def test_whether_others_find_this_host_by_its_name(
    addresses: list[str], one_host: bool, told: bool, expected: str
) -> None:
    assert lines(network.name_finding("n", addresses, HERE, one_host, told)) == [expected]


def test_a_slow_name_server() -> None:
    assert network.lookup_finding(0.02).level == "ok"
    (slow,) = lines(network.lookup_finding(5.01))
    assert slow.startswith(
        "warn | the name server is slow to say who 127.0.0.1 is | 5.0 s | export RES_OPTIONS"
    )
    asked: list[str] = []

    def look(address: str) -> None:
        asked.append(address)
        raise OSError("nobody knows")

    assert network.lookup_s(look) < 1
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
    assert network.chosen(HERE, {"GLOO_SOCKET_IFNAME": env}, one_host, name) == expected


def test_the_meeting_place_by_tcp() -> None:
    def judged(address: str) -> list[str]:
        return lines(network.process_findings(ProcessConfig(init="tcp", address=address), HERE, True))

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        (taken,) = judged(f"127.0.0.1:{port}")
        assert taken.startswith(
            f"error | rank 0 could not listen on port {port} of 127.0.0.1 | Address already in use"
            ' | process.address = "127.0.0.1:'
        )
        assert f'127.0.0.1:{port}"' not in taken
    assert judged(f"127.0.0.1:{port}") == [f"ok | port {port} of 127.0.0.1 is free"]
    reachable, elsewhere = judged("10.9.9.9:29500")
    assert reachable.startswith("warn | others can reach the job's store at 10.9.9.9:29500 | ")
    assert elsewhere.startswith("ok | rank 0 listens at 10.9.9.9:29500, on another host")


def test_the_meeting_place_by_file(tmp_path: Path) -> None:
    def judged(path: Path) -> list[str]:
        return lines(network.process_findings(ProcessConfig(init="file", path=str(path)), HERE, True))

    file, nowhere = tmp_path / "meet", tmp_path / "no" / "meet"
    assert judged(file) == [f"ok | the rendezvous file {file} can be made"]
    assert judged(nowhere) == [
        f"error | the rendezvous file {nowhere} cannot be made | the folder {nowhere.parent}, which does not exist"
        " | another process.path"
    ]
    file.write_text("old")
    assert judged(file) == [
        f"warn | the rendezvous file {file} is there already | 3 bytes, perhaps of an earlier job"
        f" | rm {file}, unless a job is using it"
    ]
    tmp_path.chmod(0o777)
    assert [each[:4] for each in judged(file)] == ["warn", "warn"]
    file.unlink()
    assert [each[:4] for each in judged(file)] == ["warn"]


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


def judged(*rows: tuple[str, str, str, str]) -> list[str]:
    """Rows of host, address, device and version of torch."""
    return lines(
        together.judge(
            [
                {
                    "rank": rank,
                    "host": host,
                    "address": address,
                    "device": device,
                    "versions": {"meshcomm": "1", "python": "3", "torch": version},
                    "hint": 'network.interfaces = ["eth0"]',
                }
                for rank, (host, address, device, version) in enumerate(rows)
            ]
        )
    )


def test_ranks_that_cannot_talk_with_each_other() -> None:
    a, b = ("a", "10.0.0.1", "cpu", "2"), ("b", "10.0.0.2", "cpu", "2")
    lost = ("b", "127.0.0.1", "cpu", "2")
    cyclic = judged(a, b, a, b)[1]
    assert cyclic.startswith(
        "warn | ranks of one host are not neighbours: the last dims cross the network | a: ranks 0 2; b: "
    )
    assert judged(a, b) == ["ok | every rank has an address for the others | 2 on 2 hosts"]
    assert judged(a, a, lost, lost) == [
        "error | ranks 2 3 would be reached at the loopback, from other hosts"
        " | a: ranks 0 1 at 10.0.0.1\nb: ranks 2 3 at 127.0.0.1"
        ' | network.interfaces = ["eth0"], or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME'
    ]
    cuda = [
        ("a", "10.0.0.1", f"cuda:{index}", version) for index, version in ((0, "2"), (0, "2.1"), (1, "2"))
    ]
    _, shared, versions = judged(*cuda[:2])
    assert shared.startswith("error | ranks 0 1 are on one device, cuda:0 of a | cuda:0: ranks 0 1 | ")
    assert versions.startswith("error | ranks have different versions of torch | rank 0: 2; rank 1: 2.1 | ")
    assert [line[:2] for line in judged(cuda[0], cuda[2])] == ["ok"]


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

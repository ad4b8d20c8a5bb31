"""Two jobs meet by an address: whichever comes first, after losses and restarts, and never with what a dead job has left."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshcomm.errors import LaunchError, TransferFailed, TransferTimeout
from meshcomm.layout import Layout
from meshcomm.rendezvous.processes import process_of_rank
from meshcomm.testing import Pool
from meshcomm.transfer.meeting import meet
from meshcomm.transfer.presence import Job, Presence
from meshcomm.transfer.sides import BOTH, SideName, Sides
from tests.ports import free_port
from tests.two_jobs import OPENS_S, Place, client, error_of, run, served, values

pytestmark = pytest.mark.long

SOURCE: dict[str, Any] = {"dims": {"fsdp": 2, "tp": 1}, "merge": {"all": ("fsdp", "tp")}}
TARGET: dict[str, Any] = {"dims": {"tp": 2}, "rank_order": (1, 0)}


def adds_up(meeting: Sides, size: int) -> None:
    x = torch.tensor([float(meeting.mesh.rank)])
    assert meeting.mesh.all_reduce("link", x).item() == sum(range(size))


def met(place: Place, port: int, first: SideName) -> None:
    """Each side learns the layout of the other, whichever comes first, and again after the link was closed."""
    side: SideName = "source" if place.job == "source" else "target"
    with place.mesh(**(SOURCE if side == "source" else TARGET)) as own:
        numbers = []
        for _ in range(2):
            if side != first:
                place.until("first", *((0, 1) if first == "source" else (2, 3)))
                time.sleep(0.5)
            place.tell("first")
            meeting = meet(side, own, "policy", f"tcp://127.0.0.1:{port}", OPENS_S)
            assert meeting.own(side) is own and meeting.me == meeting.mesh.rank == place.number
            assert meeting.layout("source") == Layout(SOURCE["dims"], merge=SOURCE["merge"])
            assert meeting.layout("target") == Layout(TARGET["dims"], rank_order=TARGET["rank_order"])
            assert [meeting.position("source", rank) for rank in range(4)] == [0, 1, None, None]
            assert [meeting.position("target", rank) for rank in range(4)] == [None, None, 1, 0]
            assert meeting.label(place.number).startswith(f"rank {own.rank} of the {side}")
            adds_up(meeting, 4)
            assert own.all_reduce(next(iter(own.dims)), torch.ones(1)).item() == 2.0
            held = meeting.mesh._state.held.store
            numbers = [process_of_rank(held, rank) for rank in range(4)]
            assert f"process {os.getpid()} of" in numbers[place.number] and len({*numbers}) == 4
            meeting.mesh.close()


@pytest.mark.parametrize("first", ["source", "target"])
def test_two_jobs_meet_whichever_comes_first_and_meet_again(
    pool: Pool, tmp_path: Path, first: SideName
) -> None:
    values(run(pool, tmp_path, met, free_port(), first, source=2, target=2))


def waits(place: Place, port: int) -> Any:
    side: SideName = "source" if place.job == "source" else "target"
    with place.mesh() as own:
        found = error_of(lambda: meet(side, own, "policy", f"tcp://127.0.0.1:{port}", 2.0))
        assert own.all_reduce("dp", torch.ones(1)).item() == 2.0
    return found


@pytest.mark.parametrize(("side", "other"), [("source", "target"), ("target", "source")])
def test_a_side_that_never_comes_is_named(pool: Pool, tmp_path: Path, side: SideName, other: str) -> None:
    for kind, text, missing, seconds in values(run(pool, tmp_path, waits, free_port(), **{side: 2})):
        assert kind == "TransferTimeout" and missing == () and seconds < 12, text
        assert f'the {other} of the link "policy" has not come' in text


def incomplete(place: Place, port: int, absent: int) -> Any:
    side: SideName = "source" if place.job == "source" else "target"
    with place.mesh() as own:
        own.barrier()
        place.tell("here")
        place.until("here", *range(4))
        if place.number == absent:
            place.until("over", *(number for number in range(4) if number != absent))
            return None
        with pytest.raises(TransferTimeout) as raised:
            meet(side, own, "policy", f"tcp://127.0.0.1:{port}", 5.0)
        place.tell("over")
    return raised.value.side, raised.value.missing, str(raised.value)


@pytest.mark.parametrize("absent", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_a_rank_that_never_comes_is_named_with_its_side(pool: Pool, tmp_path: Path, absent: int) -> None:
    found = values(run(pool, tmp_path, incomplete, free_port(), absent, source=2, target=2))
    assert found.pop(absent) is None
    side, rank = ("source", 1) if absent == 1 else ("target", 0)
    for of_side, missing, text in found:
        assert (of_side, missing) == (side, (rank,)) and f"rank {rank} of the {side} did not come" in text


def third(place: Place, port: int) -> None:
    """A third job is refused on both sides as long as the link is open, and then takes the target's place."""
    address = f"tcp://127.0.0.1:{port}"
    with place.mesh() as own:
        if place.job == "third":
            place.until("open", 0, 1)
            for side in BOTH:
                with pytest.raises(LaunchError, match=f'the link "policy" has another {side} already'):
                    meet(side, own, "policy", address, OPENS_S)
            place.tell("refused")
            place.until("closed", 0, 1)
        else:
            meeting = meet("source" if place.job == "source" else "target", own, "policy", address, OPENS_S)
            place.tell("open")
            place.until("refused", 2)
            adds_up(meeting, 2)
            meeting.mesh.close()
            place.tell("closed")
        if place.job != "target":
            meeting = meet("source" if place.job == "source" else "target", own, "policy", address, OPENS_S)
            adds_up(meeting, 2)
            meeting.mesh.close()


def test_a_third_job_is_refused_until_the_link_is_closed(pool: Pool, tmp_path: Path) -> None:
    values(run(pool, tmp_path, third, free_port(), source=1, target=1, third=1))


def late(place: Place, port: int, leaver: int) -> None:
    """One rank of the source has announced the link, and has it open when the other one already opens it again."""
    side: SideName = "source" if place.job == "source" else "target"
    leads, address = place.number == 1 - leaver, f"tcp://127.0.0.1:{port}"
    with place.mesh() as own:
        store, key = client(port), "meshcomm/link/policy/side/source"
        if place.number == leaver:
            store.wait([key])
        meeting = meet(side, own, "policy", address, OPENS_S, secret=None if leads else "")
        adds_up(meeting, 3)
        place.tell("open")
        place.until("open", *range(3))
        before = store.get(key)
        while leads and store.get(key) == before:
            time.sleep(0.02)
        meeting.mesh.close()
        meeting = meet(side, own, "policy", address, OPENS_S)
        adds_up(meeting, 3)
        meeting.mesh.close()


@pytest.mark.parametrize("leaver", [0, 1])
def test_ranks_of_one_job_are_no_rivals(pool: Pool, tmp_path: Path, leaver: int) -> None:
    with served() as port:
        values(run(pool, tmp_path, late, port, leaver, source=2, target=1))


def out_of_step(place: Place, port: int) -> Any:
    """One rank of the source has called twice in vain when the others come."""
    side: SideName = "source" if place.job == "source" else "target"
    found, attempts = [], 0
    with place.mesh() as own:
        for _ in range(2 if place.number == 0 else 0):
            found.append(error_of(lambda: meet(side, own, "policy", f"tcp://127.0.0.1:{port}", 0.5))[0])
        place.tell("tried")
        place.until("tried", 0)
        while attempts < 10:
            attempts += 1
            with suppress(TransferTimeout):
                meeting = meet(side, own, "policy", f"tcp://127.0.0.1:{port}", OPENS_S)
                break
        adds_up(meeting, 3)
        meeting.mesh.close()
    return found, attempts


def test_ranks_whose_attempts_got_out_of_step_meet_again(pool: Pool, tmp_path: Path) -> None:
    with served() as port:
        first, *others = values(run(pool, tmp_path, out_of_step, port, source=2, target=1))
    assert first == (["TransferTimeout"] * 2, 1)
    # A rank that comes late to a meeting that failed is told why.
    assert others[0][1] <= 2 and others[1][1] == 1


def test_a_later_meeting_of_a_job_ends_its_earlier_one() -> None:
    with served() as port:
        earlier, later = (
            Presence(client(port), "policy", "source", Job("job.0", order), lambda: 5.0) for order in (1, 2)
        )
        began = time.monotonic()
        for presence in (earlier, later):
            presence.announce({})
        assert time.monotonic() - began < 1.0
        later.refuse_loss()
        for call in (earlier.refuse_loss, lambda: earlier.announce({})):
            with pytest.raises(TransferFailed, match="has left this meeting"):
                call()
        for presence in (earlier, later):
            presence.end()


def crossed(place: Place, port: int) -> Any:
    name = "A" if place.job == "first" else "B"
    with place.mesh() as own:
        place.tell("here")
        place.until("here", 0, 1)
        return error_of(lambda: meet("source", own, name, f"tcp://127.0.0.1:{port}", 3.0))


def test_who_waits_in_another_link_is_named(pool: Pool, tmp_path: Path) -> None:
    with served() as port:
        found = values(run(pool, tmp_path, crossed, port, first=1, second=1))
    for other, (kind, text, _, _) in zip("BA", found, strict=True):
        assert kind == "TransferTimeout" and f'waits as the source of the link "{other}"' in text, text


def restarted(place: Place, port: int) -> Any:
    """The first target dies before the source comes; the second while the link is open; the third stays."""
    address, found = f"tcp://127.0.0.1:{port}", []
    own = place.mesh()
    if place.job == "first":
        place.tell("announces")
        meet("target", own, "policy", address, OPENS_S)
    if place.job == "source":
        (process,) = place.until("announces", 2)
        while not client(port).check(["meshcomm/link/policy/side/target"]):
            time.sleep(0.02)
        if place.rank == 0:
            os.kill(process, signal.SIGKILL)
        found.append(error_of(lambda: meet("source", own, "policy", address, 4.0)))
        place.tell("alone")
        meeting = meet("source", own, "policy", address, OPENS_S)
        adds_up(meeting, 3)
        found.append(error_of(lambda: adds_up(meeting, 3)))
        meeting.mesh.close()
        assert own.all_reduce("dp", torch.ones(1)).item() == 2.0
        place.tell("lost")
        meeting = meet("source", own, "policy", address, OPENS_S)
        adds_up(meeting, 4)
        meeting.mesh.close()
        assert own.all_reduce("dp", torch.ones(1)).item() == 2.0
        own.close()
    if place.job == "second":
        place.until("alone", 0, 1)
        meeting = meet("target", own, "policy", address, OPENS_S)
        adds_up(meeting, 3)
        os.kill(os.getpid(), signal.SIGKILL)
    if place.job == "third":
        place.until("lost", 0, 1)
        meeting = meet("target", own, "policy", address, OPENS_S)
        adds_up(meeting, 4)
        meeting.mesh.close()
        own.close()
    return found


def test_a_target_that_was_restarted_is_met_and_what_a_dead_one_left_is_not(
    pool: Pool, tmp_path: Path
) -> None:
    """The store at the address is served by another process, here that of the test."""
    with served() as port:
        ended = run(pool, tmp_path, restarted, port, source=2, first=1, second=1, third=2)
    assert [end.state for end in ended[2:4]] == ["died", "died"]
    (alone, lost), *others = values(ended[:2] + ended[4:])
    assert alone[0] == "TransferTimeout" and "has announced it, but does not answer" in alone[1]
    assert (lost[0], lost[2]) == ("PeerLost", (2,)), lost[1]
    assert others[0][1][2] == (2,)


def wrong(place: Place, port: int) -> None:
    with place.mesh() as own:
        with pytest.raises(LaunchError, match="no address to meet at"):
            meet("source", own, "policy", "127.0.0.1:29700", 2.0)
        keys: list[dict[str, Any]] = [{"name": 7}, {"name": ""}, {"secret": b"x"}, {"secret": 3}]
        for key in keys:
            with pytest.raises(LaunchError, match=r"of a link is not a text|a link without a name"):
                meet(
                    **{
                        "side": "source",
                        "mesh": own,
                        "name": "policy",
                        "timeout_s": 2.0,
                        "address": "",
                        **key,
                    }
                )
        with pytest.raises(LaunchError, match=r"cannot serve the store at 192\.0\.2\.1"):
            meet("source", own, "policy", f"tcp://192.0.2.1:{port}", 2.0)
        # The store is lost before anybody has said who serves it.
        lost = patch("meshcomm.transfer.meeting.find_common_store", side_effect=RuntimeError("reset by peer"))
        with lost, pytest.raises(TransferFailed, match=r"not opened(.|\n)*reset by peer"):
            meet("source", own, "policy", f"tcp://127.0.0.1:{port}", 2.0)


def test_wrong_addresses(pool: Pool, tmp_path: Path) -> None:
    values(run(pool, tmp_path, wrong, free_port(), source=1))


def signed(place: Place, port: int) -> bytes:
    """Returns what a program without the secret reads."""
    side: SideName = "source" if place.job == "source" else "target"
    with place.mesh() as own:
        meeting = meet(side, own, "policy", f"tcp://127.0.0.1:{port}", OPENS_S, secret="s")
        adds_up(meeting, 2)
        store = client(port)
        number = store.get(f"meshcomm/link/policy/side/{side}").decode().split()[0]
        content: bytes = store.get(f"meshcomm/link/policy/offer/{number}")
        adds_up(meeting, 2)
        meeting.mesh.close()
    return content


def test_values_are_signed_with_a_common_secret(pool: Pool, tmp_path: Path) -> None:
    found = values(run(pool, tmp_path, signed, free_port(), source=1, target=1))
    assert all(re.match(rb'[0-9a-f]{34}\n{"meshcomm"', content) for content in found), found

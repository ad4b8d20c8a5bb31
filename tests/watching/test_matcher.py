"""Calls belong together by their order on each rank, whatever the order in which ranks make them."""

from __future__ import annotations

import random

from meshcomm.watching.matcher import Collective, Collectives, Messages


def first(count: int) -> int:
    return 0


def test_the_nth_call_of_each_member_is_one_collective() -> None:
    draw = random.Random(0)
    for _ in range(20):
        members = draw.sample(range(10), 3)
        order = [rank for rank in members for _ in range(4)]
        draw.shuffle(order)
        group: Collectives[str] = Collectives(members)
        made = dict.fromkeys(members, 0)
        found: dict[int, set[Collective[str]]] = {number: set() for number in range(1, 5)}
        for rank in order:
            made[rank] += 1
            call = group.join(rank, f"call {made[rank]} of {rank}")
            found[made[rank]].add(call)
            # Exactly the ranks that have made this many calls have arrived.
            assert set(call.absent()) == {each for each in members if made[each] < made[rank]}
            assert call.complete == (call.absent() == []) == (call.number not in group.pending)
        for number, calls in found.items():
            (call,) = calls
            assert call.number == number
            assert call.came == {rank: f"call {number} of {rank}" for rank in members}
        assert not group.pending


def test_only_the_needed_members_are_asked_for() -> None:
    group: Collectives[int] = Collectives((4, 2, 9))
    call = group.join(2, 0)
    assert call.absent() == [4, 9] and call.absent({2, 9}) == [9] and call.absent({2}) == []


def test_messages_of_two_ranks_and_a_tag_match_in_order() -> None:
    draw = random.Random(1)
    for _ in range(20):
        channels = [(0, 1, 0), (0, 1, 7), (2, 1, 0), (1, 0, 0)]
        ends = [(channel, sends) for channel in channels for sends in (True, False) for _ in range(3)]
        draw.shuffle(ends)
        group: Messages[int] = Messages()
        numbers = dict.fromkeys(ends, 0)
        messages = set()
        for channel, sends in ends:
            numbers[channel, sends] += 1
            brought = numbers[channel, sends]
            source, target, tag = channel
            messages.add(
                group.send(source, target, tag, brought)
                if sends
                else group.receive(source, target, tag, brought, first)
            )
        assert len(messages) == 12 and not group.unmatched()
        assert all(each.complete and each.sent == each.received for each in messages)


def test_a_receive_from_any_source_takes_the_first_message_of_the_chosen_sender() -> None:
    group: Messages[str] = Messages()
    for source, brought in ((1, "first of 1"), (2, "first of 2"), (1, "second of 1")):
        group.send(source, 0, 5, brought)
    asked = []

    def last(count: int) -> int:
        asked.append(count)
        return count - 1

    found = [group.receive(None, 0, 5, "any", last) for _ in range(3)]
    # A choice exists only while messages of two senders wait.
    assert asked == [2]
    assert [each.source for each in found] == [2, 1, 1]
    assert [each.sent for each in found] == ["first of 2", "first of 1", "second of 1"]


def test_a_send_goes_to_the_receive_that_was_posted_first() -> None:
    group: Messages[str] = Messages()
    waits, named = group.receive(None, 0, 0, "any", first), group.receive(3, 0, 0, "from 3", first)
    assert waits.lacks() is None and named.lacks() == 3
    assert group.unmatched() == [waits, named]
    assert group.send(3, 0, 0, "one") is waits and waits.source == 3
    assert group.send(3, 0, 1, "another tag").lacks() == 0
    assert group.send(3, 0, 0, "two") is named
    assert [each.tag for each in group.unmatched()] == [1]

import random

import pytest

from easerve.engines.vllm.ec.messages import ALIGNMENT, Slot
from easerve.engines.vllm.ec.ring import SLOT_LIFE_NS, Ring


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def take(ring: Ring, num_bytes: int, peer: str = "p") -> int | None:
    """Where the slot begins."""
    slot = ring.take(num_bytes, peer)
    return None if slot is None else slot.offset


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(clock: Clock) -> Ring:
    """With room for four slots of 64 bytes."""
    return Ring(256, clock)


def test_slots_are_taken_in_turn_and_round_again(ring: Ring) -> None:
    assert [take(ring, 64) for _ in range(5)] == [0, 64, 128, 192, None]
    ring.give_back("p", 0)
    ring.give_back("p", 1)
    assert [take(ring, 100), take(ring, 1)] == [0, None]


def test_slots_are_aligned(ring: Ring) -> None:
    assert [take(ring, 1), take(ring, 65), take(ring, 1)] == [0, 64, 192]


def test_a_slot_given_back_out_of_turn_waits_for_those_before_it(ring: Ring) -> None:
    for _ in range(4):
        take(ring, 64)
    ring.give_back("p", 1)
    assert take(ring, 64) is None
    ring.give_back("p", 0)
    assert take(ring, 128) == 0


def test_what_is_larger_than_the_buffer_has_no_place(ring: Ring) -> None:
    assert take(ring, 257) is None
    assert take(ring, 256) == 0


def test_only_who_has_a_slot_gives_it_back(ring: Ring) -> None:
    take(ring, 256)
    ring.give_back("q", 0)
    ring.give_back("p", 64)
    assert take(ring, 64) is None


def test_the_slots_of_a_peer_that_is_gone_are_free_a_life_later(ring: Ring, clock: Clock) -> None:
    take(ring, 128)
    take(ring, 128, "q")
    ring.forget("p")
    clock.now = SLOT_LIFE_NS - 1
    ring.forget("p")
    assert take(ring, 64, "q") is None
    clock.now += 1
    assert [take(ring, 128, "q"), take(ring, 1, "q")] == [0, None]


def test_a_slot_that_nobody_gives_back_is_late_and_stays_its_peers(
    ring: Ring, clock: Clock
) -> None:
    take(ring, 64)
    take(ring, 64, "q")
    ring.give_back("q", 1)
    clock.now = SLOT_LIFE_NS
    assert not ring.late()
    clock.now += 1
    assert ring.late() == {"p"}
    assert take(ring, 256) is None
    ring.forget("p")
    assert not ring.late()


def test_what_is_given_back_late_is_not_the_slot_that_has_its_place_by_now(
    ring: Ring, clock: Clock
) -> None:
    take(ring, 256)
    ring.forget("p")
    clock.now = SLOT_LIFE_NS
    take(ring, 256)
    ring.give_back("p", 0)
    assert take(ring, 64) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_two_slots_ever_overlap(seed: int) -> None:
    draw, size = random.Random(seed), 1024
    ring = Ring(size, Clock())
    taken: list[Slot] = []
    for _ in range(500):
        if taken and draw.random() < 0.5:
            ring.give_back("p", taken.pop(draw.randrange(len(taken))).number)
        slot = ring.take(draw.randrange(1, 400), "p")
        if slot is None:
            assert taken, "an empty ring has room"
            continue
        end = slot.offset + slot.num_bytes
        assert slot.offset % ALIGNMENT == 0
        assert end <= size
        for other in taken:
            assert slot.offset >= other.offset + other.num_bytes or end <= other.offset
        taken.append(slot)

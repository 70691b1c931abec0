"""Devices that several engines work on: shares, speeds, ends."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest

from easerve.policy.partition import ALL, HALF, SHARED, Demand, Layout
from easerve.sim.clock import Effect, Handler
from easerve.sim.sharing import Colocated, Device, Own, machine
from easerve.types import NS_PER_S

from .play import Notes, play

LAYOUT = Layout(total=100, granule=10, min_prefill=10)


def begins(
    device: Device, engine: str, seconds: float, done: Handler, part: float = 1.0
) -> Handler:
    return lambda now_ns: device.begin(engine, seconds, part, now_ns, done)


def drops(device: Device, engine: str) -> Handler:
    return lambda now_ns: device.drop(engine, now_ns)


@pytest.mark.parametrize("make", [Own, partial(machine, 1)])
def test_alone_work_takes_its_time(make: Callable[[], Device]) -> None:
    device, notes = make(), Notes()
    play((1.0, begins(device, "x", 2.5, notes.note("done"))))
    assert notes == {"done": 3.5}


@pytest.mark.parametrize("make", [Own, partial(machine, 1)])
def test_dropped_work_does_not_end_even_at_the_very_instant(make: Callable[[], Device]) -> None:
    device, notes = make(), Notes()
    play(
        (1.0, drops(device, "x")),
        (1.0, begins(device, "x", 2.0, notes.note("dropped"))),
        (3.0, drops(device, "x")),
        (3.0, begins(device, "x", 1.0, notes.note("done"))),
    )
    assert notes == {"done": 4.0}


def test_what_has_ended_has_ended_before_it_is_dropped() -> None:
    device, order = machine(2), list[str]()

    def notes(name: str, now_ns: int) -> Iterable[Effect]:
        order.append(name)
        return device.drop("x", now_ns) if name == "dropped" else ()

    def later(now_ns: int) -> Iterable[Effect]:
        return [(3 * NS_PER_S, partial(notes, "dropped"))]

    play((1.0, begins(device, "x", 2.0, partial(notes, "done"))), (2.0, later))
    assert order == ["done", "dropped"]


def test_two_on_one_core_share_it() -> None:
    """2 s for the first second of each; then the longer one is alone."""
    device, notes = machine(1), Notes()
    play(
        (0.0, begins(device, "x", 1.0, notes.note("x"))),
        (0.0, begins(device, "y", 3.0, notes.note("y"))),
    )
    assert notes == {"x": 2.0, "y": 4.0}


def test_who_comes_later_slows_what_is_left() -> None:
    device, notes = machine(2), Notes()
    play(
        (0.0, begins(device, "x", 3.0, notes.note("x"))),
        (1.0, begins(device, "y", 1.0, notes.note("y"))),
        (1.0, begins(device, "z", 2.0, notes.note("z"))),
    )
    # From 1 s on three share two cores: y ends after 1.5 s, then two have a core each.
    assert notes == pytest.approx({"y": 2.5, "x": 3.5, "z": 3.5})


def test_whoever_is_dropped_leaves_room() -> None:
    device, notes = machine(1), Notes()
    play(
        (0.0, begins(device, "x", 2.0, notes.note("x"))),
        (0.0, begins(device, "y", 2.0, notes.note("y"))),
        (2.0, drops(device, "y")),
    )
    assert notes == {"x": 3.0}


def test_a_part_is_the_cores_that_it_wants() -> None:
    device, notes = machine(4), Notes()
    play(
        (0.0, begins(device, "x", 1.0, notes.note("x"), part=4.0)),
        (0.0, begins(device, "y", 1.0, notes.note("y"), part=1.0)),
    )
    assert notes == pytest.approx({"x": 1.25, "y": 1.25})


def test_what_ends_at_one_instant_all_ends_and_may_begin_again() -> None:
    device, notes = machine(3), Notes()

    def again(engine: str, now_ns: int) -> Iterable[Effect]:
        return device.begin(engine, 1.0, 1.0, now_ns, notes.note(engine))

    play(*((0.0, begins(device, each, 1.0, partial(again, each))) for each in "xyz"))
    assert notes == {"x": 2.0, "y": 2.0, "z": 2.0}


# Encode beside prefill ----------------------------------------------------------------------------


def colocated(crowding: float = 0.25) -> Colocated:
    return Colocated(LAYOUT, "l0", crowding)


def test_a_demand_is_rounded_to_a_part_and_prefill_gets_the_rest() -> None:
    device = colocated()
    assert (device.encode_part("e0"), device.prefill_part()) == (1.0, 1.0)
    device.announce("e0", Demand(25, False, ""))
    assert (device.encode_part("e0"), device.prefill_part()) == (0.3, 0.7)
    device.announce("e0", Demand(50, False, ""))  # the larger one
    assert (device.encode_part("e0"), device.prefill_part()) == (0.5, 0.5)
    device.announce("e1", Demand(95, False, ""))  # prefill waits for its slowest rank
    assert device.encode_part("e1") == 0.9
    assert device.prefill_part() == pytest.approx(0.1)
    device.announce("e0", Demand(ALL, False, ""))
    assert (device.encode_part("e0"), device.prefill_part()) == (1.0, 0.0)


def test_what_stands_is_kept_between_calls() -> None:
    device = colocated()
    device.stand("e0", Demand(HALF, True, ""))
    assert device.prefill_part() == 0.5
    demand = Demand(20, False, "")
    device.announce("e0", demand)
    assert device.prefill_part() == 0.8
    play((0.0, partial(device.withdraw, "e0", demand)))
    assert device.prefill_part() == 0.5


def test_prefill_is_woken_when_a_gate_opens_and_not_before() -> None:
    device, notes = colocated(), Notes()
    device.wake = notes.note("woken")
    gate, some = Demand(ALL, False, ""), Demand(30, False, "")
    for demand in (gate, gate, some):
        device.announce("e0", demand)
    play(
        (1.0, partial(device.withdraw, "e0", some)),
        (2.0, partial(device.withdraw, "e0", gate)),
        (3.0, partial(device.withdraw, "e0", gate)),
    )
    assert notes == {"woken": 3.0}


def test_who_has_died_demands_nothing() -> None:
    device, notes = colocated(), Notes()
    device.wake = notes.note("woken")
    device.stand("e0", Demand(ALL, True, ""))
    device.announce("e0", Demand(ALL, False, ""))
    play((1.0, partial(device.forget, "e0")))
    assert notes == {"woken": 1.0}
    assert device.prefill_part() == 1.0


@pytest.mark.parametrize(
    ("demand", "slower"),
    [(SHARED, 2.0), (Demand(30, False, ""), 1.0), (Demand(60, False, ""), 1.0)],
)
def test_parts_that_overlap_share_their_time_and_all_share_bandwidth(
    demand: Demand, slower: float
) -> None:
    device, notes = colocated(crowding=0.25), Notes()
    device.announce("e0", demand)

    def both(now_ns: int) -> Iterable[Effect]:
        for engine, part in (("e0", device.encode_part("e0")), ("l0", device.prefill_part())):
            yield from device.begin(engine, 1.0, part, now_ns, notes.note(engine))

    play((0.0, both))
    assert notes == pytest.approx({"e0": 1.25 * slower, "l0": 1.25 * slower})


def test_whoever_is_alone_on_its_part_is_no_faster_for_it() -> None:
    """Prefill leaves more than an encoder has, for the sake of the other one."""
    device, notes = colocated(crowding=0.25), Notes()
    device.announce("e0", Demand(30, False, ""))
    device.announce("e1", Demand(90, False, ""))
    part = device.prefill_part()
    play(
        (0.0, begins(device, "l0", 2.0, notes.note("l0"), part)),
        (0.0, begins(device, "e0", 1.0, notes.note("e0"), device.encode_part("e0"))),
    )
    assert notes == pytest.approx({"e0": 1.25, "l0": 1.25 + 1.0})


def test_encoders_on_devices_of_their_own_do_not_slow_each_other() -> None:
    device, notes = colocated(crowding=1.0), Notes()
    play(
        (0.0, begins(device, "e0", 1.0, notes.note("e0"))),
        (0.0, begins(device, "e1", 1.0, notes.note("e1"))),
    )
    assert notes == {"e0": 1.0, "e1": 1.0}


def test_a_step_keeps_the_part_that_it_began_on() -> None:
    """A demand that comes later overlaps with it."""
    device, notes = colocated(crowding=0.0), Notes()

    def encode(now_ns: int) -> Iterable[Effect]:
        device.announce("e0", Demand(50, False, ""))
        part = device.encode_part("e0")
        return device.begin("e0", 1.0, part, now_ns, notes.note("e0"))

    play((0.0, begins(device, "l0", 2.0, notes.note("l0"), device.prefill_part())), (1.0, encode))
    # One and a half devices are wanted from 1 s on, until both end after 1.5 s.
    assert notes == pytest.approx({"l0": 2.5, "e0": 2.5})

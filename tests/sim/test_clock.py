"""The heap of effects: what happens when, and when the system settles."""

from collections.abc import Iterable, Iterator

import pytest

from easerve.sim import clock
from easerve.sim.clock import Effect, Handler


class Settles:
    """Writes down what happens; ``plans``: what follows from settling, in turn."""

    def __init__(self, deadlines_ns: Iterable[int] = (), *plans: list[tuple[int, str]]) -> None:
        self.story: list[tuple[int, str]] = []
        self._deadlines_ns, self._plans = sorted(deadlines_ns), list(plans)

    def note(self, name: str, *then: tuple[int, str]) -> Handler:
        def handler(now_ns: int) -> Iterator[Effect]:
            self.story.append((now_ns, name))
            for at_ns, name_of_next in then:
                yield at_ns, self.note(name_of_next)

        return handler

    def settle(self, now_ns: int) -> Iterable[Effect]:
        self.story.append((now_ns, "settled"))
        while self._deadlines_ns and self._deadlines_ns[0] <= now_ns:
            self._deadlines_ns.pop(0)
        plan = self._plans.pop(0) if self._plans else []
        return [(at_ns, self.note(name)) for at_ns, name in plan]

    def deadline_ns(self) -> int | None:
        return self._deadlines_ns[0] if self._deadlines_ns else None


def test_nothing_ends_at_once() -> None:
    assert clock.run(Settles(), []) == 0


def test_effects_of_an_instant_happen_in_the_order_in_which_they_were_pushed() -> None:
    system = Settles()
    end_ns = clock.run(
        system,
        [
            (7, system.note("late")),
            (5, system.note("first", (5, "fourth"), (7, "later"))),
            (5, system.note("second")),
            (5, system.note("third")),
        ],
    )
    assert end_ns == 7
    names = ["first", "second", "third", "fourth", "settled", "late", "later", "settled"]
    assert [name for _, name in system.story] == names


def test_settling_may_bring_more_at_the_same_instant() -> None:
    system = Settles((), [(5, "more")], [(6, "next")])
    clock.run(system, [(5, system.note("one"))])
    assert system.story == [
        (5, "one"),
        (5, "settled"),
        (5, "more"),
        (5, "settled"),
        (6, "next"),
        (6, "settled"),
    ]


def test_it_settles_at_its_deadlines_after_what_happens_then() -> None:
    system = Settles((3, 5, 9))
    assert clock.run(system, [(5, system.note("one"))]) == 9
    assert system.story == [(3, "settled"), (5, "one"), (5, "settled"), (9, "settled")]


def test_a_deadline_that_has_passed_is_now() -> None:
    system = Settles()

    def overdue(now_ns: int) -> Iterator[Effect]:
        system._deadlines_ns = [2]
        yield from ()

    assert clock.run(system, [(4, overdue)]) == 4
    assert system.story == [(4, "settled")]


def test_nothing_happens_in_the_past() -> None:
    system = Settles()
    with pytest.raises(AssertionError, match="past"):
        clock.run(system, [(5, system.note("one", (4, "before")))])

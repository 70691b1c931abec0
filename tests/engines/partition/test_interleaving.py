"""Both sides as they run in engines, and an API server that announces, interleaved at every access.

Engines die and start again, drivers fail, leases run out, rules change, clients leave. What is true
is noted here and judged here:

* An encoder that waits shares none of its units with a prefill step, while they are demanded
  without a break; but for steps that would have paused for too long.
* One that does not wait shares them with steps that began before that only, and counts each such
  forward; beyond those, it counts steps that it saw on their way in or out.
* Prefill pauses, and stays narrow, for no longer than it should.
* Nobody is confined beside a side that has failed, which is reported once.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from easerve.engines.partition.cell import FAILED, NEVER, NS_PER_US, SEVERAL, UNIT_BITS, Cell, Word
from easerve.engines.partition.sides import POLL_S, DriverError, EncodeSide, PrefillSide
from easerve.policy.partition import ALL, HALF, MAX_UNITS, Gate, Indivisible, Layout
from easerve.types import NS_PER_S, Stage

from .interleaving import MS, Actor, Died, Fence, Memory, Over, Plain, Words, World

LEASE_NS = 6 * MS
RENEW_NS = LEASE_NS // 4
MAX_PAUSE_NS = 12 * MS
POLL_NS = round(POLL_S * NS_PER_S)
FOREVER_NS = 1 << 60
P_DEATH, P_FAILURE = 2e-4, 6e-3
CONFINING = (Word.ENCODE_CONFINES, Word.PREFILL_CONFINES)
RULES = ("dynamic", "dynamic", "dynamic", "static", "gate", "none")


@dataclass(frozen=True, slots=True)
class Plan:
    """``num``: prefill steps and forwards together."""

    seed: int
    num: int
    layout: Layout
    patience_ns: int
    hold_ns: int


class Driver:
    """Of one life of an engine; ``units``: what it is truly confined by."""

    name = "model"

    def __init__(self, world: World, layout: Layout, seen: Counter[str]) -> None:
        self.layout, self.units = layout, 0
        self._world, self._seen = world, seen
        self._failures = 0

    def confine(self, stage: Stage, units: int) -> None:
        draw = self._world.draw
        if units and draw.random() < P_FAILURE:
            self._failures += 1
            self.units = draw.choice([self.units, units])
            raise DriverError("it is gone")
        self.units = units

    def on_error(self, _: DriverError) -> None:
        self._seen["failures"] += 1
        assert self._failures == 1, "an engine hears once of a failure"
        assert not self.units, "and is not confined from then on"
        self._failures = -1

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Span:
    """From a moment on so many units are demanded, until ``until_ns`` or something else is."""

    moment: int
    from_ns: int
    units: int
    until_ns: int


@dataclass(slots=True)
class Step:
    """``looked``: when it last began to read what is wanted. ``num_held``: how often it said what
    it leaves; more than once when it had to take that back.
    """

    called: int
    called_ns: int
    looked: int = 0
    num_held: int = 0
    leaves: int = 0
    forced: bool = False
    died: bool = False
    ended: bool = False


@dataclass(slots=True)
class Forward:
    """``looked``: when it last loaded what prefill holds. ``beside``: the steps that ran then,
    ``beginning``: the one that was about to, ``phase``: what prefill did.
    """

    called: int
    looked: int = 0
    beside: list[Step] = field(default_factory=list)
    beginning: Step | None = None
    phase: str = ""
    units: int = 0
    late: bool = False
    overlapped: bool = False


class Device:
    """Its two engines, and the judge of both."""

    def __init__(self, plan: Plan, cell: Cell) -> None:
        self.plan = plan
        self.world = World(plan.seed, cell.words, self._written)
        self.round = cache(plan.layout.round)
        self.seen: Counter[str] = Counter()
        self.announced = deque([Span(0, 0, 0, FOREVER_NS)], maxlen=2000)
        self.demanded = self.announced.copy()  # but for what has been served
        self.encoder, self.prefill = Actor(), Actor()
        self.repaired = 0  # when a side that may have failed started again
        # The API server
        self.rule, self.standing, self.life, self.is_up = "dynamic", 0, 0, False
        self.announcing = self.cell(Plain(self.world))
        self.open: dict[int, int] = {}
        self.num_requests = 0
        self.ready: deque[tuple[int, int]] = deque()  # request, how many forwards it takes
        # The workers
        self.forward = Forward(0)
        self.is_running = False
        self.steps: dict[int, Step] = {}
        self.beginning: Step | None = None
        self.phase = "dead"

    def run(self) -> None:
        self.world.p_death = P_DEATH
        self.world.at(0, self._arrival)
        self.world.at(0, self._other_rule)
        self.world.run({self.encoder: self._encoder, self.prefill: self._prefill})

    def cell(self, words: Memory) -> Cell:
        """The production class on the memory of the world."""
        cell = Cell.__new__(Cell)
        cell.words, cell.clock_ns = cast("memoryview[int]", words), self.world.clock_ns
        return cell

    # What is demanded ---------------------------------------------------------------------------

    def _written(self, word: int) -> None:
        if word in CONFINING:
            self.repaired = self.world.moment
        if word not in (Word.ANNOUNCED, Word.SERVED):
            return
        world, served = self.world, self.world.memory[Word.SERVED]
        announced = world.memory[Word.ANNOUNCED]
        deadline_us, units = announced >> UNIT_BITS & NEVER, announced & MAX_UNITS
        until_ns = FOREVER_NS if deadline_us == NEVER else deadline_us * NS_PER_US
        span = Span(world.moment, world.now_ns, self.round(units), until_ns)
        self.announced.append(span)
        is_served = announced == served and deadline_us != NEVER
        lasts = is_served and announced >= SEVERAL
        self.seen["served, for several"] += lasts
        self.demanded.append(replace(span, units=0) if is_served and not lasts else span)

    def _since(self, units: int, spans: Sequence[Span]) -> int:
        """The moment since when it was so many without a break; one to come if it is not now."""
        since, end_ns = self.world.moment + 1, self.world.now_ns
        for span in reversed(spans):
            if span.units < units or span.until_ns <= end_ns:
                break
            since, end_ns = span.moment, span.from_ns
        return since

    def _recent(self, ago_ns: int) -> Iterator[int]:
        """Units that were demanded at some time since then."""
        for span in reversed(self.demanded):
            if span.until_ns >= ago_ns:
                yield span.units
            if span.from_ns < ago_ns:
                return

    # The encoder's API server -------------------------------------------------------------------

    def _other_rule(self) -> None:
        self.rule = self.world.draw.choice(RULES)
        self.world.at(self.world.up_to(200 * MS), self._other_rule)

    def _arrival(self) -> None:
        draw, at = self.world.draw, self.world.at
        at(round(draw.expovariate(1 / (3 * MS))), self._arrival)
        if not self.is_up or len(self.open) > 4:
            return
        self.num_requests += 1
        number, life = self.num_requests, self.life
        some = draw.choice([1, 8, 24, 40, 64, 120, 132])
        self.open[number] = {"gate": ALL, "none": 0, "static": HALF}.get(self.rule, some)
        self.standing = HALF if self.rule == "static" else 0
        self._publish()
        at(RENEW_NS, lambda: self._renew(life, number))
        num_forwards = draw.choice([1, 1, 2])
        preprocessing_ns = draw.choice([0, self.world.up_to(MS)])
        at(preprocessing_ns, lambda: self.ready.append((number, num_forwards)))
        if draw.random() < 0.03:  # the client leaves
            at(self.world.up_to(4 * MS), lambda: self._close(life, number))

    def _publish(self) -> None:
        units = max(self.open.values(), default=0)
        if units > self.standing:
            self.announcing.announce(units, LEASE_NS, several=len(self.open) > 1)
        else:
            self.announcing.announce(self.standing, None)

    def _renew(self, life: int, number: int) -> None:
        if life == self.life and number in self.open:
            self._publish()
            busy_ns = LEASE_NS if self.world.draw.random() < 0.01 else 0
            self.world.at(RENEW_NS + busy_ns, lambda: self._renew(life, number))

    def _close(self, life: int, number: int) -> None:
        if life == self.life and self.open.pop(number, None) is not None:
            self._publish()

    # The encoder's worker -----------------------------------------------------------------------

    def _encoder(self) -> None:
        draw = self.world.draw
        while True:
            self.standing = 0
            self._publish()  # as an API server does that starts
            try:
                self._encoder_lives()
            except Died:
                self.seen["deaths of the encoder"] += 1
            self.is_running = self.is_up = False
            self.ready.clear()
            if draw.random() < 0.5:  # the API server dies with it
                self.life += 1
                self.open.clear()
            while self.open:  # or fails what is open
                self.world.sleep(self.encoder, self.world.up_to(MS))
                self._close(self.life, min(self.open, default=0))
            self.world.sleep(self.encoder, self.world.up_to(20 * MS))

    def _encoder_lives(self) -> None:
        world, me, draw = self.world, self.encoder, self.world.draw
        driver = Driver(world, self.plan.layout, self.seen)
        side = EncodeSide(
            self.cell(Words(world, me, self._encoder_loaded)),
            driver,
            driver.on_error,
            self.plan.patience_ns,
            lambda _: world.sleep(me, POLL_NS),
        )
        side._lock = Fence(world, me)  # type: ignore[assignment]
        self.is_up = True
        while True:
            if not self.ready:
                world.sleep(me, world.up_to(MS // 3))
                continue
            life, (number, num_forwards) = self.life, self.ready.popleft()
            for _ in range(num_forwards):
                self._one_forward(side, driver)
                world.sleep(me, draw.choice([0, world.up_to(MS)]))
            world.at(world.up_to(MS // 2), lambda of=(life, number): self._close(*of))  # type: ignore[misc]

    def _one_forward(self, side: EncodeSide, driver: Driver) -> None:
        world = self.world
        forward = self.forward = Forward(world.moment)
        called_ns, num_late, failed = world.now_ns, self._num(Word.ENCODE_LATE), self._failed
        forward.units = side.begin()
        forward.late = self._num(Word.ENCODE_LATE) != num_late
        total = self.plan.layout.total
        assert driver.units == (0 if forward.units == total else forward.units)
        if forward.units:
            self.seen["granted"] += 1
            assert not failed or self.repaired >= forward.called, (
                "nobody is confined beside a failure"
            )
            assert forward.units in self._recent(called_ns)
        elif not self._failed_since(forward.called):
            assert self._since(1, self.announced) >= forward.called, "it is granted"
        self.is_running = True
        for step in [*forward.beside, *self.steps.values()]:
            self._judge(step)
        world.sleep(self.encoder, world.up_to(3 * MS))
        self._judge_late()
        self.is_running = False
        self._done("forwards")
        side.end()

    def _encoder_loaded(self, word: int) -> None:
        if word == Word.HELD:
            forward = self.forward
            forward.looked, forward.beside = self.world.moment, list(self.steps.values())
            forward.phase, forward.beginning = self.phase, self.beginning

    # Prefill ------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        while True:
            try:
                self._prefill_lives()
            except Died:
                self.seen["deaths of prefill"] += 1
            if self.beginning is not None:
                self.beginning.died = True
            self.steps.clear()
            self.phase, self.beginning = "dead", None
            self.world.sleep(self.prefill, self.world.up_to(10 * MS))

    def _prefill_lives(self) -> None:
        world, me, draw = self.world, self.prefill, self.world.draw
        driver = Driver(world, self.plan.layout, self.seen)
        polls: list[float] = []

        def sleep(seconds: float) -> None:
            polls.append(seconds)
            world.sleep(me, POLL_NS)

        side = PrefillSide(
            self.cell(Words(world, me, self._prefill_loaded, self._prefill_stored)),
            driver,
            driver.on_error,
            self.plan.hold_ns,
            MAX_PAUSE_NS,
            sleep,
        )
        side._lock = Fence(world, me)  # type: ignore[assignment]
        self.phase = "idle"
        at_once = draw.choice([1, 1, 2])  # with asynchronous scheduling, two
        while True:
            while len(self.steps) >= at_once or (self.steps and draw.random() < 0.3):
                self._end_first(side)
                world.sleep(me, draw.choice([0, world.up_to(MS)]))
            self._one_step(side, driver)
            assert sum(polls) <= (MAX_PAUSE_NS + POLL_NS) / NS_PER_S, "it pauses for so long"
            polls.clear()
            world.sleep(me, world.up_to(2 * MS))

    def _one_step(self, side: PrefillSide, driver: Driver) -> None:
        world = self.world
        step = self.beginning = Step(world.moment, world.now_ns)
        self.phase, num_forced, failed = "begin", self._num(Word.PREFILL_FORCED), self._failed
        side.begin()
        step.leaves = driver.units
        step.forced = self._num(Word.PREFILL_FORCED) != num_forced
        self.beginning, self.phase = None, "run"
        self.steps[side.step] = step
        assert self._num(Word.HELD) - 1 == min(each.leaves for each in self.steps.values())
        if step.leaves:
            self.seen["narrow"] += 1
            assert any(self._recent(step.called_ns - self.plan.hold_ns)), "for a reason"
            assert not failed or self.repaired >= step.called, "nobody is confined beside a failure"
        if step.forced:
            self.seen["forced"] += 1
        elif not self._failed_since(step.called):
            assert self._since(step.leaves + 1, self.demanded) >= step.called, (
                "it leaves what is demanded"
            )
        if self.is_running:
            self._judge(step)
        self._done("steps")

    def _end_first(self, side: PrefillSide) -> None:
        number, self.phase = min(self.steps), "end"
        self.steps.pop(number).ended = True
        side.end(number if self.steps or self.world.draw.random() < 0.5 else None)
        self.phase = "run" if self.steps else "idle"

    def _prefill_loaded(self, word: int) -> None:
        if word == Word.ENCODE_CONFINES and self.beginning is not None:
            self.beginning.looked = self.world.moment

    def _prefill_stored(self, word: int) -> None:
        if word == Word.HELD and self.beginning is not None:
            self.beginning.num_held += 1

    # The judge ----------------------------------------------------------------------------------

    def _done(self, what: str) -> None:
        self.seen[what] += 1
        if self.seen["steps"] + self.seen["forwards"] >= self.plan.num:
            raise Over

    @property
    def _failed(self) -> bool:
        """And both know."""
        memory = self.world.memory
        return any(FAILED == memory[word] == self._num(word) for word in CONFINING)

    def _failed_since(self, moment: int) -> bool:
        """And one may know."""
        memory = self.world.memory
        return self.repaired >= moment or any(
            FAILED in (memory[word], self._num(word)) for word in CONFINING
        )

    def _num(self, word: int) -> int:
        """As its writer sees it."""
        return self.world.view(self.encoder if word < Word.HELD else self.prefill, word)

    def _judge(self, step: Step) -> None:
        """Whether it shares units with the forward that runs, and whether it may."""
        forward = self.forward
        if step.leaves >= forward.units:
            return
        forward.overlapped = True
        since = self._since(forward.units, self.demanded)
        if self._since(forward.units, self.announced) > forward.looked:
            self.seen["overlaps when no longer demanded"] += 1
        elif step.forced:
            self.seen["overlaps of forced steps"] += 1
        elif not self._failed_since(step.called):
            self.seen["overlaps"] += 1
            assert not self.plan.patience_ns, "who waits shares nothing"
            assert forward.late, "it is counted"
            assert step.looked < since, "it began before"

    def _judge_late(self) -> None:
        forward, beginning = self.forward, self.forward.beginning
        if not forward.late:
            return
        if forward.overlapped:
            self.seen["late, overlapped"] += 1
        elif self._failed_since(forward.called):
            self.seen["late, failed"] += 1
        elif beginning is None:
            self.seen[f"late, prefill at {forward.phase}"] += 1
            assert forward.phase in ("end", "dead")
        elif beginning.num_held > 1 or beginning.died:
            self.seen["late, taken back"] += 1
        else:
            self.seen["late, not yet begun or already ended"] += 1
            assert beginning is self.beginning or beginning.ended


# --------------------------------------------------------------------------------------------------

GPU, CPU = Layout(132, 8, 16), Layout(4)
PATIENT_NS = 1 << 60
PLANS = (  # of one seed; steps of each
    (1400, GPU, 0, 0),
    (1400, GPU, 0, 2 * MS),
    (2800, GPU, PATIENT_NS, 2 * MS),
    (1400, CPU, PATIENT_NS, MS),
    (1400, CPU, 0, MS),
    (800, Gate(4), PATIENT_NS, MS),
    (800, Indivisible(132, 8, 16), 0, MS),
)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))]
)
def test_a_hundred_thousand_steps_go_well(seed: int, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for number, (num, layout, patience_ns, hold_ns) in enumerate(PLANS):
        path = tmp_path / f"{number}"
        Cell.create(path)
        cell = Cell(path)
        device = Device(Plan(10 * seed + number, num, layout, patience_ns, hold_ns), cell)
        device.run()
        cell.close()
        seen += device.seen
    print(f"seed {seed}: {', '.join(f'{num} {what}' for what, num in sorted(seen.items()))}")
    assert seen["steps"] + seen["forwards"] >= 10_000
    assert min(seen["granted"], seen["narrow"], seen["overlaps"], seen["late, overlapped"]) > 30
    assert min(seen["forced"], seen["overlaps when no longer demanded"]) > 5
    assert seen["served, for several"] > 30
    assert min(seen["deaths of the encoder"], seen["deaths of prefill"], seen["failures"]) > 0

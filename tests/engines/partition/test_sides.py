import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from easerve.engines.partition.cell import IDLE, Cell, Word
from easerve.engines.partition.sides import POLL_S, DriverError, EncodeSide, PrefillSide
from easerve.policy.partition import ALL, HALF, Gate, Indivisible, Layout, Levels
from easerve.types import NS_PER_S, Stage

MS = NS_PER_S // 1000
LEASE_NS, PATIENCE_NS, HOLD_NS, MAX_PAUSE_NS = 500 * MS, 10 * MS, 5 * MS, 50 * MS
POLL_NS = round(POLL_S * NS_PER_S)
GPU = Layout(132, 8, 16)


class Driver:
    """Notes what it is asked for; fails once it is ``broken``."""

    name = "noting"

    def __init__(self, layout: Layout = GPU) -> None:
        self.layout = layout
        self.asked: list[tuple[Stage, int]] = []
        self.broken = False

    def confine(self, stage: Stage, units: int) -> None:
        self.asked.append((stage, units))
        if self.broken and units:
            raise DriverError("no more")

    @property
    def units(self) -> int:
        return self.asked[-1][1] if self.asked else 0

    def close(self) -> None:
        pass


class Device:
    """A cell and both its sides, at a time that passes only while one of them sleeps."""

    def __init__(self, path: Path, layout: Layout = GPU) -> None:
        Cell.create(path)
        self.now_ns = NS_PER_S
        self.cell = Cell(path, lambda: self.now_ns)
        self.errors: list[str] = []
        self._later: list[tuple[int, Callable[[], None]]] = []
        self.layout = layout
        self.start_encode()
        self.start_prefill()

    def start_encode(self, patience_ns: int = PATIENCE_NS) -> None:
        self.encode_driver = Driver(self.layout)
        self.encode = EncodeSide(
            self.cell, self.encode_driver, self._on_error, patience_ns, self._sleep
        )

    def start_prefill(self, hold_ns: int = 0) -> None:
        self.prefill_driver = Driver(self.layout)
        self.prefill = PrefillSide(
            self.cell, self.prefill_driver, self._on_error, hold_ns, MAX_PAUSE_NS, self._sleep
        )

    def _on_error(self, error: DriverError) -> None:
        self.errors.append(str(error))

    def _sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS_PER_S)
        while self._later and self._later[0][0] <= self.now_ns:
            self._later.pop(0)[1]()

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        self._later.append((self.now_ns + delay_ns, call))

    def announce(self, units: int) -> None:
        self.cell.announce(units, LEASE_NS)

    def step(self) -> int:
        """What a whole step leaves."""
        leaves = self.prefill.begin()
        self.prefill.end()
        return leaves


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path / "cell")
    yield made
    made.cell.close()


# Both ---------------------------------------------------------------------------------------------


def test_a_batch_gets_its_units_and_prefill_the_rest(device: Device) -> None:
    device.announce(20)
    assert device.prefill.begin() == 24
    assert device.encode.begin() == 24
    assert device.prefill_driver.asked == [(Stage.PREFILL, 24)]
    assert device.encode_driver.asked == [(Stage.ENCODE, 24)]
    device.now_ns += 20 * MS
    device.encode.end()
    device.prefill.end()
    assert device.step() == 0, "everything while nothing is encoded"
    state = device.cell.state()
    assert (state.forwards, state.late, state.encode_units, state.encode_s) == (1, 0, 24, 0.02)
    assert (state.steps, state.narrow, state.prefill_switches) == (2, 1, 2)


def test_without_a_demand_all_units_are_shared(device: Device) -> None:
    assert device.step() == device.encode.begin() == 0
    device.encode.end()
    assert not device.prefill_driver.asked + device.encode_driver.asked
    assert device.cell.state().late == 0


def test_a_part_that_does_not_change_is_not_switched_to(device: Device) -> None:
    for _ in range(3):
        device.announce(24)
        assert (device.step(), device.encode.begin()) == (24, 24)
        device.encode.end()
        device.now_ns += MS
    assert len(device.prefill_driver.asked) == len(device.encode_driver.asked) == 1
    assert device.cell.state().encode_switches == 1


def test_a_second_forward_of_a_request_gets_its_units_as_well(device: Device) -> None:
    device.announce(24)
    for _ in range(2):
        assert device.encode.begin() == 24
        assert device.step() == 24
        device.encode.end()
        assert device.step() == 0


def test_a_forward_does_not_end_what_was_announced_since(device: Device) -> None:
    device.announce(24)
    device.encode.begin()
    device.now_ns += MS
    device.announce(40)
    device.encode.end()
    assert device.step() == 40


def test_a_forward_that_begins_after_its_lease_has_nothing(device: Device) -> None:
    device.announce(24)
    device.now_ns += LEASE_NS
    assert device.encode.begin() == 0
    assert device.step() == 0


def test_what_stands_is_left_between_batches(device: Device) -> None:
    device.cell.announce(HALF, None)
    for _ in range(2):
        assert (device.encode.begin(), device.step()) == (64, 64)
        device.encode.end()
        device.now_ns += 100 * LEASE_NS
        assert device.step() == 64
    assert device.encode_driver.asked == [(Stage.ENCODE, 64)]


def test_a_device_that_cannot_be_divided_is_shared(tmp_path: Path) -> None:
    device = Device(tmp_path / "cell", Indivisible(132, 8))
    device.announce(24)
    assert (device.prefill.begin(), device.encode.begin()) == (0, 0)
    assert device.cell.state().late == 0
    device.cell.close()


# Who waits for whom -------------------------------------------------------------------------------


def test_an_encoder_waits_for_a_step_that_began_before(device: Device) -> None:
    device.prefill.begin()
    device.announce(24)
    began_ns = device.now_ns
    device.after(5 * MS, device.prefill.end)
    assert device.encode.begin() == 24
    assert 5 * MS <= device.now_ns - began_ns < 5 * MS + POLL_NS
    assert device.cell.state().late == 0


def test_its_patience_ends_and_it_counts_itself_late(device: Device) -> None:
    device.prefill.begin()
    device.announce(24)
    began_ns = device.now_ns
    assert device.encode.begin() == 24
    assert PATIENCE_NS <= device.now_ns - began_ns < PATIENCE_NS + POLL_NS
    assert device.cell.state().late == 1


def test_without_patience_it_goes_ahead_at_once(device: Device) -> None:
    device.start_encode(patience_ns=0)
    device.prefill.begin()
    device.announce(24)
    began_ns = device.now_ns
    assert device.encode.begin() == 24
    assert device.now_ns == began_ns
    assert device.cell.state().late == 1


def test_it_does_not_wait_for_a_step_that_leaves_enough(device: Device) -> None:
    device.announce(40)
    device.prefill.begin()
    device.announce(24)
    began_ns = device.now_ns
    assert device.encode.begin() == 24
    assert (device.now_ns, device.cell.state().late) == (began_ns, 0)


def test_prefill_pauses_while_everything_is_demanded(tmp_path: Path) -> None:
    device = Device(tmp_path / "cell", Gate(4))
    device.announce(1)
    assert device.encode.begin() == 4
    assert not device.encode_driver.asked, "nothing to confine it to"
    device.after(8 * MS, device.encode.end)
    assert device.step() == 0
    state = device.cell.state()
    assert 0.008 <= state.paused_s < 0.009
    assert (state.forced, state.steps, state.narrow) == (0, 1, 0)
    device.cell.close()


def test_a_pause_is_bounded_and_the_step_has_everything_then(device: Device) -> None:
    device.cell.announce(ALL, None)
    began_ns = device.now_ns
    assert device.prefill.begin() == 0
    assert MAX_PAUSE_NS <= device.now_ns - began_ns <= MAX_PAUSE_NS + POLL_NS
    assert device.cell.state().forced == 1
    assert device.cell.left() == 0
    assert device.encode.begin() == 132
    assert device.cell.state().late == 1


def test_what_is_announced_while_prefill_decides_is_seen(device: Device) -> None:
    """Between its look at the demand and what it says of itself."""

    def hold(leaves: int) -> None:
        if leaves == 0:
            device.announce(24)
        said.append(leaves)
        Cell.hold(device.cell, leaves)

    said: list[int] = []
    device.cell.hold = hold  # type: ignore[method-assign]
    assert device.prefill.begin() == 24
    assert said == [0, IDLE, 24], "it takes back what it said first"


# Hold ---------------------------------------------------------------------------------------------


def test_prefill_stays_narrow_for_the_hold_and_not_longer(device: Device) -> None:
    device.start_prefill(HOLD_NS)
    device.announce(24)
    assert device.step() == 24
    device.announce(0)
    device.now_ns += HOLD_NS - 1
    assert device.step() == 24
    device.now_ns += 1
    assert device.step() == 0


def test_after_the_death_of_an_encoder_prefill_is_narrow_for_its_lease_and_the_hold(
    device: Device,
) -> None:
    device.start_prefill(HOLD_NS)
    device.announce(24)
    device.encode.begin()
    device.now_ns += LEASE_NS - 1
    assert device.step() == 24
    device.now_ns += HOLD_NS - 1
    assert device.step() == 24
    device.now_ns += 1
    assert device.step() == 0


# Steps that overlap -------------------------------------------------------------------------------


def test_of_two_steps_under_way_the_wider_one_counts(device: Device) -> None:
    device.prefill.begin()
    first = device.prefill.step
    device.announce(24)
    assert device.prefill.begin() == 24
    assert device.cell.left() == 0
    device.prefill.end(first)
    assert device.cell.left() == 24
    device.prefill.end(device.prefill.step)
    assert device.cell.left() == IDLE


def test_the_end_of_a_step_is_that_of_all_before_it(device: Device) -> None:
    for _ in range(3):
        device.prefill.begin()
    device.prefill.end(device.prefill.step - 1)
    assert device.cell.left() == 0
    device.prefill.end(device.prefill.step - 2)
    assert device.cell.left() == 0
    device.prefill.end()
    assert device.cell.left() == IDLE


def test_steps_may_end_in_another_thread(device: Device) -> None:
    def end() -> None:
        for number in range(1, 2001):
            while device.prefill.step < number:
                pass
            device.prefill.end(number)

    thread = threading.Thread(target=end)
    thread.start()
    for _ in range(2000):
        device.prefill.begin()
        assert device.prefill.step == device.cell.state().steps
    thread.join()
    device.prefill.end()
    assert device.cell.left() == IDLE


# Failures -----------------------------------------------------------------------------------------


def test_a_prefill_driver_that_fails_confines_nobody_from_then_on(device: Device) -> None:
    device.start_prefill(HOLD_NS)
    device.announce(24)
    assert (device.step(), device.encode.begin()) == (24, 24)
    device.encode.end()
    device.announce(40)
    device.prefill_driver.broken = True
    assert device.prefill.begin() == 0
    assert device.cell.left() == 0, "it says so"
    assert [device.step() for _ in range(3)] == [0, 0, 0]
    assert (device.encode.begin(), device.encode_driver.units) == (0, 0)
    assert device.prefill_driver.asked[-2:] == [(Stage.PREFILL, 40), (Stage.PREFILL, 0)]
    assert device.errors == ["no more"]
    assert device.cell.state().prefill_failed


def test_an_encode_driver_that_fails_confines_nobody_from_then_on(device: Device) -> None:
    device.start_prefill(HOLD_NS)
    device.announce(24)
    assert device.step() == 24
    device.encode_driver.broken = True
    assert device.encode.begin() == 0
    device.encode.end()
    device.announce(24)
    assert device.encode.begin() == 0
    assert (device.step(), device.prefill_driver.units) == (0, 0), "not even for the hold"
    assert device.encode_driver.asked == [(Stage.ENCODE, 24), (Stage.ENCODE, 0)]
    assert device.errors == ["no more"]
    assert device.cell.state().encode_failed


def test_nobody_pauses_for_a_side_that_failed(device: Device) -> None:
    device.announce(24)
    device.prefill_driver.broken = True
    device.step()
    began_ns = device.now_ns
    device.announce(ALL)
    assert (device.step(), device.encode.begin()) == (0, 0)
    assert device.now_ns == began_ns


def test_a_driver_that_cannot_even_let_go_is_reported_once(device: Device) -> None:
    class Stuck(Driver):
        def confine(self, stage: Stage, units: int) -> None:
            raise DriverError("stuck")

    device.encode = EncodeSide(device.cell, Stuck(), device._on_error)
    device.announce(24)
    for _ in range(2):
        assert device.encode.begin() == 0
        device.encode.end()
    assert device.errors == ["stuck"]


@pytest.mark.parametrize("gated", ["encode", "prefill"])
def test_a_side_that_could_not_divide_from_the_start_makes_them_take_turns(
    device: Device, gated: str
) -> None:
    whole, device.layout = device.layout, Gate(1)
    device.start_encode() if gated == "encode" else device.start_prefill()
    device.layout = whole
    assert device.step() == 0
    device.announce(24)
    device.encode.begin()
    assert device.encode_driver.units == 0, "it has everything"
    device.after(5 * MS, device.encode.end)
    began_ns = device.now_ns
    assert device.step() == 0
    assert device.now_ns - began_ns >= 5 * MS, "prefill paused"
    assert device.errors == []


# Warm-up ------------------------------------------------------------------------------------------


LEVELS = Levels(132, 8, 1, (8, 24, 120))


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.PREFILL])
def test_each_part_that_is_made_is_warmed_up_once_and_left(tmp_path: Path, stage: Stage) -> None:
    device = Device(tmp_path / "cell", LEVELS)
    encode = stage is Stage.ENCODE
    driver = device.encode_driver if encode else device.prefill_driver
    side = device.encode if encode else device.prefill
    worked: list[int] = []
    side.warm_up(lambda: worked.append(driver.units))
    assert worked == [8, 24, 120]
    assert driver.asked == [(stage, units) for units in (8, 24, 120, 0)]
    device.announce(20)
    assert side.begin() == 24
    device.cell.close()


@pytest.mark.parametrize("layout", [GPU, Layout(4), Gate(1), Indivisible(132)])
def test_parts_that_are_not_made_need_no_warm_up(tmp_path: Path, layout: Layout) -> None:
    device = Device(tmp_path / "cell", layout)
    for side in (device.encode, device.prefill):
        side.warm_up(lambda: pytest.fail("there is nothing to be made"))
    assert not device.encode_driver.asked + device.prefill_driver.asked
    device.cell.close()


def test_a_driver_that_fails_at_warm_up_is_reported_once(tmp_path: Path) -> None:
    device = Device(tmp_path / "cell", LEVELS)
    device.encode_driver.broken = True
    device.encode.warm_up(lambda: pytest.fail("it has no part"))
    assert device.errors == ["no more"]
    assert device.encode_driver.units == 0
    assert device.cell.state().encode_failed
    device.cell.close()


# Restarts -----------------------------------------------------------------------------------------


def test_an_engine_that_starts_again_takes_part_again(device: Device) -> None:
    device.announce(24)
    device.prefill_driver.broken = True
    device.prefill.begin()
    device.start_prefill()
    assert device.cell.left() == IDLE, "its last step died with it"
    assert (device.step(), device.encode.begin()) == (24, 24)
    device.start_encode()
    device.announce(40)
    assert (device.step(), device.encode.begin()) == (40, 40)
    assert device.cell.words[Word.PREFILL_CONFINES] == 0
    assert device.errors == ["no more"]


def test_a_prefill_engine_that_died_in_a_step_costs_the_encoder_its_patience(
    device: Device,
) -> None:
    device.prefill.begin()
    device.announce(24)
    began_ns = device.now_ns
    assert device.encode.begin() == 24
    assert device.now_ns - began_ns < PATIENCE_NS + POLL_NS

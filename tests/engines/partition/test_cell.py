import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from easerve.engines.partition.cell import FAILED, IDLE, PAGE_BYTES, Cell, Word
from easerve.policy.partition import ALL, HALF

MS = 1_000_000
LOW, HIGH = 0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210
WRITER = """
import sys
from pathlib import Path
from easerve.engines.partition.cell import Cell, Word
cell, values = Cell(Path(sys.argv[1])), list(map(int, sys.argv[2:]))
while True:
    for value in values:
        cell.words[Word.ANNOUNCED] = value
"""


class Clock:
    now_ns = 1000 * MS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cell(tmp_path: Path, clock: Clock) -> Iterator[Cell]:
    Cell.create(tmp_path / "cell")
    opened = Cell(tmp_path / "cell", clock)
    yield opened
    opened.close()


def test_a_page_is_private_and_begins_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cell"
    path.write_bytes(b"x")
    Cell.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    cell = Cell(path)
    assert len(cell.words) == PAGE_BYTES // 8
    assert not any(cell.words)
    assert cell.demanded() == 0
    assert cell.left() == IDLE
    cell.close()


def test_words_do_not_share_a_cache_line_with_those_of_another_writer() -> None:
    lines = [set[int](), set[int](), set[int]()]
    for name, word in vars(Word).items():
        if isinstance(word, int):
            prefill = name == "HELD" or name.startswith("PREFILL")
            lines[0 if name == "ANNOUNCED" else 2 if prefill else 1].add(word // 8)
    assert not lines[0] & lines[1] | lines[0] & lines[2] | lines[1] & lines[2]


def test_words_do_not_tear_between_processes(tmp_path: Path) -> None:
    path = tmp_path / "cell"
    Cell.create(path)
    cell = Cell(path)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path, str(LOW), str(HIGH)])
    try:
        while not cell.words[Word.ANNOUNCED]:
            assert writer.poll() is None
            os.sched_yield()
        seen, changes = LOW, 0
        for number in count():
            value = cell.words[Word.ANNOUNCED]
            assert value in (LOW, HIGH)
            changes += value != seen
            seen = value
            if number > 100_000 and changes > 10:
                break
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    cell.close()


def test_another_process_sees_what_is_announced(tmp_path: Path) -> None:
    path = tmp_path / "cell"
    Cell.create(path)
    cell = Cell(path)
    cell.announce(24, 60_000 * MS)
    reader = f"""if True:
        from pathlib import Path
        from easerve.engines.partition.cell import Cell
        print(Cell(Path({str(path)!r})).demanded())
    """
    done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True)
    assert done.stdout == "24\n", done.stderr
    cell.close()


@pytest.mark.parametrize("units", [1, 24, HALF, ALL])
@pytest.mark.parametrize("several", [False, True])
def test_an_announcement_lasts_as_long_as_its_lease(
    cell: Cell, clock: Clock, units: int, several: bool
) -> None:
    cell.announce(units, 5 * MS, several=several)
    assert cell.demanded() == units
    clock.now_ns += 5 * MS - 1
    assert cell.demanded() == units
    clock.now_ns += 1
    assert cell.demanded() == 0
    cell.announce(units, 5 * MS)
    assert cell.demanded() == units


def test_an_announcement_of_nothing_withdraws(cell: Cell) -> None:
    cell.announce(24, 5 * MS)
    cell.announce(0, 5 * MS)
    assert cell.demanded() == cell.announced() == 0


def test_a_standing_announcement_lasts_until_another(cell: Cell, clock: Clock) -> None:
    cell.announce(24, None)
    cell.serve(cell.announced())
    clock.now_ns += 10**18
    assert cell.demanded() == 24
    cell.announce(0, None)
    assert cell.demanded() == 0


def test_what_is_served_is_over_and_nothing_newer(cell: Cell, clock: Clock) -> None:
    cell.announce(24, 5 * MS)
    first = cell.announced()
    clock.now_ns += MS
    cell.announce(24, 5 * MS)
    cell.serve(first)
    assert cell.demanded() == 24
    cell.serve(cell.announced())
    assert cell.demanded() == 0
    cell.serve(0)
    assert cell.demanded() == 24, "it was for more than that"


def test_what_is_for_several_calls_is_not_over_with_a_forward(cell: Cell) -> None:
    cell.announce(24, 5 * MS, several=True)
    cell.serve(cell.announced())
    assert cell.demanded() == 24
    cell.announce(24, 5 * MS)
    assert cell.demanded() == 24, "the call that is left"
    cell.serve(cell.announced())
    assert cell.demanded() == 0
    cell.announce(0, 5 * MS, several=True)
    assert cell.announced() == 0


def test_a_renewal_while_it_is_read_is_no_end(cell: Cell, clock: Clock) -> None:
    """Between the word and the time."""
    cell.announce(24, 5 * MS)

    def late_ns() -> int:
        clock.now_ns += 4 * MS
        cell.clock_ns = clock
        cell.announce(40, 5 * MS)
        clock.now_ns += 4 * MS
        return clock.now_ns

    cell.clock_ns = late_ns
    assert cell.demanded() == 40


def test_what_prefill_holds(cell: Cell) -> None:
    cell.hold(0)
    assert cell.left() == 0
    cell.hold(24)
    assert cell.left() == 24
    cell.hold(IDLE)
    assert cell.left() == IDLE
    assert cell.state().leaves is None


def test_the_state_tells_counts_and_seconds(cell: Cell) -> None:
    cell.announce(24, 5 * MS)
    cell.hold(8)
    for number, word in enumerate(
        (
            Word.ENCODE_FORWARDS,
            Word.ENCODE_LATE,
            Word.ENCODE_UNITS,
            Word.ENCODE_SWITCHES,
            Word.PREFILL_STEPS,
            Word.PREFILL_NARROW,
            Word.PREFILL_FORCED,
            Word.PREFILL_SWITCHES,
        )
    ):
        cell.add(word, number)
        cell.add(word)
    for word in (Word.ENCODE_NS, Word.ENCODE_SWITCH_NS, Word.PREFILL_SWITCH_NS):
        cell.add(word, 500 * MS)
    cell.add(Word.PREFILL_PAUSED_NS, 250 * MS)
    cell.words[Word.PREFILL_CONFINES] = FAILED
    state = cell.state()
    assert (state.demanded, state.leaves) == (24, 8)
    assert (state.forwards, state.late, state.encode_units, state.encode_switches) == (1, 2, 3, 4)
    assert (state.steps, state.narrow, state.forced, state.prefill_switches) == (5, 6, 7, 8)
    assert state.encode_s == state.encode_switch_s == state.prefill_switch_s == 0.5
    assert state.paused_s == 0.25
    assert (state.encode_failed, state.prefill_failed) == (False, True)

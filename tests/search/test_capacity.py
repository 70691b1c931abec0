import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.config import ConfigError
from easerve.search.capacity import Cell, Key, Row, Table, best, kept, most_per_s, opened
from easerve.types import Stage

KEY = Key("a GPU", "a model", "easerve 0.5, vllm 0.32, bfloat16", "1024 tokens, a picture")
CELLS = [Cell(Stage.ENCODE, 1, batch) for batch in (1, 2, 4)] + [Cell(Stage.DECODE, 2, 8)]


def row(cell: Cell) -> Row:
    return Row(*cell, per_s=1.5 * cell.batch, seconds=0.25)


class Making:
    """Stops, as a kill does, before the row of that number."""

    def __init__(self, stops_before: int | None = None) -> None:
        self.asked: list[Cell] = []
        self._stops_before = stops_before

    def __call__(self, cells: Sequence[Cell]) -> Iterator[Row]:
        for number, cell in enumerate(cells):
            if number == self._stops_before:
                raise KeyboardInterrupt
            self.asked.append(cell)
            yield row(cell)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    first, again = Making(), Making()
    path = tmp_path / "there" / "capacity.jsonl"
    assert kept(path, KEY, CELLS, first) == tuple(map(row, CELLS))
    assert kept(path, KEY, CELLS, again) == tuple(map(row, CELLS))
    assert (first.asked, again.asked) == (CELLS, [])


@pytest.mark.parametrize("stops_before", range(4))
def test_a_run_that_ends_early_is_taken_up_where_it_ended(
    tmp_path: Path, stops_before: int
) -> None:
    path, rest, said = tmp_path / "capacity.jsonl", Making(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        kept(path, KEY, CELLS, Making(stops_before))
    assert kept(path, KEY, CELLS, rest, said.append) == tuple(map(row, CELLS))
    assert rest.asked == CELLS[stops_before:]
    assert len(said) == len(rest.asked) + (stops_before > 0)


def test_a_row_that_was_being_written_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "capacity.jsonl"
    kept(path, KEY, CELLS, Making())
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        making = Making()
        assert kept(path, KEY, CELLS, making) == tuple(map(row, CELLS))
        assert making.asked == CELLS[-1:]
        assert path.read_bytes() == whole


KILLED = """
    import sys, time
    from pathlib import Path
    from tests.search.test_capacity import CELLS, KEY, row
    from easerve.search.capacity import kept

    def make(cells):
        for cell in cells:
            yield row(cell)
            print(cell.batch, flush=True)
            if cell.batch == 2:
                time.sleep(60)

    kept(Path(sys.argv[1]), KEY, CELLS, make)
"""


def test_a_killed_process_leaves_its_rows_and_no_lock(tmp_path: Path) -> None:
    path, making = tmp_path / "capacity.jsonl", Making()
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
        with pytest.raises(ConfigError, match=r"capacity\.jsonl: another process measures into it"):
            kept(path, KEY, CELLS, making)
        os.kill(process.pid, signal.SIGKILL)
    kept(path, KEY, CELLS, making)
    assert making.asked == CELLS[2:]


def test_fresh_measures_all_again_also_after_a_stop(tmp_path: Path) -> None:
    path, rest = tmp_path / "capacity.jsonl", Making()
    kept(path, KEY, CELLS, Making())
    with pytest.raises(KeyboardInterrupt):
        kept(path, KEY, CELLS, Making(1), fresh=True)
    kept(path, KEY, CELLS, rest)
    assert rest.asked == CELLS[1:]


@pytest.mark.parametrize("field", ["device", "model", "versions", "workload"])
def test_rows_of_another_key_stay_and_do_not_count(tmp_path: Path, field: str) -> None:
    path, other, again = tmp_path / "capacity.jsonl", Making(), Making()
    kept(path, KEY, CELLS, Making())
    kept(path, replace(KEY, **{field: "another"}), CELLS, other)
    kept(path, KEY, CELLS, again)
    assert (other.asked, again.asked) == (CELLS, [])


def test_a_cell_without_a_row_is_asked_for_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "capacity.jsonl", list[Sequence[Cell]]()

    def refuse(cells: Sequence[Cell]) -> list[Row]:
        asked.append(cells)
        return []

    assert kept(path, KEY, CELLS, refuse) == kept(path, KEY, CELLS, refuse) == ()
    assert asked == [CELLS, CELLS]


def test_what_is_asked_for_decides_not_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "capacity.jsonl"
    kept(path, KEY, CELLS, Making())
    assert kept(path, KEY, CELLS[::-2], Making()) == tuple(map(row, CELLS[::-2]))


@pytest.mark.parametrize("content", ["{}\n", "x\n", "[1]\n", "device: cpu", '{"key": 1', "1\n"])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "capacity.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"capacity\.jsonl: line 1 is no row of a capacity"):
        kept(path, KEY, CELLS, Making())
    assert path.read_text() == content


def test_a_row_that_cannot_be_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "capacity.jsonl"
    kept(path, KEY, CELLS, Making())
    path.write_text(path.read_text().replace('"per_s": 3.0', '"per_s": -3.0'))
    with pytest.raises(ConfigError, match="line 3 is no row"):
        kept(path, KEY, CELLS, Making())


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=f"{tmp_path}: Is a directory"),
        opened(tmp_path, KEY),
    ):
        pass


def test_errors_of_what_measures_pass_as_they_are(tmp_path: Path) -> None:
    with (
        pytest.raises(ConnectionResetError),
        opened(tmp_path / "capacity.jsonl", KEY),
    ):
        raise ConnectionResetError


def test_a_later_row_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path, better = tmp_path / "capacity.jsonl", replace(row(CELLS[0]), per_s=9.0)
    with opened(path, KEY) as store:
        store.add(row(CELLS[0]))
        store.add(better)
    assert kept(path, KEY, CELLS[:1], Making()) == (better,)


RATES = st.floats(1e-6, 1e9) | st.just(math.inf)
ROWS = st.builds(
    Row, st.sampled_from(Stage), st.integers(1, 8), st.integers(1, 64), RATES, st.floats(0, 1e6)
)


@given(st.lists(ROWS))
def test_as_json_and_back_is_the_same(rows: list[Row]) -> None:
    table = Table(tuple(rows))
    text = json.dumps(table.to_json(), allow_nan=False)
    assert Table.from_json(json.loads(text)) == table


@settings(max_examples=20)
@given(st.lists(ROWS, unique_by=lambda row: row.cell, max_size=5))
def test_the_file_gives_back_what_it_was_given(rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, cells = Path(folder) / "capacity.jsonl", [row.cell for row in rows]
        kept(path, KEY, cells, lambda missing: rows)
        assert kept(path, KEY, cells, Making()) == tuple(rows)


def test_rows_of_an_engine_are_in_order_of_their_batch() -> None:
    table = Table(tuple(map(row, reversed(CELLS))))
    assert [each.batch for each in table.rows(Stage.ENCODE, 1)] == [1, 2, 4]
    assert table.rows(Stage.ENCODE, 2) == []


def test_between_two_rows_it_is_straight() -> None:
    rows = [Row(Stage.DECODE, 1, 8, 1.0, 0.04), Row(Stage.DECODE, 1, 16, 1.8, 0.06)]
    assert most_per_s(rows, 0.05) == pytest.approx(1.4)
    assert most_per_s(rows, 1.0, max_batch=10) == pytest.approx(1.2)
    assert most_per_s(rows, 0.045, max_batch=14) == pytest.approx(1.2)
    assert most_per_s(rows, 1.0) == most_per_s(rows, 0.06, max_batch=16) == 1.8
    assert most_per_s(rows, 0.03) == most_per_s(rows, 1.0, max_batch=4) == 0.0


@given(st.lists(ROWS, unique_by=lambda row: row.batch), st.floats(0, 1e6), st.integers(1, 64))
def test_between_rows_no_more_is_done_than_the_best_of_all(
    rows: list[Row], max_s: float, max_batch: int
) -> None:
    rows.sort(key=lambda row: row.batch)
    found, legal = most_per_s(rows, max_s, max_batch), best(rows, max_s, max_batch)
    assert found >= (0.0 if legal is None else legal.per_s)
    assert found <= max((row.per_s for row in rows), default=0.0) * (1 + 1e-9)


@given(st.lists(ROWS), st.floats(0, 1e6), st.integers(1, 64))
def test_the_best_row_is_the_best_of_those_that_keep_the_promise(
    rows: list[Row], max_s: float, max_batch: int
) -> None:
    found = best(rows, max_s, max_batch)
    legal = [each for each in rows if each.seconds <= max_s and each.batch <= max_batch]
    if found is None:
        assert not legal
    else:
        assert found in legal
        assert found.per_s == max(each.per_s for each in legal)


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"batch": 0}, "encode on 1, batch 0: both are at least 1"),
        ({"per_s": 0.0}, "encode on 1, batch 1: 0.0 requests per second cannot be"),
        ({"per_s": math.nan}, "nan requests per second cannot be"),
        ({"seconds": -1.0}, r"-1\.0 seconds cannot be"),
        ({"seconds": math.inf}, "inf seconds cannot be"),
    ],
)
def test_a_row_that_cannot_be_raises(over: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(row(CELLS[0]), **over)

import math
from pathlib import Path

import pytest

from easerve.config import ConfigError
from easerve.search.capacity import Table
from easerve.search.modelled import capacities
from easerve.sim.bound import SLACK, bound_per_s
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario, read
from easerve.sim.simulate import make_world, simulate
from easerve.types import Stage
from tests.sim.scenarios import write


def scenario(tmp_path: Path, **workload: object) -> Scenario:
    return read(write(tmp_path / "s.yaml", workload=workload))


def rates(table: Table, stage: Stage, tp: int) -> list[float]:
    return [row.per_s for row in table.rows(stage, tp)]


def test_there_are_rows_of_all_that_is_asked_for(tmp_path: Path) -> None:
    table = capacities(scenario(tmp_path), (2, 4), batches=(1, 8))
    assert [row.batch for row in table.rows(Stage.ENCODE, 1)] == [1, 8]
    for tp in (2, 4):
        assert len(rates(table, Stage.PREFILL, tp)) == 1
        assert table.rows(Stage.DECODE, tp)[0].batch == 1
    assert not table.rows(Stage.DECODE, 1)


def test_what_a_decode_engine_does_is_what_its_steps_take(tmp_path: Path) -> None:
    """128 tokens take 127 steps."""
    one = capacities(scenario(tmp_path), (2,)).rows(Stage.DECODE, 2)[0]
    assert one.per_s == pytest.approx(1 / (127 * one.seconds))


def test_more_sequences_take_longer_steps_and_do_more(tmp_path: Path) -> None:
    rows = capacities(scenario(tmp_path), (2,)).rows(Stage.DECODE, 2)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert [row.per_s for row in rows] == sorted(row.per_s for row in rows)
    assert rows[-1].batch == 30  # 80 thousand tokens of KV cache, 2650 for each


def test_decode_is_bounded_by_slots_and_by_a_kv_cache_that_is_given(tmp_path: Path) -> None:
    small = read(write(tmp_path / "s.yaml", systems={"easerve": {"decode": {"max_num_seqs": 8}}}))
    assert capacities(small, (2,)).rows(Stage.DECODE, 2)[-1].batch == 8
    given = {"easerve": {"decode": {"kv_cache_tokens": 4000}}}
    tiny = read(write(tmp_path / "s.yaml", systems=given))
    assert [row.batch for row in capacities(tiny, (2,)).rows(Stage.DECODE, 2)] == [1]


def test_the_host_of_an_encoder_may_be_what_is_slow(tmp_path: Path) -> None:
    slow = {"easerve": {"encode": {"item_s": 0.5}}}
    table = capacities(read(write(tmp_path / "s.yaml", systems=slow)), (2,), batches=(1, 4))
    assert rates(table, Stage.ENCODE, 1) == [2.0, 2.0]
    assert [row.seconds > 0.5 * row.batch for row in table.rows(Stage.ENCODE, 1)] == [True, True]


def test_larger_batches_spare_calls(tmp_path: Path) -> None:
    none = {"easerve": {"encode": {"item_s": 0.0, "dispatch_s": 0.1}}}
    table = capacities(read(write(tmp_path / "s.yaml", systems=none)), (2,), batches=(1, 4))
    one, four = table.rows(Stage.ENCODE, 1)
    assert four.per_s > 1.5 * one.per_s


def test_text_asks_nothing_of_an_encoder(tmp_path: Path) -> None:
    asked: dict[str, object] = {
        "preset": None,
        "items": [{}],
        "text_tokens": 100,
        "output_tokens": 1,
    }
    table = capacities(scenario(tmp_path, **asked), (2,))
    encode, decode = table.rows(Stage.ENCODE, 1)[0], table.rows(Stage.DECODE, 2)[0]
    assert (encode.per_s, encode.seconds) == (math.inf, 0.0)
    assert decode.per_s == math.inf


def test_an_engine_that_the_memory_does_not_hold_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 1"):
        capacities(scenario(tmp_path), (1, 2))


def test_a_run_does_no_more_than_its_slowest_stage(tmp_path: Path) -> None:
    """And the bound of runs, which knows nothing of hosts, is no lower."""
    alone = {"easerve": {"local_prefill": None, "partition": None, "policy": {"remote_share": 1.0}}}
    over = {"num_requests": 60, "rate_per_s": 20}
    found = read(write(tmp_path / "s.yaml", systems=alone, workload=over))
    table = capacities(found, (2,))
    best = {stage: max(row.per_s for row in table.rows(stage, 2)) for stage in list(Stage)[1:]}
    most = min(best[Stage.PREFILL], 2 * best[Stage.DECODE])
    run = simulate(found, "easerve")
    assert len(run.records) / run.end_s < most
    bound = bound_per_s(found.configs["easerve"], make_world(found, Run()))
    assert most <= bound * SLACK

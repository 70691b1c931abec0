import json
import os

from easerve.cli.bench.partition_cell import NUM_THREADS, READ, measure, section


def test_what_a_step_pays_is_measured() -> None:
    cores, ticks = os.sched_getaffinity(0), list[str]()
    result = measure(20, ticks.append)
    rows = {row["name"]: row for row in result["cell"]}
    assert len(ticks) == len(rows) == 7 + (len(NUM_THREADS) if len(cores) > 1 else 0)
    assert 0 < rows[READ]["median_ns"] <= rows[READ]["p95_ns"]
    assert result["goal_met"] == (rows[READ]["median_ns"] < result["goal_ns"])
    assert os.sched_getaffinity(0) == cores, "it leaves no trace"
    assert json.loads(json.dumps(result)) == result
    shown = section(result)
    assert "less than 1.00 us" in shown.text

import json
from pathlib import Path
from typing import Any

import pytest
from scripts.validation_table import BEGIN, END, TIMES, lines, main

NAMES = (*TIMES, "throughput_per_s", "busy.encode", "busy.prefill", "busy.decode")


def row(rate_per_s: float, others_cores: float) -> dict[str, Any]:
    return {
        "rate_per_s": rate_per_s,
        "measured": dict.fromkeys(NAMES, 0.02),
        "simulated": dict.fromkeys(NAMES, 0.01),
        "error": dict.fromkeys(NAMES, -0.5),
        "slower": 0.5,
        "others_cores": others_cores,
    }


def result(*others_cores: float, **over: Any) -> dict[str, Any]:
    rows = [row(rate, cores) for rate, cores in zip((2.0, 7.5), others_cores, strict=True)]
    return {
        "rates": rows,
        "num_requests": 400,
        "rounds": 2,
        "seed": 3,
        "num_cores": 2,
        "profile": "measured in this run",
        **over,
    }


def test_the_table_names_the_command_that_made_it() -> None:
    first, *_ = lines(result(0.1, 0.0))
    asked = "easerve bench twin --rates 2,7.5 --requests 200 --rounds 2 --seed 3"
    assert first == f"Made by `{asked} --json`:"
    first, *_ = lines(result(0.1, 0.0, profile="a/b.yaml, 2026-01-01 10:00 (other machine)"))
    assert first == f"Made by `{asked} --profile a/b.yaml --json`:"


def test_a_column_during_which_others_worked_is_marked() -> None:
    found = list(lines(result(0.1, 0.11)))
    assert "|  | 2/s | 7.5/s, not usable |" in found
    assert any(line.startswith("**Not usable**: 1 of 2 columns, ") for line in found)
    assert "| TTFT mean | 20 · 10 · -50 % | 20 · 10 · -50 % |" in found
    assert not any("usable" in line for line in lines(result(0.1, 0.0)))


def test_the_place_between_the_markers_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, made = tmp_path / "page.md", tmp_path / "twin.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    made.write_text(json.dumps(result(0.0, 0.0)))
    monkeypatch.setattr("sys.argv", ["", str(made), str(page)])
    main()
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nMade by")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    content = result(0.0, 0.0)
    del content["seed"]
    made.write_text(json.dumps(content))
    with pytest.raises(
        SystemExit, match=r"twin\.json: easerve bench twin --json of today .*'seed'"
    ):
        main()
    assert page.read_text() == text

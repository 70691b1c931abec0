import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts.bench_tools.cases import CASES, COUNTS, Case, Figures, scripted
from scripts.bench_tools.page import (
    BEGIN,
    END,
    ROWS,
    SCRIPT,
    PageError,
    Results,
    agrees,
    disagreements,
    lines,
    write,
)
from scripts.bench_tools.tools import Tool, ToolError, of_aiperf, of_easerve, of_vllm, tools

STEADY = CASES[0]
SPREAD = {"mean": 0.4, "p50": 0.41, "p90": 0.42, "p99": 0.43}
EASERVE = {
    **dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "latency_s"), SPREAD),
    "throughput_per_s": 9.0,
    "output_tokens_per_s": 144.0,
    "goodput_per_s": {"ttft=1s,tpot=50ms": 8.0},
    "completed": 9,
    "failed": 1,
    "rejected": 2,
    "timed_out": 3,
    "cancelled": 4,
}
VLLM = {
    **{
        f"{part}_{name}_ms": 1e3 * value
        for name in ("ttft", "tpot", "itl", "e2el")
        for part, value in SPREAD.items()
    },
    "request_throughput": 9.0,
    "output_throughput": 144.0,
    "request_goodput": 8.0,
    "completed": 9,
    "failed": 10,
}
AIPERF_SPREAD = {"unit": "ms", "avg": 400.0, "p50": 410.0, "p99": 430.0}
AIPERF: dict[str, Any] = {
    "time_to_first_token": AIPERF_SPREAD,
    "inter_token_latency": AIPERF_SPREAD,
    "inter_chunk_latency": AIPERF_SPREAD,
    "request_latency": AIPERF_SPREAD,
    "request_throughput": {"avg": 9.0},
    "output_token_throughput": {"avg": 144.0},
    "goodput": {"avg": 8.0},
    "request_count": {"avg": 9.0},
    "error_request_count": {"avg": 10.0},
}


def test_the_tools_figures_have_the_same_names_and_units() -> None:
    ours = of_easerve(EASERVE)
    assert set(ours) == set(ROWS) == set(scripted(STEADY))
    assert of_vllm(VLLM) == pytest.approx(ours)
    assert of_aiperf(AIPERF) == pytest.approx(ours)


def test_what_aiperf_leaves_out_did_not_happen() -> None:
    figures = of_aiperf({})
    assert (figures["completed"], figures["failed"], figures["ttft_s.p50"]) == (0, 0, None)


def test_what_the_script_says_of_plain_answers() -> None:
    figures = scripted(STEADY)
    expected = {"ttft_s": 0.4, "tpot_s": 0.04, "itl_s": 0.04, "latency_s": 1.0}
    for name, value in expected.items():
        for part in ("mean", "p50", "p99"):
            assert figures[f"{name}.{part}"] == pytest.approx(value)
    assert figures["throughput_per_s"] == pytest.approx(100 / 11)
    assert figures["output_tokens_per_s"] == pytest.approx(1600 / 11)
    assert (figures["completed"], figures["failed"]) == (100, 0)


def test_what_the_script_says_of_a_closed_loop() -> None:
    [case] = [case for case in CASES if case.concurrency is not None]
    assert scripted(case)["throughput_per_s"] == pytest.approx(60 / 15)


def test_what_the_script_says_of_failures_and_forms() -> None:
    case = Case("", "", steps="ok,slow,err500,cut", num_requests=8)
    figures = scripted(case)
    assert (figures["completed"], figures["failed"]) == (4, 4)
    assert figures["ttft_s.mean"] == pytest.approx(2.2)
    assert figures["ttft_s.p99"] == 4.0
    assert figures["throughput_per_s"] is None
    forms = scripted(Case("", "", steps="one,bundle", num_requests=4))
    assert forms["itl_s.mean"] == pytest.approx(0.6)
    assert forms["tpot_s.p50"] == 0.04
    assert forms["latency_s.mean"] == pytest.approx(0.7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_what_is_to_agree_is_something_that_the_script_says(case: Case) -> None:
    figures = scripted(case)
    assert [name for name in case.agreed if figures[name] is None] == []
    assert case.num_requests % len(case.script.steps) == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_command_lines(case: Case, tmp_path: Path) -> None:
    for tool in tools("vllm", "aiperf"):
        command = tool.command(case, "http://127.0.0.1:1", tmp_path)
        assert str(case.num_requests) in command
        assert "http://127.0.0.1:1" in command
        if case.concurrency is not None:
            assert str(case.concurrency) in command
        else:
            assert "10" in command[command.index(tool_rate(tool)) + 1]


def tool_rate(tool: Tool) -> str:
    return "--rate" if tool.name == "EAServe" else "--request-rate"


def test_a_tool_that_measures_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.bench_tools.tools.server", Nobody)
    code = "import sys; sys.exit('no such option')"
    tool = Tool("x", lambda *_: [sys.executable, "-S", "-c", code], "x.json", of_vllm)
    with pytest.raises(ToolError, match="x ended with 1, no result: no such option"):
        tool.run(STEADY)


def test_a_tools_result_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.bench_tools.tools.server", Nobody)

    def command(_: Case, __: str, folder: Path) -> list[str]:
        (folder / "x.json").write_text(json.dumps(VLLM))
        return [sys.executable, "-S", "-c", ""]

    assert Tool("x", command, "x.json", of_vllm).run(STEADY) == of_vllm(VLLM)


class Nobody:
    """In the place of a server."""

    def __init__(self, case: Case) -> None:
        pass

    def __enter__(self) -> str:
        return "http://127.0.0.1:1"

    def __exit__(self, *_: object) -> None:
        pass


def results(changed: Figures | None = None) -> Results:
    by_script = scripted(STEADY)
    theirs = by_script | (changed or {})
    return [(STEADY, {SCRIPT: by_script, "EAServe": by_script, "vLLM": theirs})]


def test_figures_agree_within_three_percent() -> None:
    assert agrees(0.412, 0.4)
    assert not agrees(0.413, 0.4)
    assert not agrees(None, 0.4)
    assert agrees(1.0, None)
    assert agrees(0, 0)
    assert not agrees(1, 0)


def test_disagreements_are_those_that_should_not_be() -> None:
    assert disagreements(results()) == []
    assert disagreements(results({"itl_s.mean": 0.1})) == []
    [wrong] = disagreements(results({"ttft_s.mean": 0.5}))
    assert wrong == "At a constant rate: vLLM: TTFT mean, ms: 0.5, by the script 0.4"
    assert len(disagreements(results(dict.fromkeys(COUNTS)))) == 2


def test_a_table_has_all_figures_side_by_side() -> None:
    table = list(lines(results({"ttft_s.mean": 0.5, "completed": 90, "goodput_per_s": None})))
    assert "|  | script | EAServe | vLLM | vLLM / EAServe |" in table
    assert "| TTFT mean, ms | 400.0 | 400.0 | **500.0** | 1.250 |" in table
    assert "| completed | 100 | 100 | **90** | 0.900 |" in table
    assert "| failed | 0 | 0 | 0 | – |" in table
    assert "| goodput, requests/s | 9.09 | 9.09 | – | – |" in table


def test_only_what_is_between_the_marks_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, ["head"], results())
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nhead\n\n### At a constant rate")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    page.write_text("nothing")
    with pytest.raises(PageError, match="expected one place"):
        write(page, [], results())


def test_the_page_has_its_place() -> None:
    page = Path(__file__).parents[1] / "docs/bench-tools.md"
    assert page.read_text().count(BEGIN) == page.read_text().count(END) == 1

"""``easerve report`` as a person uses it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easerve.bench.drawings import png
from easerve.bench.report import Chart, Section, Series
from easerve.cli import report as command
from tests.bench.drawn_results import FAST, SLOW, bench, goodput, simulated
from tests.cli.conftest import Easerve
from tests.sim.scenarios import write as write_scenario

Write = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, result: Any) -> Path:
        path = tmp_path / name
        path.write_text(result if isinstance(result, str) else json.dumps(result))
        return path

    return write


def test_tables_go_to_the_terminal(easerve: Easerve, write: Write) -> None:
    ended = easerve("report", write("r.json", bench(SLOW)))
    assert ended.code == 0
    for words in ("Goodput: requests that met the", "Times of completed", "What was run: vllm"):
        assert words in ended.out
    assert "HTTP 500: engine died while it was <busy> [/red] & more" in ended.out
    assert "Over time" not in ended.out  # without a table it would be text about charts


def test_results_are_compared_on_one_page(easerve: Easerve, write: Write, tmp_path: Path) -> None:
    paths = [
        write("a.json", bench(FAST, 4.0)),
        write("b.json", bench(SLOW, 4.0)),
        write("c.json", goodput(SLOW)),
        write("d.json", simulated(FAST)),
    ]
    page = tmp_path / "out.html"
    ended = easerve("report", *paths, "--html", page)
    assert (ended.code, ended.out) == (0, f"report: {page}\n")
    text = page.read_text()
    assert "<title>EAServe report: easerve and vllm</title>" in text
    for words in ("Highest rate at which", "easerve (simulated)", "vllm (measured)"):
        assert words in text
    assert len(text) < 6 << 20


def test_a_page_has_the_title_that_was_asked_for(
    easerve: Easerve, write: Write, tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    assert (
        easerve("report", write("a.json", bench()), "--html", page, "--title", "<mine>").code == 0
    )
    assert "<title>&lt;mine&gt;</title>" in page.read_text()


def test_an_invalid_run_is_loud(easerve: Easerve, write: Write) -> None:
    bad = bench(valid=False, invalid_because=["the client [was] late"], goodput_per_s=None)
    ended = easerve("report", write("r.json", bad))
    assert ended.out.startswith("INVALID: easerve: the client [was] late\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "r.json: this is not JSON: "),
        ('{"a": NaN}', "r.json: this is not JSON: "),
        ("[1]", "r.json: no key 'kind'; a result has one of bench, goodput, simulate, bench-"),
        ("{}", "r.json: no key 'kind'"),
        ({"kind": "novel"}, "r.json: kind 'novel' is none of bench, goodput"),
        ({"kind": ["bench"]}, "r.json: kind ['bench'] is none of"),
        ({"kind": "bench"}, "r.json: Object missing required field `system`"),
        ({"kind": "goodput", "system": "x"}, "r.json: Object missing required field"),
        ({"kind": "simulate", "systems": {"a": {}}}, "r.json: Object missing required field"),
        ({"kind": "simulate", "runs": [1]}, "r.json: Expected `object`, got `int`"),
        ({"kind": "bench-twin"}, "r.json: no key 'rates', which a bench-twin has"),
        ({"kind": "bench-twin", "rates": 1}, "r.json: not as a bench-twin is written: "),
    ],
)
def test_what_is_no_result_is_refused(
    easerve: Easerve, write: Write, content: Any, words: str
) -> None:
    ended = easerve("report", write("r.json", content))
    assert ended.code == 2
    assert words in ended.err


def test_files_that_cannot_be_read_or_written(
    easerve: Easerve, write: Write, tmp_path: Path
) -> None:
    there = write("r.json", bench())
    ended = easerve("report", tmp_path / "absent.json")
    assert (ended.code, "absent.json: No such file" in ended.err) == (2, True)
    ended = easerve("report", there, "--html", tmp_path / "no" / "out.html")
    assert (ended.code, "out.html: No such file" in ended.err) == (2, True)
    ended = easerve("report", there, "--html", there)
    assert (ended.code, "is one of the results" in ended.err) == (2, True)
    ended = easerve("report", there, "--png", there / "folder")
    assert ended.code in (1, 2)
    assert easerve("report").code == 2


def test_other_benches_are_drawn_by_their_own(easerve: Easerve, write: Write) -> None:
    """Each on its own, and after runs that are compared."""
    served: dict[str, Any] = {
        "throughput_per_s": 100.0,
        "batch_mean": 4.0,
        "busy_share": 0.5,
        "not_completed": 0,
    }
    served |= {name: {"mean": 0.05, "p99": 0.2} for name in ("ttft_s", "tpot_s")}
    flow = {"systems": {"credits": served}, "tpot_alone_s": 0.005, "tpot_promise_s": 0.01}
    result = {"kind": "bench-flow", "engines": flow}
    ended = easerve("report", write("flow.json", result), write("run.json", bench()))
    assert ended.code == 0
    assert ended.out.index("Goodput: requests") < ended.out.index("A burst, and credits")


def test_every_kind_has_a_function_that_draws_it() -> None:
    from importlib import import_module

    for module, name in command.DRAWN_BY.values():
        assert callable(getattr(import_module(module), name))


def test_files_of_pictures_are_named_by_titles() -> None:
    def chart(title: str) -> Chart:
        return Chart(title, "x", "y", [Series("a", [1], [1])])

    sections = [
        Section("One", parts=[chart("TTFT, P99: all"), chart("Queue"), chart("???")]),
        Section("Two", parts=[chart("Queue"), chart("a" * 200)]),
        Section("Two", parts=[chart("Queue")]),
    ]
    names = [name for name, _ in png.named(sections)]
    assert names == [
        "ttft-p99-all.png",
        "one-queue.png",
        "chart.png",
        "two-queue.png",
        f"{'a' * 80}.png",
        "two-queue-2.png",
    ]


def test_pictures_need_kaleido(
    easerve: Easerve, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    ended = easerve("report", write("r.json", bench()), "--png", tmp_path / "out")
    assert ended.code == 1
    assert ended.err == "easerve: PNG files need kaleido: pip install 'easerve[png]'\n"
    assert not (tmp_path / "out").exists()


def test_results_of_benches_say_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from easerve.cli.bench.command import Output, run_measured

    async def measured(console: Console) -> dict[str, Any]:
        return {"a": 1}

    def drawn(result: dict[str, Any]) -> list[Section]:
        assert result == {"a": 1}  # what draws it takes all keys for its own
        return []

    assert run_measured(measured, drawn, Output(True, None), kind="bench-flow") == 0
    assert json.loads(capsys.readouterr().out) == {"kind": "bench-flow", "a": 1}


def test_what_simulate_writes_can_be_drawn(easerve: Easerve, write: Write, tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path / "scenario.yaml", systems={"easerve": {}, "vllm": {}})
    for over in ((), ("--system", "all"), ("--system", "all", "--rate", "1,2")):
        ended = easerve("simulate", scenario, "--json", *over)
        assert json.loads(ended.out)["kind"] == "simulate"
        drawn = easerve("report", write("r.json", ended.out))
        assert (drawn.code, drawn.err) == (0, "")
        assert "nothing was measured" in drawn.out

"""``easerve bench goodput`` and ``bench reference``."""

import asyncio
import io
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from easerve.bench import loop
from easerve.bench.client import LoadError
from easerve.bench.drawings import results
from easerve.bench.reference import Reference, make
from easerve.bench.run import Run
from easerve.bench.sample import Health, Sample
from easerve.cli.bench import goodput_shown
from easerve.cli.bench.asked import server, source
from easerve.cli.bench.command import show
from easerve.cli.bench.goodput import Offered
from easerve.cli.bench.goodput_search import Load, Plan, content_seed, searched
from easerve.cli.bench.goodput_shown import Result, Told
from easerve.cli.bench.run import Promises
from easerve.config import ConfigError, read_section
from easerve.goodput import Record, Slo
from tests.bench.scripted import MODEL, Scripted

from .conftest import Easerve
from .scripted import scripted

SERVICE_S = 0.1
SLOS = {"quick": Slo(0.25), "slow": Slo(2.0), "never": Slo(0.01)}
HEAD = {"system": "ours", "model": "m", "modality": "text", "workload": {"modality": "text"}}


class Queue:
    """One server that answers in ``SERVICE_S``, one request after the other; virtual."""

    def __init__(self, spoil: Callable[[Load, Run], Run] = lambda load, run: run) -> None:
        self.loads: list[Load] = []
        self._spoil = spoil

    async def __call__(self, load: Load, slos: Mapping[str, Slo]) -> Run:
        self.loads.append(load)
        rng, at_s, free_s = random.Random(load.seed), 0.0, 0.0
        records = []
        for _ in range(load.num_requests):
            at_s = free_s if load.rate_per_s is None else at_s + rng.expovariate(load.rate_per_s)
            free_s = max(at_s, free_s) + SERVICE_S
            records.append(Record(at_s, at_s, free_s, free_s, 1, "completed"))
        run = Run([Sample(record) for record in records], [], free_s, Health())
        return self._spoil(load, run)


async def idle() -> bool | None:
    return True


def found(plan: Plan, ask: Queue, stop: asyncio.Event | None = None) -> tuple[Told, list[str]]:
    lines: list[str] = []
    told = asyncio.run(searched(plan, SLOS, ask, idle, lines.append, stop or asyncio.Event()))
    return told, lines


def told_of(plan: Plan, ask: Queue) -> Result:
    told, _ = found(plan, ask)
    result = goodput_shown.result(told, SLOS, HEAD, plan.settings(), None)
    json.dumps(result, allow_nan=False)
    return result


# The search ---------------------------------------------------------------------------------------


def test_a_server_s_rates_are_found() -> None:
    result = told_of(Plan(), Queue())
    assert result["valid"]
    assert result["verdict"] == {"quick": "found", "slow": "found", "never": "alone"}
    quick, slow = (result["max_rate_per_s"][name] for name in ("quick", "slow"))
    assert 4 < quick < 6.5  # latencies of M/D/1: 90 % within 0.25 s at 5.2/s, within 2 s at 9.4/s
    assert 8.7 < slow < 10.8
    assert result["max_rate_per_s"]["never"] is None
    assert result["bracket_per_s"]["never"] == [None, None]
    low, high = result["bracket_per_s"]["quick"]
    assert low == quick < high <= 1.0501 * quick
    assert result["attainment"]["quick"] >= 0.9
    assert result["goodput_per_s"]["quick"] == pytest.approx(quick, rel=0.3)
    assert result["best_goodput_per_s"]["slow"] >= result["goodput_per_s"]["slow"]
    assert result["probes"][0]["rate_per_s"] == 10  # one after the other, it answers 10 a second


def test_the_result_is_one_that_is_drawn() -> None:
    capacity, probes = results.of_goodput(told_of(Plan(), Queue()))
    assert capacity.max_rate_per_s["quick"]
    assert len(probes) > 10
    assert probes[0].attainment["never"] == 0


def test_runs_have_common_arrivals_but_nothing_is_asked_twice() -> None:
    ask = Queue()
    found(Plan(seed=7), ask)
    assert {load.seed for load in ask.loads} == {7, 8, 9}
    contents = [load.content_seed for load in ask.loads]
    assert len(set(contents)) == len(contents)
    assert content_seed(7, 2.5) == 62241414651707  # the same on every machine
    for load in ask.loads[1:]:
        assert load.rate_per_s is not None
        assert load.num_requests == pytest.approx(max(100, 46.667 * load.rate_per_s), abs=1)


def test_a_line_tells_of_each_run() -> None:
    _, lines = found(Plan(rates_per_s=(2, 20), num_seeds=1), Queue())
    assert lines[0] == "alone: quick 100 %, slow 100 %, never 0 % (10 requests)"
    assert lines[1].startswith("2/s, seed 0: quick ")
    assert len(lines) == 3


def test_a_grid_is_a_curve() -> None:
    result = told_of(Plan(rates_per_s=(3, 6, 20), num_seeds=2), Queue())
    assert [(each["rate_per_s"], each["seed"]) for each in result["probes"]] == [
        *((rate, seed) for rate in (3, 6, 20) for seed in (0, 1))
    ]
    assert result["bracket_per_s"]["quick"] == [3, 6]
    assert result["bracket_per_s"]["never"] == [None, 3]  # not given up: it is run anyway
    assert set(result["verdict"].values()) == {"grid"}
    assert result["valid"]


def test_a_client_that_is_too_slow_gives_no_figures() -> None:
    def late(load: Load, run: Run) -> Run:
        beyond = (load.rate_per_s or 0) > 4
        return replace(run, health=Health(cpu_share=1.0 if beyond else 0.1))

    result = told_of(Plan(start_rate_per_s=3), Queue(late))
    assert not result["valid"]
    assert result["invalid_because"] == ["quick, slow: the client is too slow for more"]
    assert 3 <= result["max_rate_per_s"]["quick"] <= 4
    assert result["bracket_per_s"]["quick"][1] is None
    assert {each["valid"] for each in result["probes"]} == {True, False}
    assert told_of(Plan(allow_late=True), Queue(late))["valid"]


def test_a_server_that_fails_ends_the_search() -> None:
    def gone(load: Load, run: Run) -> Run:
        if load.rate_per_s is None or load.rate_per_s < 15:
            return run
        lost = Sample(Record(0, 0, None, 1, 0, "failed"), cause="ConnectionError: refused")
        return replace(run, samples=[lost] * len(run.samples))

    result = told_of(Plan(start_rate_per_s=4, max_rate_per_s=64, rates_per_s=(4, 16)), Queue(gone))
    assert result["invalid_because"] == [
        "no request at 16/s was answered: ConnectionError: refused"
    ]
    assert result["verdict"]["quick"] == "unfinished"
    assert result["probes"][-1]["attainment"]["quick"] == 0

    def dead(load: Load, run: Run) -> Run:
        return gone(load._replace(rate_per_s=100), run)

    with pytest.raises(LoadError, match="no request alone was answered: ConnectionError"):
        found(Plan(), Queue(dead))


def test_requests_that_cannot_be_made_end_the_search_but_what_holds_is_told() -> None:
    def too_many(load: Load, run: Run) -> Run:
        if load.num_requests > 1000:
            raise ConfigError("the data set has 1000 lines")
        return run

    plan = Plan(start_rate_per_s=4, rates_per_s=(4, 64))
    result = told_of(plan, Queue(too_many))
    assert result["invalid_because"] == ["no run at 64/s: the data set has 1000 lines"]
    assert result["bracket_per_s"]["slow"] == [4, None]


def test_a_search_that_is_stopped_tells_what_holds() -> None:
    stop = asyncio.Event()

    def stopping(load: Load, run: Run) -> Run:
        if (load.rate_per_s or 0) > 5:
            stop.set()
            return replace(run, stopped=True)
        return run

    told, lines = found(Plan(start_rate_per_s=4), Queue(stopping), stop)
    assert told.stopped
    assert len(lines) == 1 + len(told.probes)
    result = goodput_shown.result(told, SLOS, HEAD, Plan().settings(), None)
    assert result["invalid_because"] == ["the search was stopped"]
    assert result["bracket_per_s"]["slow"] == [4, None]


def test_a_server_that_stays_busy_is_told() -> None:
    async def busy() -> bool | None:
        return False

    plan = Plan(rates_per_s=(2,), num_seeds=1)
    told = asyncio.run(searched(plan, SLOS, Queue(), busy, lambda _: None, asyncio.Event()))
    assert told.notes == ["the server was not idle before the run at 2/s"]


def test_runs_are_as_long_as_the_promises_need() -> None:
    assert Plan().duration_for({"a": Slo(0.1), "b": Slo(tpot_s=0.1)}) == 30
    assert Plan().duration_for({"a": Slo(2.0)}) == pytest.approx(46.67, abs=0.01)
    assert Plan().duration_for({"a": Slo(9.0, latency_s=2.0)}) == pytest.approx(46.67, abs=0.01)
    assert Plan().too_short({"a": Slo(2.0)}) == []
    slos = {"a": Slo(1.0), "b": Slo(12.0)}
    assert Plan().duration_for(slos) == 120
    (note,) = Plan().too_short(slos)
    assert note.startswith("runs of 120 s are too short for b: an overload of 5 %")
    assert "--duration 280" in note
    assert Plan(rates_per_s=(1,)).too_short(slos) == []


def test_what_a_reference_was_made_of_is_compared() -> None:
    told, _ = found(Plan(rates_per_s=(2,), num_seeds=1), Queue())
    reference = make(
        [Record(0, 0, 1, 2, 2, "completed")],
        words=("easerve",),
        machine="x",
        model="m",
        system="s",
        modality="image",
        workload={},
    )
    result = goodput_shown.result(told, SLOS, HEAD, Plan().settings(), reference)
    assert result["reference"]["ttft_s"] == 1
    assert result["notes"] == [
        "the reference is of another load: modality 'text', in the reference 'image'"
    ]


# What is shown ------------------------------------------------------------------------------------


def shown(result: Result) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(goodput_shown.sections(result), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_is_read_at_80_columns() -> None:
    text = shown(told_of(Plan(), Queue()))
    assert max(map(len, text.splitlines())) <= 80
    (row,) = (line.split() for line in text.splitlines() if line.startswith("  quick "))
    assert len(row) == 8
    assert row[4] == "%"
    assert "never: not kept by requests alone" in text
    assert "…" not in text


def test_what_was_not_searched_to_its_end_is_said() -> None:
    text = shown(told_of(Plan(start_rate_per_s=1, max_rate_per_s=2), Queue()))
    assert "quick: kept at the highest rate that was allowed" in text
    assert "≥ 2" in text


# What is asked ------------------------------------------------------------------------------------


def offered(kind: str = "poisson", cv: float | None = None) -> Offered:
    at = server("http://h:1", "m", None, 1.0, None)
    return Offered(at, source("text", text_tokens="8"), Promises(), kind, cv)


def test_requests_come_as_the_seed_says_faster_at_higher_rates() -> None:
    slow, fast = (
        [each.at_s for each in offered().made("m", Load(rate, 20, 3, seed)).planned]
        for rate, seed in ((1.0, 5), (4.0, 6))
    )
    assert [4 * at_s for at_s in fast] == pytest.approx(slow)
    one, other = (
        {str(each.body) for each in offered().made("m", Load(1.0, 5, 3, seed)).planned}
        for seed in (5, 6)
    )
    assert not one & other
    assert offered("gamma", 2.0).arrival() == {"kind": "gamma", "cv": 2.0}


@pytest.mark.parametrize(
    ("kind", "cv", "message"),
    [
        ("trace", None, "--arrival: 'trace' is none of poisson, gamma, constant"),
        ("gamma", None, "gamma arrivals need cv"),
        ("poisson", 2.0, "poisson arrivals take no cv"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(kind: str, cv: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offered(kind, cv)


# The commands -------------------------------------------------------------------------------------

ASKED = ("--modality", "text", "--text-tokens", "8", "--warmup", "1")


@pytest.fixture(scope="module")
def running() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


@pytest.fixture(autouse=True)
def alone_in_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("easerve.bench.run.in_process", loop.run)
    monkeypatch.setattr("easerve.bench.watch.COOL_DOWN_S", 0)


@pytest.mark.usefixtures("without_a_process")
def test_a_reference_is_made_and_found(easerve: Easerve, running: Scripted, tmp_path: Path) -> None:
    words = ("bench", "reference", "--url", running.url, *ASKED, "--num-requests", "3")
    ended = easerve(*words, "--machine", "a GPU", "--allow-late")
    assert ended.code == 0
    path = tmp_path / "state/easerve/references/a-gpu/scripted-text.yaml"
    assert f"reference: {path}" in ended.out
    reference = read_section(path, Reference)
    assert reference.workload == {"modality": "text", "text_tokens": [8, 8]}
    assert reference.num_requests == 3
    assert reference.ttft_s >= 0.01
    again = easerve(*words, "--machine", "a GPU", "--allow-late")
    assert again.code == 2
    assert "exists, and what was measured with it would no longer compare" in again.err

    grid = ("--rates", "50", "--seeds", "1", "--num-requests", "5", "--duration", "0.1")
    out = tmp_path / "r.json"
    ended = easerve(
        *("bench", "goodput", "--url", running.url, *ASKED, *grid, "--alone", "2"),
        *("--machine", "a GPU", "--allow-late", "--json", "--out", out),
    )
    assert ended.code == 0
    found = json.loads(ended.out)
    assert json.loads(out.read_text()) == found
    assert (found["kind"], found["model"], found["modality"]) == ("goodput", MODEL, "text")
    assert list(found["slo"]) == ["S1", "S2", "S3", "S4", "S5"]
    assert found["reference"]["ttft_s"] == reference.ttft_s
    assert found["arrival"] == {"kind": "poisson"}
    assert [each["num_requests"] for each in found["probes"]] == [5]
    assert found["notes"] == []


@pytest.mark.usefixtures("without_a_process")
def test_requests_that_fail_are_no_reference(easerve: Easerve, tmp_path: Path) -> None:
    with scripted("ok", "ok", "ok", "err500") as failing:
        ended = easerve(
            *("bench", "reference", "--url", failing.url, *ASKED, "--num-requests", "3"),
            *("--out", tmp_path / "x.yaml", "--allow-late"),
        )
    assert ended.code == 1
    assert "no reference: 1 of 3 requests were not completed: HTTP 500" in ended.err
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("goodput",), "--url: name the server"),
        (("goodput", "--url", "h:1", "--rates", "1,x"), "--rates: '1,x' is not a list of numbers"),
        (("goodput", "--url", "h:1", "--wanted", "1"), "wanted must be between 0 and 1"),
        (("goodput", "--url", "h:1", "--min-rate", "3", "--max-rate", "2"), "the search cannot"),
        (("goodput", "--url", "h:1", "--duration", "0"), "--duration: it must be more than 0"),
        (("goodput", "--url", "h:1", "--arrival", "ramp"), "--arrival: 'ramp' is none of"),
        (("reference", "--url", "http://h:1"), "say with --machine what serves there"),
        (("reference", "--url", "h:1", "--modality", "smell"), "a modality is one of"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    easerve: Easerve, words: tuple[str, ...], message: str
) -> None:
    ended = easerve("bench", *words)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.usefixtures("without_a_process")
def test_tiers_need_a_reference(easerve: Easerve, running: Scripted) -> None:
    ended = easerve("bench", "goodput", "--url", running.url, *ASKED, "--slo", "S2")
    assert ended.code == 2
    assert "make a reference with `easerve bench reference --url" in ended.err


@asynccontextmanager
async def one_at_a_time(service_s: float) -> AsyncIterator[str]:
    """The address of a server that answers with a token, one request after the other."""
    turn = asyncio.Lock()

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        async with turn:
            await asyncio.sleep(service_s)
        text = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
        return web.Response(body=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as running:
        yield str(running.make_url(""))


@pytest.mark.long
async def test_a_real_server_s_rate_is_found(tmp_path: Path) -> None:
    """It can answer 25 a second; 9 of 10 within 0.3 s at some 21."""
    out = tmp_path / "r.json"
    async with one_at_a_time(0.04) as url:
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "easerve.cli.main", "bench", "goodput", "--url", url),
            *("--model", "m", *ASKED, "--slo", "ttft=300ms", "--start-rate", "14", "--seeds", "1"),
            *("--tolerance", "0.5", "--duration", "3", "--num-requests", "50", "--alone", "3"),
            *("--allow-late", "--out", str(out)),
        )
        assert await command.wait() == 0
    found = json.loads(out.read_text())
    assert found["verdict"] == {"ttft=300ms": "found"}
    assert 10 <= found["max_rate_per_s"]["ttft=300ms"] <= 26
    assert found["best_goodput_per_s"]["ttft=300ms"] >= 8

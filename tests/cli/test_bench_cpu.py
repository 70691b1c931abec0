"""``easerve bench cpu``: what is asked wrongly, what follows from measured values, how it is shown.

The systems here are made up; ``tests/real/test_bench_cpu.py`` has those that run.
"""

import asyncio
import io
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from easerve.bench.report import html
from easerve.bench.sample import Health, Sample, Seen
from easerve.cli.bench import cpu, cpu_alone, cpu_runs, cpu_shown, cpu_start
from easerve.cli.bench.command import show
from easerve.cli.bench.cpu import ALL, HOW, PASS, WHEN, WHERE, CpuBench, Plan, policies
from easerve.cli.bench.cpu_allowed import (
    Allowed,
    Portions,
    along,
    between,
    by_easerve,
    by_plain,
    most_per_s,
    on_plane,
)
from easerve.cli.bench.cpu_alone import CALLS, Alone, Measured, grouped
from easerve.cli.bench.cpu_rows import merged, pooled, used_of, verdict
from easerve.cli.bench.cpu_runs import Aggregated, Draw, Easerve, Load, Run, Shape
from easerve.cli.bench.cpu_said import conclusions, disturbed
from easerve.cli.bench.cpu_shown import sections
from easerve.cli.bench.cpu_stages import added, closed_loop, without
from easerve.cli.bench.cpu_systems import Plain, Replicas, Turns
from easerve.cli.bench.cpu_timeline import beside, beside_by_calls, busy, union
from easerve.cli.bench.cpu_watch import Interval, Sizes, Watch
from easerve.config import Policy
from easerve.engines.protocol import EngineError
from easerve.goodput import Outcome, Record
from easerve.policy import events as ev
from easerve.policy.offload import Placement
from easerve.types import (
    NS_PER_S,
    BatchId,
    MediaItem,
    Modality,
    RequestId,
    Side,
    Stage,
    WorkerId,
)
from easerve.types import (
    Shape as Prompt,
)

from .conftest import Easerve as Command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mixes", "4by8"), "--mixes: '4by8' is not like 4x8"),
        (("--mixes", "0x8"), "--mixes: '0x8' is not like 4x8"),
        (("--shares", "2"), "--shares: 2 is not from 0 to 1"),
        (("--out", "/no/such.json"), "/no/such.json: No such file"),
        (("--html", "/no/such.html"), "/no/such.html: No such file"),
        (("nosuch.yaml",), "nosuch.yaml: No such file"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    easerve: Command, options: tuple[str, ...], message: str
) -> None:
    ended = easerve("bench", "cpu", *options)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "needs a section local_prefill"),
        ("local_prefill: {}\n", "needs a section partition"),
        ("device: cuda\n", "measures on a CPU"),
    ],
)
def test_every_mechanism_needs_something_to_work_on(
    easerve: Command, deployment: Path, more: str, message: str
) -> None:
    deployment.write_text(deployment.read_text() + more)
    ended = easerve("bench", "cpu", deployment)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


def test_a_plan_is_read() -> None:
    plan = cpu_start.plan("1x8, 8x64,1x8", 2, 4, 1.0, [0.5], 1.0, 1.0, 0, False)
    assert plan.shapes == [Shape(1, 8), Shape(8, 64)]
    assert plan.middle == Shape(8, 64)
    assert cpu_start.plan("1x8", 9, 99, 9, [0.1], 9, 9, 0, True).rounds == 1
    assert str(Shape(1, 8)) == "1 picture, 8 tokens"


def test_the_variants_differ_in_their_mechanisms() -> None:
    found = policies(Policy(when="none", how="static"), 0.25)
    off = ("none", False, 1.0, "none")

    def of(name: str) -> tuple[object, ...]:
        policy = found[name]
        return policy.when, policy.flow, policy.remote_share, policy.how

    assert of(PASS) == off
    assert of(WHEN) == ("slack", True, 1.0, "none")
    assert of(WHERE) == ("none", False, 0.25, "none")
    assert of(HOW) == ("none", False, 0.25, "static")
    assert of(ALL) == ("slack", True, 0.25, "static")


def test_as_many_replicas_as_cores_and_one_with_as_many_threads() -> None:
    assert cpu_start.replicas(4, quick=False) == [Replicas(1, 4), Replicas(4, 1)]
    assert cpu_start.replicas(1, quick=False) == cpu_start.replicas(1, quick=True)
    assert Replicas(4, 1).name == "vLLM x4"


# Who runs -----------------------------------------------------------------------------------------


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_one_group_runs_at_a_time() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    first, second = (child.pid for child in children)
    turns = Turns({"a": lambda: [first], "b": lambda: [second]})
    try:
        for running, paused, name in ((first, second, "a"), (second, first, "b")):
            turns.to(name)
            turns.to(name)
            os.waitid(os.P_PID, paused, os.WSTOPPED | os.WNOWAIT)
            assert state(paused) == "T"
            assert state(running) in "SR"
        turns.all()
        assert state(first) in "SR"
    finally:
        for child in children:
            child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait()


# Runs ---------------------------------------------------------------------------------------------


def record(sent_s: float, end_s: float, outcome: Outcome = "completed") -> Record:
    return Record(sent_s, sent_s, (sent_s + end_s) / 2, end_s, 8, outcome)


def seen(start_s: float, *records: Record) -> Seen:
    health = Health(cpu_share=0.25)
    return Seen([], [Sample(each) for each in records], start_s, 4.0, health)


async def test_replicas_share_requests_clients_and_one_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Load] = {}

    async def ask(url: str, model: str, load: Load) -> Seen:
        asked[url] = load
        return seen(float(len(asked)), record(0.0, 2.0))

    monkeypatch.setattr(cpu_runs, "_ask", ask)
    plain = Plain("vLLM x2", {"v-0": ("http://a", 0), "v-1": ("http://b", 0)})
    system = Aggregated(plain, "m", Turns({"vLLM x2": list}))
    run = await system.run(Load([{"n": n} for n in range(5)], 6, [0.0, 1.0, 2.0, 3.0, 4.0]))
    assert [len(each.bodies) for each in asked.values()] == [3, 2]
    assert asked["http://b"].times_s == [1.0, 3.0]
    assert asked["http://a"].concurrency == 3
    assert [each.sent_s for each in run.records] == [0.0, 1.0]
    assert run.duration_s == 3.0
    assert run.client_s == 2 * 0.25 * 4.0
    alone = await system.alone(Load([{}], 1))
    assert len(alone.records) == 1


def test_a_row_has_seconds_of_a_request() -> None:
    sizes = Sizes(2.0, {Stage.DECODE: 3.0}, 100.0, 1.0)
    run = Run([record(0, 1), record(1, 4)], {"router": 1.0, "encode-0": 2.0}, 1.0, 8.0, sizes)
    row = run.row()
    assert row["used_s"] == {"router": 0.5, "encode-0": 1.0, "client": 0.5}
    assert (row["cpu_s"], row["cores"], row["throughput_per_s"]) == (2.0, 1.0, 0.5)
    assert row["sizes"]["items_per_call"] == 2.0
    assert "goodput_per_s" not in row
    json.dumps(row, allow_nan=False)


async def test_the_same_seed_asks_the_same() -> None:
    one, other = Draw(3), Draw(3)
    assert await one.pictures(Shape(2, 4), 2) == await other.pictures(Shape(2, 4), 2)
    assert one.texts(5, 4, 2) == other.texts(5, 4, 2)
    assert len(one.texts(5, 4, 1)[0]["prompt"]) == 5
    more = await one.pictures(Shape(2, 4), 1)
    assert more not in [[each] for each in await Draw(3).pictures(Shape(2, 4), 2)]


async def test_a_caller_makes_its_next_call_when_the_last_one_is_answered() -> None:
    open_now, most, made = 0, 0, 0

    async def call() -> None:
        nonlocal open_now, most, made
        open_now, made = open_now + 1, made + 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1

    await closed_loop([call] * 7, 3)
    assert (made, most) == (7, 3)


async def test_the_error_of_a_call_is_raised_as_it_is() -> None:
    async def fail() -> None:
        raise EngineError("prefill-0 answered 500")

    with pytest.raises(EngineError, match="prefill-0 answered 500"):
        await closed_loop([fail] * 4, 2)


def encode(number: int, *names: str) -> ev.StartEncode:
    items = tuple(
        ev.EncodeItem(
            MediaItem(name, Modality.IMAGE, 25),
            (ev.Waiter(RequestId(name), 0, WorkerId("p0")),),
        )
        for name in names
    )
    decision = ev.Decision("full", 0.0, 0.0, "", 0, 0.0, 1.0)
    return ev.StartEncode(BatchId(number), WorkerId("encode-0"), items, decision)


def prefill(name: str, side: Side) -> ev.StartPrefill:
    placement = Placement(side, "deficit", 0.5, 0.0, 0.0, None, None)
    return ev.StartPrefill(RequestId(name), 0, 0, WorkerId(f"{side}-0"), "", placement)


def test_a_watch_tells_portions_calls_and_seconds() -> None:
    watch, used = Watch(), Counter[str]()
    watch.step(0, [ev.RequestReceived(RequestId("x"), 1)], [])  # of nobody's run
    watch.expect(2, lambda: dict(used))
    used["router"] = 5
    a, b = RequestId("a"), RequestId("b")
    watch.step(0, [ev.RequestReceived(a, 1), ev.RequestReceived(b, 1)], [])
    used["router"] = 7
    prompts = [ev.Prepared(each, Prompt(100, 8)) for each in (a, b)]
    watch.step(1 * NS_PER_S, prompts, [encode(1, "a", "b"), prefill("a", Side.LOCAL)])
    watch.step(3 * NS_PER_S, [ev.EncodeFinished(BatchId(1))], [prefill("b", Side.REMOTE)])
    watch.step(4 * NS_PER_S, [ev.PrefillFinished(a, 0, 0, wait_s=2.0)], [ev.Complete(a)])
    used["router"] = 9
    assert watch.used_s() == {"router": 4}
    watch.step(5 * NS_PER_S, [], [ev.Complete(b)])
    used["router"] = 11
    assert watch.used_s() == {"router": 4}
    assert watch.sizes({Stage.DECODE: 6.0}) == Sizes(2.0, {Stage.DECODE: 3.0}, 100.0, 0.5)
    assert watch.encodes == [Interval(WorkerId("encode-0"), 1.0, 3.0)]
    assert watch.prefills == [Interval(WorkerId("local-0"), 3.0, 4.0)]


# What is allowed ----------------------------------------------------------------------------------


def test_costs_are_taken_between_what_was_measured() -> None:
    line = [(1.0, 10.0), (3.0, 30.0)]
    assert [between(line, x) for x in (0.5, 1.0, 2.0, 3.0, 9.0)] == [5, 10, 20, 30, 90]
    assert between([(1.0, 1.0), (2.0, 9.0)], 0.5) == 0
    assert between([(1.0, 5.0)], 7.0) == 5
    points = [
        Measured({"prefill core": 4.0, "prefill": 2.0}, portions={Stage.PREFILL: 1.0}),
        Measured({"prefill core": 3.0}, portions={Stage.PREFILL: 0.5}),
    ]
    assert along(points, Stage.PREFILL, 0.75) == {"prefill core": 3.5, "prefill": 1.0}


def talk(steps: float, chunks: float, router_s: float) -> Measured:
    return Measured({"router": router_s}, 0.0, {Stage.DECODE: steps}, chunks)


def test_costs_of_talking_go_by_steps_and_by_chunks() -> None:
    points = [talk(1, 8, 1 + 2 + 24), talk(4, 8, 1 + 8 + 24), talk(1, 2, 1 + 2 + 6)]
    assert on_plane(points, "router", 3, 5) == pytest.approx(1 + 6 + 15)
    assert on_plane(points, "router", 0, -9) == 0
    line = [talk(n, n, 1 + n) for n in (1, 2, 3)]
    assert on_plane(line, "router", 9, 9) == 2


def picture(encode: float, core: float, calls: float, steps: float) -> Measured:
    cost = {"encode": encode, "encode core": core, "prefill core": core / 10}
    portions: dict[str, float] = {CALLS: calls, Stage.ENCODE: steps}
    return Measured(cost, portions=portions)


class Told:
    """In the place of ``Alone``: every stage has a price of its own, in ms."""

    def preparation(self, *_: object) -> dict[str, float]:
        return {"router": 1.0, "preparation": 2.0, "encode": 3.0, "decode core": 99.0}

    def pictures_in_prefill(self, *_: object) -> dict[str, float]:
        return {"prefill core": 0.5, "router": 99.0}

    def rendering(self, *_: object) -> dict[str, float]:
        return {"router": 0.25, "prefill": 0.5, "encode core": 99.0}

    def encoding(self, *_: object) -> list[Measured]:
        return [picture(9.0, 3.0, 1.0, 1.0), picture(1.0, 1.0, 0.25, 0.25)]

    def encoding_in_a_crowd(self, *_: object) -> Measured:
        return picture(4.0, 4.0, 1.0, 0.625)

    def text(self, system: object, tokens: int, num_tokens: int, fewer: bool = False) -> Measured:
        cost = dict.fromkeys(("router", "decode", "client", "decode core", "encode core"), 1.0)
        cost |= {"prefill": 1.5, "prefill core": 2.0 if fewer else 1.0}
        steps = 1.0 if fewer else 0.5
        portions: dict[str, float] = {Stage.PREFILL: steps, Stage.DECODE: steps}
        return Measured(cost, 7.0 if num_tokens > 1 else 3.0, portions, float(num_tokens))

    def pictures(self, *_: object) -> Measured:
        return Measured({"vLLM": 9.0}, 5.0)

    def cores(self) -> float:
        return 1.9


def test_a_request_is_put_together_from_stages() -> None:
    system = cast(Easerve, MadeUp("EAServe", 1.0))
    steps: dict[str, float] = {Stage.ENCODE: 2 * 0.5, Stage.PREFILL: 0.75, Stage.DECODE: 0.75}
    portions = Portions(0.75, steps, 8.0, 37)
    found = by_easerve(cast(Alone, Told()), system, Shape(2, 8), portions)
    assert found.costs == {
        "router": 1.0 + (1.0 - 0.25),
        "preparation": 2.0,
        "encode": 3.0 + 2 * 3.0,
        "encode core": pytest.approx(2 * (1 + 2 / 3 + 0.25 * 2 / 0.375)),
        "prefill": 1.5 - 0.5,
        "prefill core": pytest.approx(1.5 + 0.5 + 2 * (0.1 + 0.2 / 3)),
        "decode core": 1.0,
        "decode": 1.0,
        "client": 1.0,
    }
    assert found.most_per_s == min(1.9 / sum(found.costs.values()), 1 / 8.0)
    assert found.cores == 1.9


def test_an_engine_that_does_all_does_one_thing_after_the_other() -> None:
    found = by_plain(cast(Alone, Told()), cast(Aggregated, MadeUp("vLLM x1", 1.0)), Shape(2, 8), 37)
    assert found.most_per_s == 1 / (7 + 5 - 3)
    assert found.costs["vLLM"] == 9.0
    assert found.cores == sum(found.costs.values()) / 9


async def test_stages_are_measured_once_in_a_round_and_again_when_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = iter([0.9, 0.0, 0.0, 0.0, 0.0, 0.9, 0.9, 0.0])
    monkeypatch.setattr(Draw, "_pictures", lambda self, shape, num: [{}] * num)
    monkeypatch.setattr(cpu_alone, "Others", lambda: NoOthers(next(others)))
    ticks: list[str] = []
    alone, system = Alone(Draw(0), 4, 2, ticks.append), MadeUp("vLLM x1", 10.0)
    shapes, plain = {Shape(1, 8): 37, Shape(1, 1): 37}, [cast(Aggregated, system)]
    for _ in range(2):
        await alone.measure(shapes, [], plain)
    assert ticks[:3] == [
        "alone: pictures, vLLM x1, 1",
        "alone: text, vLLM x1, 1.0, 37, 8, 4",
        "alone: text, vLLM x1, 1.0, 37, 1, 4",
    ]
    assert len(ticks) == 6
    assert len(system.asked) == 8
    assert alone.others_cores == 0.9
    (row, *_) = alone.as_json()
    assert (row["what"], row["rounds"]) == (["pictures", "vLLM x1", 1], 2)
    found = alone.text(cast(Aggregated, system), 37, 8)
    assert found.wall_s == pytest.approx(0.1, rel=0.1)
    assert found.cost["vLLM"] == pytest.approx(0.08)


def test_parts_of_a_cost_are_added_and_taken_away() -> None:
    assert added({"a": 1.0}, {"a": 2.0, "b": 3.0}) == {"a": 3.0, "b": 3.0}
    assert without({"a": 1.0, "b": 3.0}, {"a": 2.0}) == {"a": 0.0, "b": 3.0}


def test_engines_are_grouped_by_stage() -> None:
    used = {
        "router": 1.0,
        "encode-0": 2.0,
        "encode-1 core": 3.0,
        "local-prefill-0 core": 4.0,
        "prefill-0 core": 5.0,
        "vllm-x2-1": 6.0,
        "vllm-x2-0": 7.0,
    }
    assert grouped(used) == {
        "router": 1.0,
        "encode": 2.0,
        "encode core": 3.0,
        "prefill core": 9.0,
        "vLLM": 13.0,
    }


def test_cores_or_one_process_are_the_limit() -> None:
    assert most_per_s({"a": 0.1, "b": 0.1}, 2, {}) == 10
    assert most_per_s({"a": 0.19, "b": 0.01}, 2, {}) == pytest.approx(1 / 0.19)
    assert most_per_s({"a core": 0.19, "b": 0.01}, 2, {"a": 2.0}) == 10


def test_ten_per_cent_are_as_allowed() -> None:
    assert verdict(1.6, 1.5)["as_allowed"]
    assert verdict(1.36, 1.5)["as_allowed"]
    assert not verdict(1.3, 1.5)["as_allowed"]


# Timeline -----------------------------------------------------------------------------------------


def test_what_ran_beside_each_other_is_seen_by_period_and_by_call() -> None:
    used = [(0.0, 0.0), (0.01, 0.0), (0.02, 0.01), (0.02, 0.02)]
    samples = [(n / 100, {"e": e, "p": p}) for n, (e, p) in enumerate(used)]
    times_s, shares = busy(samples, 0.0, 1.0)
    assert times_s == [0.01, 0.02, 0.03]
    assert shares == {"e": [1, 1, 0], "p": [0, 1, 1]}
    found = beside(shares, {"e": Stage.ENCODE, "p": Stage.PREFILL})
    assert found["both"] == pytest.approx(1 / 3)
    assert found["of_encode"] == 0.5
    assert beside({}, {})["of_encode"] is None


def test_calls_beside_each_other() -> None:
    def calls(*spans: tuple[float, float]) -> list[Interval]:
        return [Interval(WorkerId("w"), *span) for span in spans]

    assert union(calls((2, 3), (0, 1), (0.5, 2.5))) == [(0, 3)]
    assert beside_by_calls(calls((0, 2), (4, 6)), calls((1, 5))) == 0.5
    assert beside_by_calls([], calls((1, 5))) is None


# The whole, with systems that are made up ---------------------------------------------------------


class MadeUp:
    """Answers at ``rate_per_s``, of which ``cores`` are busy; its policy is only remembered."""

    def __init__(self, name: str, rate_per_s: float, lost: int = 0) -> None:
        self.name = self.host = name
        self.policy = Policy()
        self.num_engines: dict[str, float] = {}
        self._gap_s, self._lost = 1 / rate_per_s, lost
        self.asked: list[Load] = []

    async def run(self, load: Load) -> Run:
        self.asked.append(load)
        num = len(load.bodies)
        records = [
            record(
                n * self._gap_s,
                (n + 0.9) * self._gap_s,
                "failed" if n < self._lost else "completed",
            )
            for n in range(num)
        ]
        busy_s = num * self._gap_s
        if self.name.startswith("vLLM"):
            used = {"vllm-x1-0": 0.8 * busy_s, "vllm-x1-0 core": 0.8 * busy_s}
            return Run(records, used, 0.1 * busy_s, 8.0)
        sizes = Sizes(4.0, {Stage.PREFILL: 0.5, Stage.DECODE: 2.0}, 45.0, 1.0)
        used = {"router": 0.2, "encode-0": 0.5, "prefill-0 core": 0.4, "decode-0 core": 0.5}
        return Run(
            records, {n: each * busy_s for n, each in used.items()}, 0.1 * busy_s, 8.0, sizes
        )

    async def alone(self, load: Load) -> Run:
        return await self.run(load)


class NothingAlone:
    """In the place of ``Alone``."""

    others_cores = 0.02

    def __init__(self, *_: object) -> None:
        self.num_rounds = 0

    async def measure(self, shapes: Mapping[Shape, int], *_: object) -> None:
        assert set(shapes.values()) == {45}
        self.num_rounds += 1

    def cores(self) -> float:
        return 2.0

    def as_json(self) -> list[object]:
        return [self.num_rounds]


def explained(_: object, system: MadeUp, *__: object) -> Allowed:
    """In the place of ``by_easerve`` and of ``by_plain``."""
    gap_s = system._gap_s
    costs = {"router": 0.2 * gap_s, "encode": 0.9 * gap_s, "decode core": 0.9 * gap_s}
    return Allowed(costs, 2, most_per_s(costs, 2, {}))


async def drawn(system: MadeUp, load: Load) -> dict[str, Any]:
    return {
        "system": system.name,
        "row": {},
        "times_s": [0.01, 0.02],
        "busy": {"encode-0": [1.0, 0.0]},
        "calls": {"encode": [(0.0, 0.5), (5.0, 6.0)], "prefill-0": [(0.2, 0.4)]},
        "beside": {"encode": 0.5, "prefill": 0.5, "both": 0.2, "of_encode": 0.4, "calls": None},
    }


RATES = {PASS: 40.0, WHEN: 60.0, WHERE: 38.0, HOW: 36.0, ALL: 64.0}
PLAN = Plan([Shape(1, 8), Shape(8, 8)], 3, 2, 0.2, [0.25, 0.5], 0.5, 0.5, 0)


class NoOthers:
    """In the place of ``Others``, which reads of every process."""

    def __init__(self, cores: float = 0.25) -> None:
        self._cores = cores

    def cores(self) -> float:
        return self._cores


def bench_of(easerve: Mapping[str, MadeUp], plain: Sequence[MadeUp]) -> CpuBench:
    return CpuBench(
        PLAN,
        cast(Mapping[str, Easerve], easerve),
        cast(Sequence[Aggregated], plain),
        lambda text: None,
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the systems and the order in which they run."""
    monkeypatch.setattr(cpu, "Alone", NothingAlone)
    monkeypatch.setattr(cpu, "by_easerve", explained)
    monkeypatch.setattr(cpu, "by_plain", explained)
    monkeypatch.setattr(cpu, "timeline", drawn)
    monkeypatch.setattr(cpu, "Others", NoOthers)
    monkeypatch.setattr(Draw, "_pictures", lambda self, shape, num: [{}] * num)


Measure = Callable[..., Coroutine[Any, Any, dict[str, Any]]]


@pytest.fixture
def measured(made_up: None) -> Measure:
    """A result, as it comes back from JSON."""

    async def measure(plain_rate_per_s: float = 90.0) -> dict[str, Any]:
        easerve = {name: MadeUp(name, rate) for name, rate in RATES.items()}
        plain = [MadeUp("vLLM x1", plain_rate_per_s), MadeUp("vLLM x2", plain_rate_per_s / 2)]
        result = await bench_of(easerve, plain).run()
        assert easerve[ALL].policy.remote_share == result["remote_share"]["chosen"]
        head = {
            "kind": "bench-cpu",
            "easerve": "0",
            "made": "today",
            "machine": "this one",
            "num_cores": 2,
            "model": "m",
            "idle_cores": {"encode-0": 0.01},
        }
        text = json.dumps({**head, **result}, allow_nan=False)
        return cast(dict[str, Any], json.loads(text))

    return measure


async def test_a_result_has_every_system_and_its_ratios(measured: Measure) -> None:
    result = await measured()
    assert set(result["remote_share"]["tried"]) == {"0.25", "0.5"}
    assert [mix["name"] for mix in result["mixes"]] == ["1x8", "8x8"]
    for mix in result["mixes"]:
        assert set(mix["systems"]) == {*RATES, "vLLM x1", "vLLM x2"}
        for name, run in mix["systems"].items():
            assert len(run["throughputs_per_s"]) == 3
            assert run["throughput_per_s"] == pytest.approx(
                {**RATES, "vLLM x1": 90, "vLLM x2": 45}[name], rel=0.1
            )
        ratio = mix["ratios"][PASS][ALL]
        assert ratio["measured"] == pytest.approx(1.6, rel=0.02)
        for by in ("in_run", "alone"):
            assert ratio[by]["allowed"] == pytest.approx(1.6, rel=0.02)
            assert ratio[by]["reached"] == pytest.approx(1, rel=0.04)
            assert ratio[by]["as_allowed"]
        assert mix["best_vllm"] == "vLLM x1"
        assert mix["ratios"]["vLLM x1"][ALL]["measured"] < 1
    assert len(result["slo"]["rows"]) == 2 * 4
    assert result["slo"]["reference"]["system"] == "vLLM x1"
    assert [each["how"] for each in result["timelines"]] == ["dynamic", "none"]


async def test_a_result_is_shown(measured: Measure) -> None:
    result = await measured()
    found = sections(result)
    page = html("EAServe bench", found)
    assert page.count("<figure") >= 12
    said = found[0].text
    assert "All mechanisms together answer 1.60 times as many requests as passthrough" in said
    assert "Aggregated vLLM (vLLM x1) answers more than EAServe on every mix" in said
    assert "Why: with mix 8 x 8 a request costs" in said
    assert "Best of all variants: all at 1 x 8, 8 x 8." in said
    shown = Console(width=80, file=io.StringIO(), record=True)
    show(found, shown)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.export_text()  # nothing is cut


async def test_who_wins_is_said_by_the_numbers(measured: Measure) -> None:
    result = await measured(plain_rate_per_s=20.0)
    text = "\n".join(conclusions(result))
    assert "EAServe answers 3.20 times as many requests as vLLM x1" in text
    assert "Why" not in text


async def test_other_work_on_the_machine_is_said(measured: Measure) -> None:
    result = await measured()
    for mix in result["mixes"]:
        for run in mix["systems"].values():
            run["others_cores"] = 0.01
    assert disturbed(result) == ""
    result["mixes"][0]["systems"][ALL]["others_cores"] = 0.8
    assert "up to 0.80 of 2 cores" in disturbed(result)


async def test_what_is_off_is_said(measured: Measure) -> None:
    result = await measured()
    first, second = (mix["ratios"] for mix in result["mixes"])
    first[PASS][WHEN]["in_run"]["as_allowed"] = False
    for ratio in (first["vLLM x1"][PASS], second[PASS][ALL]):
        ratio["alone"]["as_allowed"] = False
    text = "\n".join(conclusions(result))
    assert "17 of 18 ratios to passthrough and to vLLM are within 10 %" in text
    assert "16 of what stages alone allow" in text


async def test_a_run_with_failures_is_no_run(made_up: None) -> None:
    easerve = {name: MadeUp(name, rate, lost=name == WHERE) for name, rate in RATES.items()}
    with pytest.raises(EngineError, match="Where: 1 of 2 requests were not completed"):
        await bench_of(easerve, [MadeUp("vLLM x1", 90.0)]).run()


def test_the_order_changes_from_round_to_round() -> None:
    systems = [MadeUp(name, 1.0) for name in "abc"]
    orders = ["".join(each.name for each in cpu._in_turn(systems, n)) for n in range(4)]
    assert orders == ["abc", "acb", "cab", "cba"]


def test_a_process_that_was_not_there_has_used_nothing() -> None:
    rows = [{"used_s": {"router": 1.0}}, {"used_s": {"router": 3.0, "preparation": 1.0}}]
    assert used_of(rows) == {"router": 2.0, "preparation": 0.5}


def test_rounds_are_pooled_by_their_time() -> None:
    base: dict[str, Any] = {"num_requests": 60, "used_s": {"encode-0": 0.1}, "cpu_s": 0.1}
    rows = [{**base, "duration_s": s, "throughput_per_s": 60 / s} for s in (1.0, 3.0)]
    found = pooled(rows)
    assert found["throughput_per_s"] == 30
    assert found["cores"] == pytest.approx(3)
    assert found["throughputs_per_s"] == [60, 20]
    assert found["by_process"] == {"encode": 0.1}


def test_means_leave_out_what_is_not_in_every_row() -> None:
    rows = [{"a": 1.0, "b": {"c": 1.0}, "d": None}, {"a": 3.0, "b": {"c": 2.0, "e": 5.0}, "d": 1}]
    assert merged(rows) == {"a": 2.0, "b": {"c": 1.5, "e": None}, "d": None}


def test_samples_are_drawn_as_means() -> None:
    times_s, shares = [0.01, 0.02, 0.05, 0.06, 0.07], [1.0, 0.0, 1.0, 0.0, 1.0]
    begins, found = cpu_shown.means(times_s, shares, 1.0)
    assert (begins, found) == ([0.0, 0.02, 0.05], [0.5, 1.0, 0.5])

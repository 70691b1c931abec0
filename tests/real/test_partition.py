"""A divided device on real engines: what can be seen of their threads from outside, and answers."""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from easerve.engines.partition.cell import IDLE, Cell, Word
from easerve.policy.events import Divide, StartEncode, StartPrefill
from easerve.policy.partition import RULES
from easerve.serve.decisions import read, replay
from easerve.types import Side

from ..processes import wait_until
from . import soak
from .conftest import ADMIN_TOKEN, ROOT, RealServer, descendants, golden

ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
DIVIDED = ROOT / "examples/tiny-llava-partition.yaml"
ASKED = soak.questions(60, seed=9)
NUM_RIGHT = 20
CORES = sorted(os.sched_getaffinity(0))
BUSY_S = 0.1  # of CPU time in PREFILL_S: a thread of a library's takes less, one that computes more
PREFILL_S = 1.5

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="a single core cannot be divided")


@pytest.fixture(scope="module")
def divided(
    start: Callable[..., RealServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    options = ("--port", "0", "--admin-token", ADMIN_TOKEN, "--decision-log", str(log))
    started = start(*options, source=DIVIDED)
    started.decision_log = log
    yield started.wait_ready()
    assert started.stop() == 0


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return [each["answer"] for each in golden(ASKED[:NUM_RIGHT])]


def turn(server: RealServer, **knobs: Any) -> None:
    httpx.patch(f"{server.url}/admin/knobs", json=knobs, headers=ADMIN).raise_for_status()


def division(server: RealServer) -> dict[str, Any]:
    state = httpx.get(f"{server.url}/admin/state", headers=ADMIN).raise_for_status().json()
    (of_encoder,) = state["partition"].values()
    assert isinstance(of_encoder, dict)
    return of_encoder


def core_of(server: RealServer, name: str) -> int:
    """The engine core's process: of those that write the engine's log, the one that computes."""
    for pid in descendants(server.process.pid):
        log = Path(f"/proc/{pid}/fd/1")
        writes = log.exists() and log.readlink().name == f"{name}.log"
        if writes and "EngineCor" in Path(f"/proc/{pid}/comm").read_text():
            return pid
    raise AssertionError(f"{name} has no engine core")


def ask(server: RealServer, order: list[int]) -> soak.Answers:
    answers = soak.Answers()
    asyncio.run(soak.ask(server.url, ASKED, order, answers))
    return answers


def prefill_texts(server: RealServer, seed: int, num_clients: int = 4) -> None:
    """Long texts for PREFILL_S, so many at a time; no two are alike."""
    rng, end = random.Random(seed), time.monotonic() + PREFILL_S

    async def client(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            prompt = rng.choices(range(20, 400), k=700)  # token ids
            body = {"model": "tiny-llava", "prompt": prompt, "max_tokens": 1}
            (await http.post(f"{server.url}/v1/completions", json=body)).raise_for_status()

    async def clients() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(*(client(http) for _ in range(num_clients)))

    asyncio.run(clients())


async def pictures_and_texts(server: RealServer, seed: int) -> None:
    """New pictures for as long as the texts take."""
    answers, number = soak.Answers(), 0
    texts = asyncio.create_task(asyncio.to_thread(prefill_texts, server, seed, 1))
    while not texts.done():
        number += 1
        asked = soak.questions(48, seed=1000 * seed + number)
        await soak.ask(server.url, asked, list(range(48)), answers)
    await texts
    assert answers.failures == []


def cpu_s(pid: int) -> Counter[int]:
    """CPU seconds of each thread."""
    used = Counter[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        used[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return Counter({task: ns // 1_000_000 for task, ns in used.items()})


@contextmanager
def watching(server: RealServer, seen: Counter[tuple[str, int, tuple[int, ...]]]) -> Iterator[None]:
    """Counts (engine, units, mask of its main thread) as seen from here, while steps run.

    Of prefill the units that its step leaves, of encode those that its forward has.
    """
    cell = Cell(server.run_dir / "encode-0.cell")
    pids = {name: core_of(server, name) for name in ("encode-0", "local-prefill-0")}
    stop = threading.Event()

    def look() -> None:
        words, step, leaves = cell.words, 0, IDLE
        while not stop.is_set():
            now = words[Word.PREFILL_STEPS], cell.left()
            if now[0] != step:  # it says what it leaves, is confined, and counts: it runs
                step, leaves = now
            mask = tuple(sorted(os.sched_getaffinity(pids["local-prefill-0"])))
            if now == (step, leaves) == (words[Word.PREFILL_STEPS], cell.left()) != (step, IDLE):
                seen["local-prefill-0", leaves, mask] += 1
            forwards, units = words[Word.ENCODE_FORWARDS], words[Word.ENCODE_UNITS]
            mask = tuple(sorted(os.sched_getaffinity(pids["encode-0"])))
            if (forwards, units) == (words[Word.ENCODE_FORWARDS], words[Word.ENCODE_UNITS]):
                seen["encode-0", units, mask] += 1
            time.sleep(0.0002)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        cell.close()


def test_both_engines_say_what_divides_their_device(divided: RealServer) -> None:
    assert "encode-0: device divided by cpu (cores for each batch" in divided.text
    of_encoder = division(divided)
    for side in ("encode", "prefill"):
        driven = of_encoder[side]
        assert (driven["driver"], driven["total"]) == ("cpu", len(CORES))
    metrics = httpx.get(f"{divided.url}/metrics").text
    assert 'easerve_partition_info{driver="cpu",side="prefill",worker="encode-0"} 1.0' in metrics


def test_masks_follow_every_encode_batch_and_its_end(
    divided: RealServer, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Counter[tuple[str, int, tuple[int, ...]]]()
    turn(divided, remote_share=0.0, how="dynamic")
    ask(divided, [0])  # from now on the encoder has its part
    before = division(divided)["counts"]
    with watching(divided, seen):
        for seed in (1, 2):
            asyncio.run(pictures_and_texts(divided, seed))
    most = division(divided)["encode"]["parts"][-1]
    wrong = {key for key in seen if key[0] == "local-prefill-0" and key[2] != mask_beside(key[1])}
    assert not wrong, seen
    assert seen["local-prefill-0", most, mask_beside(most)], "beside an encode"
    assert seen["local-prefill-0", 0, mask_beside(0)], "after its end"
    assert seen["encode-0", most, tuple(CORES[:most])]
    assert {key[1:] for key in seen if key[0] == "encode-0"} == {(most, tuple(CORES[:most]))}
    after = division(divided)["counts"]
    assert after["forwards"] > before["forwards"]
    assert after["narrow"] > before["narrow"]
    num_switches = after["prefill_switches"] - before["prefill_switches"]
    switch_us = 1e6 * (after["prefill_switch_s"] - before["prefill_switch_s"]) / num_switches
    with capsys.disabled():
        print(f"\n{num_switches} switches of prefill's cores, {switch_us:.0f} us each")


def mask_beside(units: int) -> tuple[int, ...]:
    return tuple(CORES[units:])


def test_as_many_threads_compute_as_there_are_cores(divided: RealServer) -> None:
    """Rule static leaves prefill a part, also while nothing is encoded."""
    pid = core_of(divided, "local-prefill-0")
    turn(divided, remote_share=0.0)
    for how, num_cores in (("none", len(CORES)), ("static", len(CORES) - len(CORES) // 2)):
        turn(divided, how=how)
        prefill_texts(divided, seed=1)  # a thread that is not needed ends, one that is begins
        before = cpu_s(pid)
        prefill_texts(divided, seed=2)
        used = cpu_s(pid)
        used.subtract(before)
        assert sum(ms > 1e3 * BUSY_S for ms in used.values()) == num_cores, (how, used)


@pytest.mark.parametrize("how", RULES)
def test_answers_are_those_of_an_undivided_device(
    divided: RealServer, right: list[list[int]], how: str
) -> None:
    turn(divided, remote_share=0.3, how=how)
    answers = ask(divided, list(range(NUM_RIGHT)))
    assert answers.failures == []
    assert answers.wrong(right) == []


def test_a_gate_makes_prefill_pause(divided: RealServer) -> None:
    turn(divided, remote_share=0.0, how="gate")
    before = division(divided)["counts"]["paused_s"]
    for seed in range(4, 9):  # a step that would begin beside an encode comes sooner or later
        asyncio.run(pictures_and_texts(divided, seed))
        if division(divided)["counts"]["paused_s"] > before:
            return
    pytest.fail("it never paused")


def test_a_recorded_log_gives_the_same_actions(divided: RealServer, tmp_path: Path) -> None:
    """Of all that was asked here: every rule, changed while serving, prefills of both sides."""
    assert divided.decision_log is not None
    log, copy = divided.decision_log, tmp_path / "decisions.jsonl"
    size = log.stat().st_size

    def written() -> bool:
        ask(divided, [0])
        return log.stat().st_size > size

    wait_until(written, 10, "what was decided before, written")
    copy.write_bytes(log.read_bytes())
    assert replay(copy).difference is None
    actions = [action for step in read(copy) for action in step.actions]
    demands = {action.demand.reason for action in actions if isinstance(action, StartEncode)}
    assert demands >= {"static", "gate", "shared", "no profile"}
    assert any(isinstance(action, Divide) for action in actions)
    sides = {each.placement.side for each in actions if isinstance(each, StartPrefill)}
    assert sides == set(Side)

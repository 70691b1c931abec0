"""Offload on real engines: the share, the answers whichever side prefilled, the loss of a side."""

import asyncio
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from easerve.serve.decisions import read, replay
from easerve.types import Side

from ..processes import wait_until
from . import soak
from .conftest import ADMIN_TOKEN, RealServer, descendants, golden

ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
LOCAL = "local-prefill-0"
ASKED = soak.questions(soak.NUM_PICTURES, seed=7)


@pytest.fixture(scope="module")
def offload(
    start: Callable[..., RealServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    options = ("--port", "0", "--admin-token", ADMIN_TOKEN, "--decision-log", str(log))
    started = start(*options, source=soak.OFFLOAD)
    started.decision_log = log
    yield started.wait_ready()
    assert started.stop() == 0


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """Golden tokens of the first questions."""
    return [each["answer"] for each in golden(ASKED[: soak.NUM_GOLDEN])]


def turn(server: RealServer, **knobs: Any) -> None:
    httpx.patch(f"{server.url}/admin/knobs", json=knobs, headers=ADMIN).raise_for_status()


def value(server: RealServer, name: str, **labels: str) -> float:
    """Of a metric, over all other labels."""
    lines = re.findall(rf"^{name}({{.*}})? (\S+)$", httpx.get(f"{server.url}/metrics").text, re.M)
    wanted = [f'{label}="{each}"' for label, each in labels.items()]
    return sum(float(number) for given, number in lines if all(each in given for each in wanted))


def placed(server: RealServer, side: Side) -> float:
    return value(server, "easerve_prefill_placed_total", side=side)


def order_of(number: int, seed: int) -> list[int]:
    """So many questions, each of them among the first 250."""
    rng = random.Random(seed)
    order = rng.sample(range(len(ASKED)), len(ASKED))
    return [*order, *rng.choices(order, k=max(0, number - len(order)))][:number]


def ask(server: RealServer, order: Sequence[int]) -> soak.Answers:
    answers = soak.Answers()
    asyncio.run(soak.ask(server.url, ASKED, order, answers))
    return answers


def pids_of(server: RealServer, name: str) -> list[int]:
    """The processes of an engine: those that write its log."""
    found = []
    for pid in descendants(server.process.pid):
        log = Path(f"/proc/{pid}/fd/1")
        if log.exists() and log.readlink().name == f"{name}.log":
            found.append(pid)
    return found


@pytest.mark.parametrize("share", [0.3, 0.0, 0.55, 1.0])
def test_500_requests_are_shared_out_exactly_and_answered_right(
    offload: RealServer, right: list[list[int]], share: float
) -> None:
    turn(offload, remote_share=share, where="band")
    turn(offload, where="deficit")  # a new count
    before = {side: placed(offload, side) for side in Side}
    answers = ask(offload, order_of(500, seed=round(100 * share)))
    assert answers.failures == []
    assert answers.unequal == []
    assert answers.wrong(right) == []
    num_remote, num_local = (placed(offload, s) - before[s] for s in (Side.REMOTE, Side.LOCAL))
    assert num_remote + num_local == 500
    assert abs(num_remote - 500 * share) <= 0.5


def test_pictures_seen_before_are_not_encoded_again(offload: RealServer) -> None:
    turn(offload, remote_share=1.0)
    answers = ask(offload, [0])
    before = {
        source: value(offload, "easerve_embedding_items_total", source=source)
        for source in ("prefill", "encoder", "encoded")
    }
    answers = ask(offload, [0] * 20)
    assert answers.failures == []
    for source, number in {"prefill": 20, "encoder": 0, "encoded": 0}.items():
        now = value(offload, "easerve_embedding_items_total", source=source)
        assert now - before[source] == number


def test_nothing_has_grown(offload: RealServer) -> None:
    """Both prefill engines have seen every picture by now."""
    turn(offload, remote_share=0.55)
    before = soak.footprint(offload)
    answers = ask(offload, order_of(250, 11))
    assert answers.failures == []
    assert soak.growth(before, soak.footprint(offload), 250) == []


def test_kill_9_of_local_prefill_under_load_costs_no_request(
    offload: RealServer, right: list[list[int]]
) -> None:
    """All go to the remote side until it is back; then the share is kept again."""
    turn(offload, remote_share=0.3)
    pids = pids_of(offload, LOCAL)
    assert len(pids) == 2

    async def load() -> soak.Answers:
        answers = soak.Answers()
        asking = asyncio.create_task(soak.ask(offload.url, ASKED, order_of(200, 8), answers))
        await asyncio.sleep(1)
        assert not asking.done()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asking
        return answers

    answers = asyncio.run(load())
    assert answers.failures == []
    assert answers.unequal == []
    assert answers.wrong(right) == []
    assert f"{LOCAL} ended (SIGKILL)" in offload.text
    wait_until(lambda: value(offload, "easerve_workers", stage="prefill") == 2, 60, "its return")
    before = {side: placed(offload, side) for side in Side}
    answers = ask(offload, order_of(60, 10))
    assert answers.failures == []
    assert answers.wrong(right) == []
    assert abs(placed(offload, Side.REMOTE) - before[Side.REMOTE] - 18) <= 1


def test_the_log_says_where_every_prefill_went_and_why(offload: RealServer, tmp_path: Path) -> None:
    assert offload.decision_log is not None
    copy = tmp_path / "decisions.jsonl"
    ask(offload, [1])
    copy.write_bytes(offload.decision_log.read_bytes())
    assert replay(copy).difference is None
    placements = [
        action.placement
        for step in read(copy)
        for action in step.actions
        if hasattr(action, "placement")
    ]
    assert len(placements) > 2000
    assert {each.reason for each in placements} >= {"share", "only side"}

"""What an encoder's API server announces of open requests, around an app of a few lines."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.partition.cell import Cell, Word
from easerve.engines.partition.setup import Setup, tell
from easerve.engines.partition.sides import LEASE_NS
from easerve.engines.protocol import Driven
from easerve.engines.vllm import announcer
from easerve.engines.vllm.announcer import DEMAND, PARTITION, Announcer, header, parse
from easerve.policy.partition import ALL, SHARED, Demand
from easerve.types import Stage

App = Callable[[Any, Any, Any], Awaitable[None]]
PATIENCE_S = 5.0


class Device:
    """A page, what the app under the announcer sees of it, and the announcer."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.cell = setup, Cell(Path(setup.cell))
        self.seen: list[int] = []
        """Demanded when the app was called."""
        self.sent: list[Any] = []
        self.app: App = self.answers
        self.announcer = Announcer(self._call)

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(self.demanded)
        await self.app(scope, receive, send)

    async def answers(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send("answer")

    @property
    def demanded(self) -> int:
        return self.cell.demanded()

    async def request(
        self,
        demand: str | None = None,
        path: str = "/v1",
        kind: str = "http",
        method: str = "POST",
    ) -> None:
        async def receive() -> dict[str, Any]:
            assert self.seen, "the body is the app's to read"
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        headers = [(b"content-type", b"application/json")]
        if demand is not None:
            headers.append((DEMAND.encode(), demand.encode()))
        scope = {"type": kind, "path": path, "headers": headers}
        scope |= {"method": method} if kind == "http" else {}
        await self.announcer(scope, receive, send)

    @property
    def answer(self) -> tuple[int, Any]:
        """Status and JSON of the only answer that the announcer has given itself."""
        start, body = self.sent
        headers = dict(start["headers"])
        assert headers[b"content-type"] == b"application/json"
        assert headers[b"content-length"] == str(len(body["body"])).encode()
        return start["status"], json.loads(body["body"])


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    setup = Setup(cell=str(tmp_path / "encode-0.cell"), driver="cpu", why="for a test")
    Cell.create(Path(setup.cell))
    for name, value in setup.to_environment().items():
        monkeypatch.setenv(name, value)
    return Device(setup)


class Held:
    """An app that answers when it is told to."""

    def __init__(self, device: Device) -> None:
        self._device, self._ends = device, dict[str, asyncio.Event]()
        device.app = self.app

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self._ends[scope["path"]] = asyncio.Event()
        await self._ends[scope["path"]].wait()

    async def open(self, name: str, demand: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._device.request(demand, name))
        while name not in self._ends:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return task

    async def end(self, name: str, task: asyncio.Task[None]) -> None:
        self._ends[name].set()
        await task


@pytest.fixture
def held(device: Device) -> Held:
    return Held(device)


# The header ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, 1, 24, ALL])
@pytest.mark.parametrize("standing", [False, True])
def test_a_header_is_read_as_it_was_meant(units: int, standing: bool) -> None:
    assert parse(header(Demand(units, standing, "why"))) == (units, standing)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "-1",
        "+1",
        " 1",
        "1_0",
        "4096",
        "9" * 5000,
        "1.5",
        "24 sitting",
        "24  standing",
        "24 standing x",
        "standing",
        "\xb2",
    ],
)
async def test_what_is_no_demand_is_refused_before_the_app_hears_of_it(
    device: Device, value: str
) -> None:
    device.cell.announce(3, None)
    await device.request(value)
    status, content = device.answer
    assert status == 400
    assert content["error"]["message"].startswith(f"{DEMAND}: ")
    assert device.seen == []
    assert device.demanded == 3


def test_digits_of_other_scripts_are_no_number() -> None:
    with pytest.raises(ValueError, match="\u0662\u0664"):
        parse("\u0662\u0664")


# While a request is open --------------------------------------------------------------------------


async def test_a_demand_is_announced_before_the_body_is_read_and_gone_with_the_answer(
    device: Device,
) -> None:
    await device.request("24")
    assert (device.seen, device.sent) == ([24], ["answer"])
    assert device.demanded == 0


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_what_is_no_request_passes_through(device: Device, kind: str) -> None:
    await device.request("24", kind=kind)
    assert (device.seen, device.sent) == ([0], ["answer"])


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("demand", ["24", "24 standing", "nothing"])
async def test_only_a_post_announces(device: Device, method: str, demand: str) -> None:
    await device.request("5 standing")
    await device.request(demand, method=method)
    assert (device.seen, device.sent) == ([5, 5], ["answer"] * 2)
    assert device.demanded == 5


@pytest.mark.parametrize(("before", "after"), [("0", 0), ("5 standing", 5)])
async def test_a_request_without_a_demand_passes_through(
    device: Device, before: str, after: int
) -> None:
    await device.request(before)
    await device.request()
    assert device.seen == [after, after]
    assert device.sent == ["answer"] * 2
    assert device.demanded == after


async def test_a_demand_of_nothing_announces_nothing(device: Device) -> None:
    await device.request(header(SHARED))
    assert (device.seen, device.sent) == ([0], ["answer"])


async def test_a_request_that_fails_is_withdrawn(device: Device) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no such route")

    device.app = fails
    with pytest.raises(RuntimeError, match="no such route"):
        await device.request("24")
    assert (device.seen, device.demanded) == ([24], 0)


async def test_a_request_whose_client_has_left_is_withdrawn(device: Device, held: Held) -> None:
    task = await held.open("a", "24")
    assert device.demanded == 24
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert device.demanded == 0


async def test_the_largest_of_the_open_demands_is_announced(device: Device, held: Held) -> None:
    small = await held.open("small", "8")
    assert device.demanded == 8
    large = await held.open("large", "24")
    assert device.demanded == 24
    middle = await held.open("middle", "16")
    assert device.demanded == 24
    await held.end("large", large)
    assert device.demanded == 16
    await held.end("small", small)
    assert device.demanded == 16
    await held.end("middle", middle)
    assert device.demanded == 0


async def test_what_is_announced_anew_has_not_been_served(device: Device, held: Held) -> None:
    first = await held.open("first", "8")
    device.cell.serve(device.cell.announced())
    assert device.demanded == 0
    await asyncio.sleep(0.001)
    second = await held.open("second", "8")
    assert device.demanded == 8
    for name, task in (("first", first), ("second", second)):
        await held.end(name, task)


async def test_a_forward_does_not_end_what_several_open_requests_want(
    device: Device, held: Held
) -> None:
    first, second = await held.open("first", "8"), await held.open("second", "8")
    device.cell.serve(device.cell.announced())
    assert device.demanded == 8, "of the other one"
    await held.end("first", first)
    assert device.demanded == 8
    device.cell.serve(device.cell.announced())
    assert device.demanded == 0, "prefill need not wait for the answer"
    await held.end("second", second)
    assert device.cell.announced() == 0


# Leases -------------------------------------------------------------------------------------------


async def until_renewed(device: Device, word: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while device.cell.announced() == word:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def deadline_ns(device: Device) -> int:
    return (device.cell.announced() >> 12) * 1000


async def test_an_announcement_is_renewed_while_its_request_is_open(
    device: Device, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert announcer.RENEW_S * 1e9 <= LEASE_NS / 2
    monkeypatch.setattr(announcer, "RENEW_S", 0.002)
    for name in ("first", "second"):
        task = await held.open(name, "24")
        for _ in range(2):
            before, word = deadline_ns(device), device.cell.announced()
            assert 0 < before - device.cell.clock_ns() <= LEASE_NS
            await until_renewed(device, word)
            assert deadline_ns(device) > before
            assert device.demanded == 24
        await held.end(name, task)
        assert device.cell.announced() == 0
        await asyncio.sleep(0.01)
        assert device.cell.announced() == 0, "nothing is renewed any more"
        assert device.announcer._renewing is None


async def test_an_encoder_that_dies_gives_everything_back(device: Device, held: Held) -> None:
    task = await held.open("a", "24")
    late = Cell(Path(device.setup.cell), lambda: device.cell.clock_ns() + LEASE_NS)
    assert (device.demanded, late.demanded()) == (24, 0)
    await held.end("a", task)


async def until_demanded(device: Device, units: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while device.demanded != units:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_units_are_not_held_for_a_worker_that_hangs(
    device: Device, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "RENEW_S", 0.002)
    monkeypatch.setattr(announcer, "STUCK_S", 0.03)
    first = await held.open("first", "24")
    await until_demanded(device, 0)
    second = await held.open("second", "40")
    assert device.demanded == 40, "it may hang no more"
    await until_demanded(device, 0)
    device.cell.add(Word.ENCODE_FORWARDS)
    await until_demanded(device, 40)
    await until_demanded(device, 0)
    await held.end("first", first)
    await held.end("second", second)
    await asyncio.sleep(0.01)
    third = await held.open("third", "8")
    assert device.demanded == 8, "nothing has hung since then"
    await held.end("third", third)


# Standing -----------------------------------------------------------------------------------------


async def test_what_stands_stays_until_another_demand_comes(device: Device) -> None:
    await device.request("24 standing")
    assert device.seen == [24]
    late = Cell(Path(device.setup.cell), lambda: device.cell.clock_ns() + 1000 * LEASE_NS)
    assert (device.demanded, late.demanded()) == (24, 24)
    device.cell.serve(device.cell.announced())
    assert device.demanded == 24, "also between batches"
    await device.request("8 standing")
    assert device.demanded == 8
    await device.request("16")
    assert device.seen[-1] == 16
    assert device.demanded == 0


async def test_what_stands_is_announced_as_such_beside_smaller_demands(
    device: Device, held: Held
) -> None:
    small = await held.open("small", "8")
    large = await held.open("large", "24 standing")
    word = device.cell.announced()
    await held.end("small", small)
    await held.end("large", large)
    assert device.cell.announced() == word
    assert device.demanded == 24


# Its own path -------------------------------------------------------------------------------------


async def test_how_the_device_is_divided_is_told(device: Device) -> None:
    driven = Driven("cpu", "for a test", 4, (1, 2, 3))
    tell(device.setup, Stage.PREFILL, driven)
    device.cell.announce(4, None)
    await device.request(path=PARTITION, method="GET")
    counts = asdict(device.cell.state()) | {"demanded": 3}
    said = asdict(driven) | {"parts": [1, 2, 3]}
    assert device.answer == (200, {"encode": None, "prefill": said, "counts": counts})
    assert device.seen == []


@pytest.mark.parametrize(("demand", "stands"), [("24 standing", 24), ("0", 0), ("24", 0)])
async def test_what_stands_is_said_there_without_a_call(
    device: Device, demand: str, stands: int
) -> None:
    tell(device.setup, Stage.PREFILL, Driven("green-context", "for a test", 132, (8, 24)))
    await device.request("5 standing")
    device.seen.clear()
    device.sent.clear()
    await device.request(demand, path=PARTITION)
    status, content = device.answer
    assert (status, content["counts"]["demanded"]) == (200, stands)
    assert device.demanded == stands
    assert device.seen == []

"""What the client of an encoder says of its device, and hears of it."""

from collections.abc import AsyncIterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.partition.cell import State
from easerve.engines.protocol import Division, Driven, EncodeCall, Encoded, EngineError, Media
from easerve.engines.vllm import client
from easerve.engines.vllm.announcer import DEMAND, PARTITION
from easerve.engines.vllm.client import CHAT, GENERATE, VllmEngine
from easerve.policy.partition import ALL, SHARED, Demand
from easerve.types import Stage, WorkerId

from .stand_in import StandIn, breaks_off, fails, replies, stand_in

CALLS = [EncodeCall(Media("k0", "image_url", "data:0"), 32, (WorkerId("prefill-0"),))]
COUNTS: dict[str, Any] = {field.name: 0 for field in fields(State)}
DRIVEN = Driven("cpu", "4 cores", 4, (1, 2, 3))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StandIn]:
    async with stand_in(tmp_path / "s") as server:
        yield server


class Engines:
    """Engines of one socket, closed at the end."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.made: list[VllmEngine] = []

    def make(self, divided: bool = True, media_at_prefill: bool = False) -> VllmEngine:
        made = VllmEngine(
            WorkerId("e-0"),
            Stage.ENCODE,
            self._socket,
            "tiny",
            media_at_prefill=media_at_prefill,
            divided=divided,
        )
        self.made.append(made)
        return made


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    engines = Engines(tmp_path / "s")
    yield engines
    for engine in engines.made:
        await engine.close()


@pytest.mark.parametrize(("sparse", "path"), [(False, GENERATE), (True, CHAT)])
@pytest.mark.parametrize(
    ("demand", "said"),
    [
        (Demand(24, False, "table"), "24"),
        (Demand(24, True, "static"), "24 standing"),
        (Demand(ALL, False, "gate"), "4095"),
        (SHARED, "0"),
    ],
)
async def test_a_call_says_what_it_demands_in_a_header(
    server: StandIn, engines: Engines, sparse: bool, path: str, demand: Demand, said: str
) -> None:
    assert await engines.make(media_at_prefill=sparse).encode(CALLS, demand) == Encoded()
    ((got, body),), (headers,) = server.requests, server.headers
    assert (got, headers[DEMAND]) == (path, said)
    assert headers["content-type"] == "application/json"
    assert "units" not in str(body)


async def test_an_encoder_that_has_its_device_alone_is_told_nothing(
    server: StandIn, engines: Engines
) -> None:
    alone = engines.make(divided=False)
    await alone.encode(CALLS, Demand(24, True, "static"))
    await alone.divide(Demand(24, True, "static"))
    assert await alone.division() is None
    assert [path for path, _ in server.requests] == [GENERATE]
    assert DEMAND not in server.headers[0]


async def test_other_calls_demand_nothing(server: StandIn, engines: Engines) -> None:
    server.answer = replies({"token_ids": [1], "features": None, "sampling_params": {}})
    await engines.make().render({"messages": []})
    assert DEMAND not in server.headers[0]


@pytest.mark.parametrize(
    ("demand", "said"), [(Demand(3, True, "static"), "3 standing"), (SHARED, "0")]
)
async def test_what_stands_is_said_without_a_call(
    server: StandIn, engines: Engines, demand: Demand, said: str
) -> None:
    await engines.make().divide(demand)
    ((path, _),), (headers,) = server.requests, server.headers
    assert (path, headers[DEMAND]) == (PARTITION, said)


@pytest.mark.parametrize("prefill", [None, DRIVEN])
async def test_how_a_device_is_divided_is_read(
    server: StandIn, engines: Engines, prefill: Driven | None
) -> None:
    said = Division(DRIVEN, prefill, COUNTS | {"late": 2, "paused_s": 0.5})
    server.answer = replies(asdict(said))
    assert await engines.make().division() == said
    assert server.requests == [(PARTITION, None)]


@pytest.mark.parametrize("answer", ["nothing", {}, {"encode": 1}, []], ids=str)
async def test_what_is_not_a_division_is_an_error(
    server: StandIn, engines: Engines, answer: Any
) -> None:
    server.answer = replies(answer)
    with pytest.raises(EngineError, match=r"^e-0: "):
        await engines.make().division()


async def test_a_refusal_of_a_division_is_the_engines(server: StandIn, engines: Engines) -> None:
    server.answer = fails(400, "x-easerve-demand: b'x'")
    with pytest.raises(EngineError, match="x-easerve-demand: b'x'") as error:
        await engines.make().divide(SHARED)
    assert not error.value.retryable
    with pytest.raises(EngineError):
        await engines.make().division()


async def test_an_encoder_that_is_gone_is_an_error(engines: Engines) -> None:
    for call in (engines.make().division(), engines.make().divide(SHARED)):
        with pytest.raises(EngineError, match=r"^e-0: ") as error:
            await call
        assert error.value.retryable


async def test_an_encoder_that_hangs_up_or_keeps_silent_is_an_error(
    server: StandIn, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HEALTH_TIMEOUT_S", 0.01)
    server.answer = breaks_off
    for call in (engines.make().division(), engines.make().divide(SHARED)):
        with pytest.raises(EngineError, match=r"^e-0: "):
            await call
    server.answer = server.never
    with pytest.raises(EngineError, match=r"^e-0: "):
        await engines.make().division()
    await server.hung_up.wait()

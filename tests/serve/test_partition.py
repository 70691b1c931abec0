"""How over the server: demands on their way to encoders, and what is shown of what these say."""

import asyncio
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from easerve.config import Policy
from easerve.engines.partition.cell import State
from easerve.engines.protocol import Division, Driven, EngineError
from easerve.policy.partition import ALL, HALF, SHARED, Demand
from easerve.serve.metrics import DIVISION_COUNTS, Metrics
from easerve.types import WorkerId

from .conftest import Serve
from .server import (
    Server,
    answer,
    answer_of,
    ask_about,
    error_of,
    metrics_of,
    picture,
    until,
)
from .test_admin import KNOBS, TOKEN, bearing, knobs, turn

RED, GREEN = picture("red"), picture("green")
E0 = WorkerId("e0")
ENGINES = ("e0", "l0", "p0", "d0")
DEFAULTS = Policy().model_dump()
IDLE: dict[str, Any] = {field.name: 0 for field in fields(State)}
CPU, GATE = Driven("cpu", "4 cores", 4, (1, 2, 3)), Driven("gate", "cpu: one core", 1, ())


def division(encode: Driven | None = CPU, prefill: Driven | None = CPU, **counts: Any) -> Division:
    return Division(encode, prefill, IDLE | counts)


@pytest.fixture
async def divided(serve: Serve) -> Server:
    return await serve(ENGINES, server={"admin_token": TOKEN}, partition={})


async def ask(server: Server, url: str = RED) -> None:
    assert answer_of(await server.ask(ask_about("which?", url))) == answer("which?", url)


# Demands ------------------------------------------------------------------------------------------


async def test_the_demand_of_a_batch_gets_to_its_encoder(divided: Server) -> None:
    await ask(divided)
    assert divided.engines["e0"].demands == [Demand(HALF, False, "no profile")]
    assert (await turn(divided, {"how": "gate"})).status_code == 200
    await ask(divided, GREEN)
    assert divided.engines["e0"].demands[1:] == [Demand(ALL, False, "gate")]
    found = await metrics_of(divided)
    assert found["easerve_partition_demands_total no profile half"] == 1
    assert found["easerve_partition_demands_total gate all"] == 1


async def test_without_a_section_partition_nothing_is_demanded(serve: Serve) -> None:
    server = await serve(ENGINES)
    await ask(server)
    assert server.engines["e0"].demands == [SHARED]
    assert not any(
        name.startswith("easerve_partition_demands") for name in await metrics_of(server)
    )


async def test_what_stands_is_said_to_every_encoder_at_once(divided: Server) -> None:
    divided.add("e1")
    await turn(divided, {"how": "static", "encode_units": 2})
    encoders = [divided.engines[name] for name in ("e0", "e1")]
    await until(lambda: all(encoder.demands for encoder in encoders))
    assert [encoder.demands for encoder in encoders] == [[Demand(2, True, "static")]] * 2
    divided.add("e2")
    await until(lambda: divided.engines["e2"].demands)
    assert divided.num_calls("divide") == 3


@pytest.mark.parametrize("dies", [False, True])
async def test_a_division_that_fails_costs_no_request(divided: Server, dies: bool) -> None:
    encoder = divided.engines["e0"]
    encoder.failures["divide"].append(EngineError("it is busy", None if dies else 500))
    await turn(divided, {"how": "static"})
    await until(lambda: encoder.calls["divide"] and not encoder.running)
    await ask(divided)
    assert encoder.demands == [Demand(HALF, True, "static")], "the call says it again"


async def test_an_encoder_that_does_not_answer_to_a_division_is_lost(divided: Server) -> None:
    divided.engines["e0"].dead = True
    await turn(divided, {"how": "static"})
    await until(lambda: E0 not in [engine.worker_id for engine in divided.driver.engines()])


async def test_a_division_on_its_way_ends_with_its_encoder(divided: Server) -> None:
    divided.hold("divide")
    await turn(divided, {"how": "static"})
    await divided.working("divide")
    divided.lose("e0")
    await divided.idle()
    divided.release()


# What encoders say --------------------------------------------------------------------------------


async def test_only_encoders_are_asked_and_only_those_that_divide_answer(divided: Server) -> None:
    divided.add("e1")
    divided.engines["e0"].divided = division(demanded=2)
    await divided.driver.see_divisions()
    assert divided.driver.divisions == {E0: division(demanded=2)}
    asked = {name for name, engine in divided.engines.items() if engine.calls["division"]}
    assert asked == {"e0", "e1"}


async def test_what_was_seen_last_stays_until_the_encoder_is_lost(divided: Server) -> None:
    encoder = divided.engines["e0"]
    encoder.divided = division()
    await divided.driver.see_divisions()
    encoder.failures["division"].append(EngineError("too slow"))
    await divided.driver.see_divisions()
    assert divided.driver.divisions == {E0: division()}
    divided.lose("e0")
    assert divided.driver.divisions == {}


# Metrics ------------------------------------------------------------------------------------------


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    value: float | None = metrics.registry.get_sample_value(
        f"easerve_partition_{name}", {"worker": "e0", **labels}
    )
    return value


NAMES = {
    "forwards": "forwards_total",
    "late": "late_total",
    "steps": "steps_total",
    "narrow": "narrow_total",
    "forced": "forced_total",
    "paused_s": "paused_seconds_total",
    "encode_switches": "encode_switches_total",
    "encode_switch_s": "encode_switch_seconds_total",
    "prefill_switches": "prefill_switches_total",
    "prefill_switch_s": "prefill_switch_seconds_total",
}


def test_every_count_has_its_name() -> None:
    assert NAMES.keys() == DIVISION_COUNTS.keys() <= IDLE.keys()
    metrics = Metrics()
    counts: dict[str, Any] = {name: number + 0.5 for number, name in enumerate(NAMES)}
    metrics.divided(E0, division(demanded=7, **counts))
    assert {name: sample(metrics, NAMES[name]) for name in NAMES} == counts
    assert sample(metrics, "demanded_units") == 7


def test_counts_go_on_where_an_engine_begins_anew() -> None:
    metrics = Metrics()
    for forwards in (5, 5, 8, 2, 3):
        metrics.divided(E0, division(forwards=forwards))
    assert sample(metrics, "forwards_total") == 8 + 3
    metrics.divided(WorkerId("e1"), division(forwards=1))
    assert sample(metrics, "forwards_total") == 11


def test_the_driver_of_each_side_is_shown_until_it_is_another() -> None:
    metrics = Metrics()
    metrics.divided(E0, division(prefill=None))
    assert sample(metrics, "info", side="encode", driver="cpu") == 1
    assert sample(metrics, "info", side="prefill", driver="cpu") is None
    metrics.divided(E0, division())
    assert sample(metrics, "info", side="prefill", driver="cpu") == 1
    metrics.divided(E0, division(prefill=GATE))
    assert sample(metrics, "info", side="prefill", driver="gate") == 1
    assert sample(metrics, "info", side="prefill", driver="cpu") is None


async def test_what_encoders_say_is_among_the_metrics(divided: Server) -> None:
    divided.engines["e0"].divided = division(forwards=3, late=1)
    await divided.driver.see_divisions()
    found = await metrics_of(divided)
    assert found["easerve_partition_forwards_total e0"] == 3
    assert found["easerve_partition_late_total e0"] == 1
    assert found["easerve_partition_info cpu encode e0"] == 1


# Admin --------------------------------------------------------------------------------------------

STATE = "/admin/state"


async def state(server: Server) -> dict[str, Any]:
    response = await server.client.get(STATE, headers=bearing(TOKEN))
    assert response.status_code == 200
    content: dict[str, Any] = response.json()
    return content


@pytest.mark.parametrize("secret", [None, "another"])
async def test_the_state_is_the_admins(divided: Server, secret: str | None) -> None:
    headers = {} if secret is None else bearing(secret)
    error_of(await divided.client.get(STATE, headers=headers), 401)
    assert not divided.num_calls("division")


async def test_without_a_token_there_is_no_state(server: Server) -> None:
    error_of(await server.client.get(STATE, headers=bearing(TOKEN)), 404)


async def test_the_state_is_what_is_served_by_whom(divided: Server) -> None:
    divided.engines["e0"].divided = division(GATE, None, late=2)
    shown = await state(divided)
    assert shown["partition"] == {
        "e0": {
            "encode": asdict(GATE) | {"parts": []},
            "prefill": None,
            "counts": IDLE | {"late": 2},
        }
    }
    assert shown["knobs"] == await knobs(divided)
    assert (shown["open"], shown["queues"]) == (0, {"encode": 0, "prefill": 0})
    assert shown["engines"]["l0"] == {"stage": "prefill", "beside": ["e0"], "backlog_tokens": 0}
    assert list(shown["engines"]) == ["e0", "l0", "p0", "d0"]
    divided.hold("encode")
    task = asyncio.create_task(divided.ask(ask_about("which?", RED)))
    await divided.working("encode")
    shown = await state(divided)
    assert shown["open"] == 1
    assert shown["engines"]["e0"]["backlog_tokens"] > 0
    divided.release()
    await task


async def test_the_state_is_shown_though_an_encoder_does_not_answer(divided: Server) -> None:
    divided.engines["e0"].failures["division"].append(EngineError("too slow"))
    assert (await state(divided))["partition"] == {}


@pytest.mark.parametrize(
    ("key", "other"), [("how", "gate"), ("encode_target_s", 0.5), ("encode_units", 3)]
)
async def test_a_rule_needs_devices_to_divide(serve: Serve, key: str, other: Any) -> None:
    server = await serve(ENGINES, server={"admin_token": TOKEN})
    error = error_of(await turn(server, {key: other, "when": "none"}), 400)
    assert error["param"] == key
    assert error["message"].startswith(f"{key}: needs a section partition in the deployment file")
    assert await knobs(server) == DEFAULTS
    assert (await turn(server, DEFAULTS)).json() == DEFAULTS, "what it is already, it may be"


async def test_knobs_of_divided_devices_are_turned(divided: Server) -> None:
    changed = DEFAULTS | {"how": "static", "encode_target_s": 0.5, "encode_units": 3}
    assert (await turn(divided, changed)).json() == changed
    own = divided.core.knobs
    assert (own.how, own.encode_target_s, own.encode_units) == ("static", 0.5, 3)
    assert (await turn(divided, {"encode_units": None})).json()["encode_units"] is None
    for content in ({"how": "often"}, {"encode_units": 0}, {"encode_target_s": 0}):
        ((key, _),) = content.items()
        assert error_of(await turn(divided, content), 400)["param"] == key
    assert divided.core.knobs == replace(own, encode_units=None)
    response = await divided.client.get(KNOBS, headers=bearing(TOKEN))
    assert (await turn(divided, response.json())).json() == response.json()

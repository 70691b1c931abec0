"""The knobs over HTTP: who may turn them, what is refused, and what holds while they are turned."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from easerve.config import Policy
from easerve.types import Stage

from .conftest import Serve
from .server import (
    CHAT,
    Server,
    answer,
    answer_of,
    ask_about,
    body,
    error_of,
    metrics_of,
    picture,
    pictures,
    until,
)

KNOBS = "/admin/knobs"
TOKEN, KEY = "a token", "a key"
RED, GREEN = picture("red"), picture("green")
DEFAULTS = Policy().model_dump()
JSON = {"content-type": "application/json"}


def bearing(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def knobs(server: Server) -> dict[str, Any]:
    response = await server.client.get(KNOBS, headers=bearing(TOKEN))
    assert response.status_code == 200
    content: dict[str, Any] = response.json()
    return content


async def turn(server: Server, content: Any) -> httpx.Response:
    return await server.client.patch(KNOBS, json=content, headers=bearing(TOKEN))


@pytest.fixture
async def server(serve: Serve) -> Server:
    """One that has an admin."""
    return await serve(server={"admin_token": TOKEN})


# Who may ------------------------------------------------------------------------------------------

REQUESTS = [("GET", KNOBS), ("PATCH", KNOBS), ("GET", "/admin/"), ("POST", "/admin/nothing")]
every_request = pytest.mark.parametrize(("method", "path"), REQUESTS)


@every_request
@pytest.mark.parametrize("api_key", [None, KEY])
@pytest.mark.parametrize("secret", [None, KEY, "None"])
async def test_without_a_token_there_is_no_admin(
    serve: Serve, method: str, path: str, api_key: str | None, secret: str | None
) -> None:
    server = await serve(server={"api_key": api_key})
    headers = {} if secret is None else bearing(secret)
    response = await server.client.request(method, path, headers=headers, json={"when": "none"})
    assert error_of(response, 404)["message"] == "There is no such path"
    assert server.core.knobs.when == "slack"


@every_request
@pytest.mark.parametrize("authorization", [None, "", "Bearer", f"Bearer {KEY}", f"Basic {TOKEN}"])
async def test_only_the_token_opens_it(
    serve: Serve, method: str, path: str, authorization: str | None
) -> None:
    server = await serve(server={"api_key": KEY, "admin_token": TOKEN})
    headers = {} if authorization is None else {"authorization": authorization}
    response = await server.client.request(method, path, headers=headers, json={"when": "none"})
    error = error_of(response, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "admin token" in error["message"]
    assert server.core.knobs.when == "slack"


@pytest.mark.parametrize("path", ["/%61dmin/knobs", "/admin/%6bnobs", "/admin/knobs/"])
async def test_another_spelling_of_the_path_opens_nothing(server: Server, path: str) -> None:
    assert (await server.client.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["//admin/knobs", "/Admin/knobs", "/v1/../admin/knobs", "/admin"])
async def test_another_path_is_not_there(server: Server, path: str) -> None:
    response = await server.client.get(server.url + path)
    assert response.status_code in (401, 404)


async def test_the_token_opens_admin_and_nothing_else(serve: Serve) -> None:
    server = await serve(server={"api_key": KEY, "admin_token": TOKEN})
    assert await knobs(server) == DEFAULTS
    error_of(await server.post(body("hello"), **bearing(TOKEN)), 401)
    error_of(await server.client.get("/metrics", headers=bearing(TOKEN)), 401)
    assert answer_of(await server.post(body("hello"), **bearing(KEY))) == answer("hello")
    error_of(await server.client.get("/admin/no/such", headers=bearing(TOKEN)), 404)
    for method in ("PUT", "POST", "DELETE"):
        response = await server.client.request(method, KNOBS, headers=bearing(TOKEN))
        error_of(response, 405)


async def test_a_token_alone_closes_nothing_else(server: Server) -> None:
    assert answer_of(await server.ask("hello")) == answer("hello")
    assert (await server.client.get("/metrics")).status_code == 200


# Turning ------------------------------------------------------------------------------------------


async def test_some_are_changed_and_the_others_stay(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    response = await turn(server, {"when": "gap", "max_batch_items": 4})
    expected = DEFAULTS | {"when": "gap", "max_batch_items": 4}
    assert (response.status_code, response.json()) == (200, expected)
    response = await turn(server, {"gap_k": 2, "when": "gap"})
    assert response.json() == await knobs(server) == expected | {"gap_k": 2.0}
    assert (server.core.knobs.when, server.core.knobs.gap_k) == ("gap", 2.0)
    said = [record.getMessage() for record in caplog.records if record.name == "easerve.admin"]
    assert said == [
        "knob when changed from slack to gap",
        f"knob max_batch_items changed from {DEFAULTS['max_batch_items']} to 4",
        "knob gap_k changed from 1.0 to 2.0",
    ]


async def test_a_promise_can_be_made_and_taken_back(server: Server) -> None:
    assert (await turn(server, {"ttft_slo_s": 0.5})).json()["ttft_slo_s"] == 0.5
    assert answer_of(await server.ask(ask_about("which?", RED))) == answer("which?", RED)
    assert (await turn(server, {"ttft_slo_s": None})).json() == DEFAULTS


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        ({"wen": "gap"}, "wen", "wen: unknown key; did you mean 'when'?"),
        ({"zzz": 1}, "zzz", "zzz: unknown key; known keys: when, order, max_batch_items, "),
        ({"when": "never"}, "when", "when: Input should be 'none', 'greedy', "),
        ({"when": 5}, "when", "when: "),
        ({"when": None}, "when", "when: "),
        ({"when": {"a": "gap"}}, "when", "when: "),
        ({"order": "lifo"}, "order", "order: Input should be 'fifo' or 'deadline'"),
        ({"max_batch_items": 0}, "max_batch_items", "(got 0)"),
        ({"max_batch_items": 10**30}, "max_batch_items", "max_batch_items: "),
        ({"max_batch_items": 1.5}, "max_batch_items", "(got 1.5)"),
        ({"max_batch_items": "many"}, "max_batch_items", "(got 'many')"),
        ({"timeout_s": 2}, "timeout_s", "less than or equal to 1 (got 2)"),
        ({"timeout_s": [1]}, "timeout_s", "timeout_s: "),
        ({"gap_k": -1}, "gap_k", "(got -1)"),
        ({"run_ahead": -1}, "run_ahead", "(got -1)"),
        ({"spread": "perhaps"}, "spread", "(got 'perhaps')"),
        ({"ttft_slo_s": 0}, "ttft_slo_s", "greater than 0 (got 0)"),
        ({"ttft_slo_s": "inf"}, "ttft_slo_s", "(got 'inf')"),
        ({"tpot_slo_s": "nan"}, "tpot_slo_s", "(got 'nan')"),
        ({"max_queue_s": 1e300}, "max_queue_s", "(got 1e+300)"),
        ({"remote_share": 1.5}, "remote_share", "less than or equal to 1 (got 1.5)"),
        ({"where": "nowhere"}, "where", "where: Input should be 'deficit', 'deficit-tokens', "),
        ({"band_kappa": 0.4}, "band_kappa", "greater than or equal to 0.5 (got 0.4)"),
        ({"offload_seed": -1}, "offload_seed", "(got -1)"),
        ({"spill_guard_s": 0}, "spill_guard_s", "greater than 0 (got 0)"),
        ({"when": "gap", "spread": []}, "spread", "spread: "),
        ({"wen": 1, "gap_k": "x"}, "gap_k", "; wen: unknown key"),
    ],
)
async def test_what_is_wrong_changes_nothing_and_is_named(
    server: Server, content: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(await turn(server, content), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert await knobs(server) == DEFAULTS
    assert server.core.knobs.when == "slack"
    assert answer_of(await server.ask(ask_about("which?", RED))) == answer("which?", RED)


async def test_a_share_for_local_prefill_needs_engines_for_it(server: Server) -> None:
    error = error_of(await turn(server, {"remote_share": 0.5, "where": "band"}), 400)
    assert error["param"] == "remote_share"
    assert error["message"].startswith("remote_share: 0.5 needs a section local_prefill")
    assert await knobs(server) == DEFAULTS
    assert (await turn(server, {"where": "band"})).status_code == 200


@pytest.mark.parametrize("content", ["[]", '"gap"', "1", "null", "true", '[{"when": "gap"}]'])
async def test_what_is_no_object_is_refused(server: Server, content: str) -> None:
    headers = JSON | bearing(TOKEN)
    response = await server.client.patch(KNOBS, content=content, headers=headers)
    assert error_of(response, 400)["message"] == "The body must be an object of knobs"
    assert await knobs(server) == DEFAULTS


@pytest.mark.parametrize("content", ["", "{", "when: gap", '{"gap_k": 1e999}', '{"gap_k": NaN}'])
async def test_what_is_no_json_is_refused(server: Server, content: str) -> None:
    headers = JSON | bearing(TOKEN)
    response = await server.client.patch(KNOBS, content=content, headers=headers)
    assert error_of(response, 400)["message"].startswith("The body is not valid JSON")
    assert await knobs(server) == DEFAULTS


async def test_what_is_not_declared_json_is_refused(server: Server) -> None:
    content = json.dumps({"when": "gap"})
    error_of(await server.client.patch(KNOBS, content=content, headers=bearing(TOKEN)), 415)
    assert await knobs(server) == DEFAULTS


# While requests run -------------------------------------------------------------------------------


async def test_knobs_are_in_force_when_turning_returns(server: Server) -> None:
    for when in ("gap", "none"):
        server.driver.turn(replace(server.core.knobs, when=when))
        assert server.core.knobs.when == when


async def test_a_rule_is_in_force_for_what_waits_already(serve: Serve) -> None:
    policy = {"when": "fixed", "timeout_s": 1}
    server = await serve(server={"admin_token": TOKEN}, policy=policy)
    tasks = [asyncio.create_task(server.ask(ask_about("which?", url))) for url in (RED, GREEN)]
    await until(lambda: server.num_waiting == 2)
    assert server.encode_calls == []
    assert (await turn(server, {"when": "greedy"})).status_code == 200
    assert server.core.queue_lengths()[Stage.ENCODE] == 0, "it is decided when PATCH returns"
    assert [answer_of(await task) for task in tasks] == [answer("which?", u) for u in (RED, GREEN)]
    assert server.encode_calls == [2]
    assert (await metrics_of(server))["easerve_encode_batches_total encoder idle"] == 1


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        ({}, [1, 5]),
        ({"max_batch_items": 2}, [1, 2, 2, 1]),
        ({"when": "none"}, [1, 1, 1, 1, 1, 1]),
        ({"when": "slack", "order": "deadline"}, [1, 5]),
    ],
    ids=str,
)
async def test_the_next_batches_go_by_the_new_knobs(
    serve: Serve, change: dict[str, Any], calls: list[int]
) -> None:
    server = await serve(server={"admin_token": TOKEN}, policy={"when": "greedy"})
    urls = pictures(6)
    server.hold("encode")
    tasks = [asyncio.create_task(server.ask(ask_about("which?", urls[0])))]
    await server.working("encode")
    tasks += [asyncio.create_task(server.ask(ask_about("which?", url))) for url in urls[1:]]
    await until(lambda: server.num_waiting == 6)
    assert (await turn(server, change)).status_code == 200
    server.release()
    assert [answer_of(await task) for task in tasks] == [answer("which?", url) for url in urls]
    assert server.encode_calls == calls


@pytest.mark.long
async def test_knobs_are_turned_under_load_without_a_failed_request(serve: Serve) -> None:
    engines = ["e0", "e1", "l0", "p0", "d0"]
    server = await serve(engines, server={"api_key": KEY, "admin_token": TOKEN})
    urls, left = pictures(8), iter(range(100))
    changes: list[dict[str, Any]] = [
        {"when": "none"},
        {"when": "fixed", "timeout_s": 0.002},
        {"when": "gap", "gap_k": 0.5, "order": "deadline"},
        {"when": "fill", "max_batch_items": 2},
        {"when": "slack", "ttft_slo_s": 0.05, "tpot_slo_s": 0.01, "spread": False},
        {"when": "greedy", "flow": False, "run_ahead": 0},
        {"group_by_size": True, "encoder_value": 2, "prefill_ahead_s": 0.1},
        {"where": "band", "remote_share": 0.3, "band_kappa": 1},
        {"where": "jsq", "share_trim": True, "spill_guard_s": 0.01},
        {"where": "deficit-tokens", "remote_share": 0},
        DEFAULTS,
    ]

    async def client() -> None:
        for number in left:
            chosen = [urls[number % 8], urls[number // 8 % 8]][: 1 + number % 2]
            response = await server.post(body(ask_about("which?", *chosen)), **bearing(KEY))
            assert answer_of(response) == answer("which?", *chosen)

    async def admin() -> None:
        expected = DEFAULTS
        while not clients.done():
            for change in changes:
                expected = expected | change
                assert (await turn(server, change)).json() == expected
                error_of(await turn(server, {"when": "gap", "gap_k": "x"}), 400)
                assert server.core.knobs.when == expected["when"]

    clients = asyncio.gather(*(client() for _ in range(12)))
    await asyncio.gather(clients, admin())
    response = await server.client.get("/metrics", headers=bearing(KEY))
    assert 'easerve_requests_total{outcome="completed"} 100' in response.text


async def test_the_paths_of_clients_do_not_turn_knobs(server: Server) -> None:
    response = await server.client.patch(CHAT, json={"when": "gap"}, headers=bearing(TOKEN))
    error_of(response, 405)
    assert await knobs(server) == DEFAULTS


# Knobs that turn themselves -----------------------------------------------------------------------


async def test_the_state_has_what_is_in_force_and_the_knobs_what_was_configured(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def in_force() -> Any:
        response = await server.client.get("/admin/state", headers=bearing(TOKEN))
        return response.json()["knobs"]

    await turn(server, {"adapt": True, "max_batch_items": 8})
    core = server.core
    core._adapt.knobs = replace(core.knobs, max_batch_items=12)
    core._retune()
    assert (await knobs(server))["max_batch_items"] == 8
    assert await in_force() == await knobs(server) | {"max_batch_items": 12}
    assert (await metrics_of(server))["easerve_adapt_knob max_batch_items"] == 12
    await turn(server, {"adapt": False})
    assert await in_force() == await knobs(server)
    assert core.knobs.max_batch_items == 8
    seen = await metrics_of(server)
    changes = {name: value for name, value in seen.items() if name.startswith("easerve_adapt_c")}
    assert changes.pop("easerve_adapt_changes_total down max_batch_items") == 1
    said = [record.getMessage() for record in caplog.records if record.name == "easerve.driver"]
    assert said == ["adapt: knob max_batch_items changed from 12 to 8: adapt is off"]

"""The scripted server does what its script says; benches are judged by it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.bench.scripted import STEPS, WORD, Script, Scripted, parse_steps, serving

TTFT_S, TPOT_S = 0.01, 0.002
BODY = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "data:image/png;base64,AAAA"}],
}


def script(*steps: str, **more: Any) -> Script:
    return Script(steps, TTFT_S, TPOT_S, 5, **more)


async def ask(server: Scripted, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """The status, and the events or the one answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        content = await response.read()
        if response.content_type != "text/event-stream":
            return response.status, [json.loads(content)]
        events = [each.removeprefix(b"data: ") for each in content.split(b"\n\n") if each]
        return response.status, [e.decode() if e == b"[DONE]" else json.loads(e) for e in events]


def tokens(events: list[Any]) -> list[int]:
    """Of each chunk that has some."""
    deltas = [event["choices"][0]["delta"] for event in events if _choices(event)]
    return [
        delta["content"].count(WORD) for delta in deltas if WORD.strip() in delta.get("content", "")
    ]


def _choices(event: Any) -> Any:
    return isinstance(event, dict) and event.get("choices")


def usage(events: list[Any]) -> int | None:
    found = [
        e["usage"]["completion_tokens"] for e in events if isinstance(e, dict) and "usage" in e
    ]
    return found[0] if found else None


@pytest.mark.parametrize(
    ("step", "counts", "used", "ended"),
    [
        ("ok", [1] * 5, 5, True),
        ("slow", [1] * 5, 5, True),
        ("one", [1], 1, True),
        ("bundle", [1, 4], 5, True),
        ("nousage", [1] * 5, None, True),
        ("badusage", [1] * 5, 12, True),
        ("sse_error", [], None, True),
        ("short", [1] * 3, None, False),
        ("late_error", [1] * 3, None, False),
        ("empty", [], None, True),
    ],
)
async def test_a_step(step: str, counts: list[int], used: int | None, ended: bool) -> None:
    async with serving(script(step)) as server:
        status, events = await ask(server, BODY)
    assert (status, tokens(events), usage(events)) == (200, counts, used)
    assert (events[-1] == "[DONE]") is ended
    has_error = any(isinstance(event, dict) and "error" in event for event in events)
    assert has_error is step.endswith("_error")


@pytest.mark.parametrize("code", [429, 500])
async def test_an_error(code: int) -> None:
    async with serving(script(f"err{code}")) as server:
        status, [answer] = await ask(server, BODY)
    assert (status, answer["error"]["code"]) == (code, code)


async def test_a_stream_that_breaks_off() -> None:
    async with serving(script("cut")) as server:
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(server, BODY)


async def test_a_request_that_hangs_is_given_up_at_the_end() -> None:
    async with serving(script("hang")) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await ask(server, BODY)


async def test_an_answer_that_is_not_streamed_and_shorter_ones() -> None:
    async with serving(script("ok")) as server:
        _, [whole] = await ask(server, {"max_tokens": 2, "messages": []})
        _, events = await ask(server, {**BODY, "max_completion_tokens": 3})
    assert whole["choices"][0]["message"]["content"] == WORD * 2
    assert whole["usage"]["completion_tokens"] == 2
    assert tokens(events) == [1] * 3


async def test_the_role_comes_first_or_with_the_first_token() -> None:
    for delay_s, expected in ((0.0, [""]), (None, [WORD])):
        async with serving(script("ok", role_delay_s=delay_s)) as server:
            _, events = await ask(server, BODY)
        deltas = [event["choices"][0]["delta"] for event in events if _choices(event)]
        assert [delta["content"] for delta in deltas if "role" in delta] == expected


async def test_steps_follow_each_other_and_requests_are_noted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    async with serving(script("one", "err500"), log=log) as server:
        statuses = [(await ask(server, BODY))[0] for _ in range(3)]
        await asyncio.gather(*(ask(server, BODY) for _ in range(2)))
    assert statuses == [200, 500, 200]
    assert [each.step for each in server.seen] == ["one", "err500", "one", "err500", "one"]
    assert 1 <= server.most_open <= 2
    assert server.num_open == 0
    assert len(server.seen[0].media) == 1
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()][:2] == [
        "one",
        "err500",
    ]


def test_scripts() -> None:
    assert parse_steps("ok*2, err500") == ("ok", "ok", "err500")
    with pytest.raises(ValueError, match="a step is one of ok, slow"):
        Script(("good",))
    assert "hang" in STEPS

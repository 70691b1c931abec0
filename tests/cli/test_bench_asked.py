"""What options of ``easerve bench`` come to, the requests made of them, what a person sees."""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from easerve.bench.job import Planned, Progress
from easerve.cli.bench import asked, making, run_shown
from easerve.cli.bench.asked import Pace, pace, server, source
from easerve.config import ConfigError


def test_the_key_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert server("http://x", None, None, 1, None).api_key == "sesame"
    assert server("http://x", None, "mine", 1, None).api_key == "mine"
    assert "sesame" not in repr(server("http://x", None, None, 1, None))
    assert server("x:1", None, None, 1, None).url == "http://x:1/v1/chat/completions"
    assert server("http://x", None, None, 1, None, "completions").completions
    assert server("http://x/v1/completions", None, None, 1, None).completions


def test_when_requests_come() -> None:
    assert pace("5").described() == {"kind": "poisson", "rate_per_s": 5}
    assert pace("5", cv=2).described() == {"kind": "gamma", "rate_per_s": 5, "cv": 2}
    assert pace(steps="5x1,9x2").described() == {"kind": "steps", "steps": ((5, 1), (9, 2))}
    assert pace("5", max_in_flight=3).described()["max_in_flight"] == 3
    assert pace(has_times=True).described() == {"kind": "dataset"}
    with pytest.raises(ConfigError, match="--max-concurrency is --concurrency"):
        pace(concurrency=1, max_concurrency=2)


def lines(path: Path, num: int, **more: float) -> Path:
    rows = [{"prompt": f"question {n}", **{k: v * n for k, v in more.items()}} for n in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(path: Path, words: Pace, num: int | None = None) -> making.Made:
    asked = source(dataset=path)
    num = making.number(asked, words, num, 0)
    num_warmup = making.warmups(asked, num, None)
    return making.make(
        server("http://x", None, "k", 1, None), "m", asked, words, 0, num, num_warmup
    )


def prompts(planned: Sequence[Planned]) -> list[str]:
    return [re.findall(rb"question \d+", bytes(each.encoded("m")))[0].decode() for each in planned]


def test_warm_ups_of_a_data_set_are_its_other_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", 5)
    some = made(path, pace("5"), 3)
    assert prompts(some.planned) == ["question 0", "question 1", "question 2"]
    assert prompts(some.warmup) == ["question 3", "question 4"]
    whole = made(path, pace("5"))
    assert (len(whole.planned), whole.warmup) == (5, [])
    with pytest.raises(ConfigError, match="has 5 requests, but 9 are asked"):
        made(path, pace("5"), 9)


def test_times_of_a_data_set(tmp_path: Path) -> None:
    found = made(lines(tmp_path / "a.jsonl", 3, at_s=0.5), pace(has_times=True))
    assert [each.at_s for each in found.planned] == [0, 0.5, 1.0]
    with pytest.raises(ConfigError, match=r"the data set has no times \(at_s\)"):
        made(lines(tmp_path / "b.jsonl", 3), pace(has_times=True))


def test_how_many_requests_there_are(tmp_path: Path) -> None:
    trace = tmp_path / "times"
    trace.write_text("0\n0.5\n2\n")
    asked = source("text")
    assert making.number(asked, pace("5"), None, 0) == making.DEFAULT_REQUESTS
    assert making.number(asked, pace(trace=trace), None, 0) == 3
    assert making.number(asked, pace(trace=trace), 2, 0) == 2
    steps = pace(steps="50x2")
    num = making.number(asked, steps, None, 0)
    assert 60 < num < 140
    assert making.scheduled(steps, num, 0)[-1] < 2
    data = source(dataset=lines(tmp_path / "a.jsonl", 2))
    assert making.number(data, pace(trace=trace), None, 0) == 2


def test_text_by_the_older_route() -> None:
    asked = source("text", text_tokens="3")
    older = server("http://x", None, None, 1, None, "completions")
    (planned,) = making.make(older, "m", asked, pace("5"), 0, 1).planned
    body = json.loads(planned.encoded("m"))
    assert "messages" not in body
    assert len(body["prompt"].split()) >= 3
    assert body["stream"]


@pytest.mark.parametrize(
    ("arrival", "expected"),
    [
        (pace("5", max_in_flight=3), "poisson 5/s, 3 in flight at most"),
        (pace("5", cv=2), "gamma 5/s, cv 2"),
        (pace("5", end_rate="9"), "ramp 5/s to 9/s"),
        (pace(steps="5x1"), "steps"),
        (pace("inf"), "all at once"),
        (pace(concurrency=3), "3 at a time"),
        (pace(has_times=True), "dataset"),
    ],
)
def test_arrivals_in_words(arrival: Pace, expected: str) -> None:
    assert run_shown.arrivals(arrival.described()) == expected


def test_the_last_seconds() -> None:
    live = run_shown.Live()
    live.add(0.0, Progress())
    assert live.text() == "0 in flight"
    live.add(2.0, Progress(0, 10, 4, {}, {}))
    assert live.text() == "6 in flight, 2.0/s"
    live.add(4.0, Progress(0, 30, 24, {"S1": 12}, {"x": 2}))
    assert live.text() == "6 in flight, S1 3.0/s 50%, 2 not completed"
    live.add(8.0, Progress(0, 50, 44, {"S1": 32, "S2": 0, "ttft=9s": 4}, {"x": 2}))
    assert live.text() == "6 in flight, S1 5.0/s 100%, met 1.0/s 20%, 2 not completed"


def test_progress_on_a_terminal() -> None:
    console = Console(force_terminal=True, width=80, file=io.StringIO())
    with run_shown.making(console, 3) as tick:
        tick()
    with run_shown.sending(console, 10, 2) as on_progress:
        on_progress(Progress(1))
        on_progress(Progress(2, 5, 5))
    assert isinstance(console.file, io.StringIO)
    assert "making requests" in console.file.getvalue()


def test_items_of_ones_own() -> None:
    source = asked.source(items="[{image: 64x48, weight: 2}, {audio_s: [2, 4]}, {}]")
    assert asked.modality(source) == "items"
    assert asked.described(source)["items"] == [
        {"weight": 2.0, "image": [64, 48]},
        {"weight": 1.0, "audio_s": [2.0, 4.0]},
        {"weight": 1.0},
    ]


@pytest.mark.parametrize("text", ["[{image: 64}]", "[", "{}}"])
def test_items_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--items: "):
        asked.source(items=text)

"""``easerve bench``: load on a server from outside, as a user gives it."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.bench import loop
from easerve.cli.bench import making
from tests.bench.scripted import MODEL, Scripted

from .conftest import Easerve
from .scripted import scripted

QUICK = ("--modality", "text", "--text-tokens", "8", "--rate", "200", "--no-watch")


@pytest.fixture(scope="module")
def running() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture
def target(running: Scripted) -> Scripted:
    running.seen.clear()
    return running


@pytest.fixture(autouse=True)
def without_a_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The client does not get one of its own, which would take most of a test's time."""
    if "long" not in request.keywords:
        monkeypatch.setattr("easerve.bench.run.in_process", loop.run)


# The run ------------------------------------------------------------------------------------------


def test_a_run_is_shown(easerve: Easerve, target: Scripted) -> None:
    words = ("--num-requests", "6", "--warmup", "2", "--slo", "ttft=5s", "--slo", "e2el:4000")
    ended = easerve("bench", "--url", target.url, *QUICK, *words, "--allow-late")
    assert ended.code == 0
    assert len(target.seen) == 8
    assert f"{MODEL}, poisson 200/s" in ended.out
    assert re.search(r"TTFT, ms +[1-9]", ended.out)
    assert re.search(r"TTFT 5 s +100 ", ended.out)
    assert re.search(r"latency 4 s +100 ", ended.out)
    assert "6 of 6 completed, in 0." in ended.out
    assert "24 output tokens and 60 prompt tokens" in ended.out
    assert "Too few requests to trust" in ended.out


def test_tables_fit_80_columns(
    easerve: Easerve, monkeypatch: pytest.MonkeyPatch, target: Scripted
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = easerve("bench", "--url", target.url, *QUICK, "--num-requests", "2", "--allow-late")
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.long
def test_json_and_files(easerve: Easerve, target: Scripted, tmp_path: Path) -> None:
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    words = ("--num-requests", "4", "--warmup", "0", "--seed", "7", "--label", "ours")
    ended = easerve(
        *("bench", "--url", target.url, *QUICK, *words, "--api-key", "sesame", "--allow-late"),
        *("--json", "--out", out, "--html", html),
    )
    assert ended.code == 0
    found = json.loads(ended.out)
    assert json.loads(out.read_text()) == found
    assert (found["kind"], found["system"], found["model"]) == ("bench", "ours", MODEL)
    assert (found["modality"], found["kinds"], found["seed"]) == ("text", {"text": 4}, 7)
    assert found["workload"] == {"modality": "text", "text_tokens": [8, 8]}
    assert found["arrival"] == {"kind": "poisson", "rate_per_s": 200.0}
    assert found["url"] == f"{target.url}/v1/chat/completions"
    assert "sesame" not in ended.out + ended.err
    assert "--api-key '***'" in found["command"]
    assert "<html" in html.read_text()
    assert f"report: {html}" in ended.err


def test_the_same_seed_is_the_same_run(easerve: Easerve, target: Scripted) -> None:
    runs = []
    for seed in ("3", "3", "4"):
        words = ("--num-requests", "5", "--warmup", "1", "--seed", seed, "--json", "--allow-late")
        target.seen.clear()
        found = json.loads(easerve("bench", "--url", target.url, *QUICK, *words).out)
        runs.append((found["requests"]["scheduled_s"], {each.text for each in target.seen}))
        assert len(runs[-1][1]) == 6  # a warm-up is another request
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert not runs[0][1] & runs[2][1]


def test_other_tools_spellings(easerve: Easerve, target: Scripted) -> None:
    ended = easerve(
        *("bench", "--base-url", target.url, "--modality", "text", "--num-prompts", "3"),
        *("--request-rate", "300", "--burstiness", "4", "--max-concurrency", "2", "--no-watch"),
        *("--goodput", "ttft:5000 tpot:500 e2el:9000", "--num-warmups", "0", "--json"),
        *("--random-input-len", "4", "--random-output-len", "2", "--allow-late"),
    )
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found["arrival"] == {
        "kind": "gamma",
        "rate_per_s": 300.0,
        "cv": 0.5,
        "max_in_flight": 2,
    }
    limits = {"ttft_s": 5.0, "tpot_s": 0.5, "latency_s": 9.0}
    assert found["slo"] == {"ttft:5000 tpot:500 e2el:9000": limits}
    assert found["workload"]["output_tokens"] == [2, 2]
    assert {each.body["max_tokens"] for each in target.seen} == {2}


def test_not_streamed(easerve: Easerve, target: Scripted) -> None:
    words = ("--num-requests", "2", "--no-stream", "--slo", "ttft=9s", "--slo", "latency=9s")
    found = json.loads(
        easerve("bench", "--url", target.url, *QUICK, *words, "--json", "--allow-late").out
    )
    assert found["ttft_s"]["p50"] is found["tpot_s"]["p50"] is None
    assert found["latency_s"]["p50"] > 0
    assert found["attainment"] == {"ttft=9s": 0.0, "latency=9s": 1.0}


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (("--rate", "inf"), {"kind": "immediate", "rate_per_s": "inf"}),
        (("--concurrency", "2"), {"kind": "closed", "concurrency": 2}),
        (("--max-concurrency", "2"), {"kind": "closed", "concurrency": 2}),
    ],
)
def test_no_rate(
    easerve: Easerve, target: Scripted, rate: tuple[str, ...], expected: dict[str, Any]
) -> None:
    words = ("--modality", "text", "--text-tokens", "8", "--num-requests", "3", "--json")
    ended = easerve("bench", "--url", target.url, *words, *rate, "--no-watch", "--allow-late")
    found = json.loads(ended.out)
    assert found["arrival"] == expected
    assert found["completed"] == 3
    assert set(found["requests"]["scheduled_s"]) == {0} or "concurrency" in expected


# How it ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "5", "--slo", "ttft=2"), "--slo: 'ttft=2' is not like"),
        (("--rate", "0"), "rate_per_s must be more than 0"),
        (("--rate", "-1"), "rate_per_s must be more than 0"),
        (("--rate", "nan"), "rate_per_s must be more than 0"),
        (("--rate", "fast"), "a rate is a number"),
        (("--rate", "5", "--concurrency", "3"), "--concurrency is a closed loop"),
        ((), "say when requests come"),
        (("--rate", "5", "--modality", "smell"), "a modality is one of"),
        (("--rate", "5", "--output-tokens", "x"), "--output-tokens: 'x' is not like 128 or 8-64"),
        (("--rate", "5", "--image-sizes", "big"), "--image-sizes: 'big'"),
        (("--rate", "5", "--endpoint", "speech"), "--endpoint: 'speech'"),
        (("--rate", "5", "--arrival", "gamma"), "gamma arrivals need cv"),
        (("--rate", "5", "--timeout", "inf"), "--timeout: inf"),
        (("--rate", "5", "--cv", "nan"), "cv must be"),
        (("--rate", "5", "--burstiness", "0"), "--burstiness is 1 / cv²"),
        (("--rate", "5", "--model", "other"), "--model other: the server has scripted"),
        (("--arrival", "trace", "--trace", "/nosuch"), "/nosuch"),
        (("--rate", "5", "--slo", "S3", "--reference", "/nosuch.yaml"), "/nosuch.yaml"),
        (("--rate", "5", "--html", "/nosuch/r.html"), "/nosuch/r.html"),
        (("--rate", "5", "--endpoint", "completions"), "takes text alone"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    easerve: Easerve, target: Scripted, words: tuple[str, ...], message: str
) -> None:
    ended = easerve("bench", "--url", target.url, *words)
    assert (ended.code, ended.out, target.seen) == (2, "", [])
    assert message in ended.err


def test_a_server_that_is_not_there(easerve: Easerve) -> None:
    ended = easerve("bench", "--url", "127.0.0.1:9", *QUICK)
    assert (ended.code, ended.out) == (1, "")
    assert "http://127.0.0.1:9/v1/models" in ended.err
    assert "is the server up?" in ended.err


def test_a_server_that_refuses_everything_is_asked_no_more(easerve: Easerve) -> None:
    with scripted("err500") as server:
        ended = easerve("bench", "--url", server.url, *QUICK, "--num-requests", "500")
        assert len(server.seen) == 8
    assert (ended.code, ended.out) == (1, "")
    assert "none of 8 warm-up requests was answered: HTTP 500: as scripted" in ended.err


def test_a_run_in_which_all_fail(easerve: Easerve) -> None:
    with scripted("err500", "cut", "empty", "err429") as server:
        words = ("--num-requests", "4", "--warmup", "0", "--slo", "ttft=1s", "--json")
        ended = easerve("bench", "--url", server.url, *QUICK, *words, "--allow-late")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert "NaN" not in ended.out
    assert (found["failed"], found["rejected"]) == (3, 1)
    assert found["goodput_per_s"] == {"ttft=1s": 0.0}
    assert found["ttft_s"]["p50"] is None
    assert set(found["causes"]) == {
        "HTTP 500: as scripted",
        "HTTP 429: as scripted",
        "the stream ended before [DONE]",
        "the answer has no token",
    } or "Client" in str(found["causes"])
    assert "no request was completed: " in ended.err


def test_causes_are_shown_whole(
    easerve: Easerve, target: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with scripted("ok", "err500") as server:
        words = ("--num-requests", "4", "--warmup", "0", "--allow-late")
        ended = easerve("bench", "--url", server.url, *QUICK, *words)
    assert ended.code == 0
    assert "2 of 4 completed, 2 failed, in" in ended.out
    assert "  2 x HTTP 500: as scripted\n" in ended.out


def test_a_client_that_was_too_slow(
    easerve: Easerve, target: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easerve.bench.health.MAX_CPU_SHARE", -1.0)
    words = ("--num-requests", "2", "--slo", "ttft=9s")
    ended = easerve("bench", "--url", target.url, *QUICK, *words)
    assert ended.code == 1
    assert "NOT VALID: " in ended.out
    assert re.search(r"TTFT, ms +–", ended.out)
    assert "easerve: the client was busy for" in ended.err
    assert "lower the rate, give the client cores" in ended.err
    ended = easerve("bench", "--url", target.url, *QUICK, *words, "--allow-late")
    assert ended.code == 0
    assert re.search(r"TTFT, ms +[1-9]", ended.out)
    assert "NOT VALID: " in ended.out


def test_bodies_that_are_too_many(
    easerve: Easerve, target: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "MAX_BYTES", 1000)
    ended = easerve("bench", "--url", target.url, *QUICK)
    assert (ended.code, ended.out) == (2, "")
    assert "more than is held in memory: ask fewer" in ended.err


@pytest.mark.long
def test_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with scripted("ok", "hang") as server:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "easerve.cli.main", "bench", "--url", server.url, *QUICK),
                *("--num-requests", "2", "--warmup", "0", "--out", str(out)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: len(server.seen) == 2 and server.num_open == 1)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=20)
        until(lambda: server.num_open == 0)
    assert process.returncode == 130
    assert "1 of 2 completed, 1 cancelled" in shown
    assert "easerve: the run was stopped after" in said
    found = json.loads(out.read_text())
    assert (found["cancelled"], found["valid"]) == (1, False)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


REFERENCE = f"""
made: 2026-01-01T00:00:00Z
easerve: 0.1.0
command: easerve bench reference
machine: a machine
model: {MODEL}
system: x
modality: text
workload: {{modality: text, text_tokens: [99, 99]}}
num_requests: 3
ttft_s: 1.0
tpot_s: 0.5
ttfts_s: [1.0, 1.0, 1.0]
tpots_s: [0.5, 0.5, 0.5]
"""


def test_tiers_are_of_a_reference(easerve: Easerve, target: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "reference.yaml"
    path.write_text(REFERENCE)
    words = ("--num-requests", "2", "--slo", "S1,S5", "--reference", path, "--allow-late")
    ended = easerve("bench", "--url", target.url, *QUICK, *words)
    assert ended.code == 0
    assert re.search(r"S1: TTFT 3 s, TPOT 625 ms +100 ", ended.out)
    assert "the reference is of another load: text_tokens [8, 8]" in ended.out
    found = json.loads(easerve("bench", "--url", target.url, *QUICK, *words, "--json").out)
    assert found["attainment"] == {"S1": 1.0, "S5": 1.0}
    assert found["reference"]["ttft_s"] == 1.0


# The group ----------------------------------------------------------------------------------------


def test_alone_it_shows_what_there_is(easerve: Easerve) -> None:
    shown = easerve("bench")
    assert "--rate" in shown.out + shown.err
    assert "transfer" in shown.out + shown.err


def test_options_before_a_subcommand_are_refused(easerve: Easerve) -> None:
    ended = easerve("bench", "--url", "http://x", "encode")
    assert (ended.code, ended.out) == (2, "")
    assert "--url does nothing here: give it after encode" in ended.err

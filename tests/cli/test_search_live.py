"""The live objective: what is started, what is changed, what is left when it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from easerve.bench.client import LoadError
from easerve.bench.job import OnProgress, Planned, Progress, Target
from easerve.bench.run import Run
from easerve.bench.sample import Health, Sample
from easerve.cli.bench import asked
from easerve.cli.search import live, live_process
from easerve.cli.search.live import LiveObjective, engines_of, key_of, laid, private
from easerve.cli.search.live_load import Window, content_seed, promised
from easerve.cli.search.live_process import ServerLost, ServerProcess, Tell
from easerve.config import ConfigError, build, read_file
from easerve.goodput import Record, Slo
from easerve.search.objective import Score, Unworkable
from easerve.search.space import SHARE, Allocation, Configuration, Knob, Space

from ..processes import is_alive, wait_until
from .live_search import SLO, SPACE, TEXT, start

ROOT = Path(__file__).parents[2]
WINDOW = Window(TEXT, 20.0, 0.5, num_warmup=2)
KEPT_UP, LATE = Health(), Health(cpu_share=1.0)


def chosen(when: str = "none", share: float = 1.0, allocation: str = "e1-p1-d1") -> Configuration:
    return SPACE.configuration(allocation, {"policy.when": when, SHARE: share})


def sample(ttft_s: float, completed: bool = True) -> Sample:
    record = Record(0.0, 0.0, ttft_s, ttft_s + 1, 4, "completed" if completed else "failed")
    return Sample(record)


class Server:
    """One that notes what it is told. ``open``: what it says of its open requests, in turn."""

    address = "http://127.0.0.1:1"

    def __init__(self, content: dict[str, Any], notes: list[Any], open_: list[int]) -> None:
        self.content, self._notes, self._open = content, notes, open_
        self.lost: str | None = None

    def turn(self, knobs: Mapping[str, Any]) -> None:
        self._notes.append(dict(knobs))

    def num_open(self) -> int:
        return self._open.pop(0) if self._open else 0

    def check(self) -> None:
        if self.lost is not None:
            raise ServerLost(self.lost)

    def close(self) -> None:
        self._notes.append("end")


class Bench:
    """Servers and clients that are made up. ``notes``: all that happened to them, in order."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.open: list[int] = []
        self.servers: list[Server] = []
        self.windows: list[tuple[list[Planned], list[Planned]]] = []
        self.samples: list[Sample] = [sample(1.0)] * 4
        self.healths: list[Health] = []
        self.fails: list[Exception] = []
        self.said: list[str] = []
        self.loses: str | None = None

    def serve(self, content: dict[str, Any], source: str, timeout_s: float, tell: Tell) -> Server:
        assert timeout_s == 600
        self.notes.append("start")
        if self.fails and isinstance(self.fails[0], ServerLost):
            raise self.fails.pop(0)
        build(content, source)
        self.servers.append(Server(content, self.notes, self.open))
        return self.servers[-1]

    async def measure(
        self,
        target: Target,
        requests: Sequence[Planned],
        *,
        warmup: Sequence[Planned],
        slos: Mapping[str, Slo],
        on_progress: OnProgress,
    ) -> Run:
        assert (target.url, target.model) == (Server.address, "short")
        self.notes.append("measure")
        self.windows.append((list(requests), list(warmup)))
        if self.fails:
            raise self.fails.pop(0)
        self.servers[-1].lost, self.loses = self.loses, None
        on_progress(Progress(num_warm=1))
        on_progress(Progress(num_sent=2, num_done=1))
        return Run(self.samples, [], 2.0, self.healths.pop(0) if self.healths else KEPT_UP)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def objective(bench: Bench, deployment: Path) -> LiveObjective:
    return LiveObjective(
        *(deployment, SPACE, WINDOW, SLO),
        practises=False,
        tell=bench.said.append,
        serve=bench.serve,
        measure=bench.measure,
    )


# What is changed, and how ------------------------------------------------------------------------


def test_a_knob_is_changed_while_the_server_runs(bench: Bench, objective: LiveObjective) -> None:
    objective.score(chosen("none"), 0)
    objective.score(chosen("greedy"), 0)
    assert bench.notes == ["start", "measure", {"when": "greedy"}, "measure"]
    assert "knobs: when none -> greedy" in bench.said


def test_a_share_of_one_is_a_knob_where_local_prefill_could_run(
    bench: Bench, objective: LiveObjective
) -> None:
    objective.score(chosen(share=1.0), 0)
    objective.score(chosen(share=0.5), 0)
    objective.score(chosen(share=1.0), 0)
    turns = [{"remote_share": 0.5}, {"remote_share": 1.0}]
    assert bench.notes == ["start", "measure", turns[0], "measure", turns[1], "measure"]
    assert bench.servers[0].content["local_prefill"] == {"max_num_seqs": 7}


def test_another_allocation_is_started_anew(bench: Bench, objective: LiveObjective) -> None:
    objective.score(chosen(), 0)
    objective.score(chosen(allocation="e1-p1x2-d1"), 0)
    assert bench.notes == ["start", "measure", "end", "start", "measure"]
    assert [each.content["prefill"]["replicas"] for each in bench.servers] == [1, 2]
    assert [bool(each.content.get("local_prefill")) for each in bench.servers] == [True, False]


def test_what_is_no_knob_of_a_policy_needs_other_engines(bench: Bench, deployment: Path) -> None:
    slots = Knob("decode.max_num_seqs", (8, 16))
    space = Space([Allocation("e1-p1-d1", {})], [slots, Knob(SHARE, (1.0,))])
    live_ = LiveObjective(
        *(deployment, space, WINDOW, SLO),
        serve=bench.serve,
        measure=bench.measure,
        seeds=(4,),
        practises=False,
    )
    for each in space:
        live_.score(each, 4)
    assert bench.notes == ["start", "measure", "end", "start", "measure"]
    assert [each.content["decode"]["max_num_seqs"] for each in bench.servers] == [8, 16]
    assert (live_.seeds, live_.required) == ((4,), 0.9)


def test_warm_ups_come_before_new_engines_and_new_knobs_only(
    bench: Bench, objective: LiveObjective
) -> None:
    for each in (chosen("none"), chosen("none"), chosen("greedy"), chosen("greedy")):
        objective.score(each, 0)
    assert [len(warmup) for _, warmup in bench.windows] == [2, 0, 2, 0]


def test_new_engines_have_a_window_that_does_not_count(bench: Bench, deployment: Path) -> None:
    practising = LiveObjective(
        *(deployment, SPACE, WINDOW, SLO), serve=bench.serve, measure=bench.measure
    )
    for each in (chosen("none"), chosen("greedy")):
        practising.score(each, 0)
    assert [len(warmup) for _, warmup in bench.windows] == [2, 0, 2]
    assert bench.notes == ["start", "measure", "measure", {"when": "greedy"}, "measure"]


def test_the_server_has_nothing_to_do_before_a_window(
    bench: Bench, objective: LiveObjective, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective.score(chosen(), 0)
    monkeypatch.setattr(live, "DRAIN_POLL_S", 0.0)
    bench.open += [2, 1, 0]
    objective.score(chosen("greedy"), 0)
    assert bench.open == []
    assert bench.notes == ["start", "measure", {"when": "greedy"}, "measure"]
    monkeypatch.setattr(live, "DRAIN_S", 0.0)
    bench.open += [5] * 3
    objective.score(chosen("greedy"), 0)
    assert bench.notes[-3:] == ["end", "start", "measure"]


def test_a_server_is_private(deployment: Path) -> None:
    given = read_file(deployment) | {"server": {"host": "0.0.0.0", "api_key": "k", "port": 80}}
    tokens = set()
    for _ in range(2):
        server = build(private(given), "file").server
        assert (server.host, server.port, server.api_key) == ("127.0.0.1", 0, None)
        assert server.admin_token is not None
        tokens.add(server.admin_token.get_secret_value())
    assert len(tokens) == 2


# What is asked, and what it was worth ------------------------------------------------------------


def test_arrivals_are_common_and_content_is_new(bench: Bench, objective: LiveObjective) -> None:
    for each, seed in ((chosen(), 0), (chosen("greedy"), 0), (chosen("greedy"), 1)):
        objective.score(each, seed)
    times_s = [[planned.at_s for planned in requests] for requests, _ in bench.windows]
    assert times_s[0] == times_s[1] != times_s[2]
    assert len(times_s[0]) == 10  # 20/s for half a second
    asked_ = [planned.body for both in bench.windows for part in both for planned in part]
    assert len(set(map(str, asked_))) == len(asked_)


def test_content_is_drawn_once() -> None:
    seeds = {content_seed(seed, number) for seed in range(20) for number in range(20)}
    assert len(seeds) == 400


def test_goodput_is_of_all_that_was_sent(bench: Bench, objective: LiveObjective) -> None:
    bench.samples = [sample(1.0), sample(1.0), sample(9.0), sample(1.0, completed=False)]
    assert objective.score(chosen(), 0) == Score(1.0, 0.5, 20.0)
    assert objective.score(chosen(), 0).attainment == 0.5
    bench.samples = []
    assert objective.score(chosen(), 0) == Score(0.0, 0.0, 20.0)
    assert "measuring: 1 of 10 requests answered" in bench.said
    assert "warm-up: 1 of 2 requests answered" in bench.said


def test_a_window_in_which_the_client_was_late_is_repeated(
    bench: Bench, objective: LiveObjective
) -> None:
    bench.healths = [LATE, KEPT_UP]
    assert objective.score(chosen(), 0).attainment == 1
    assert bench.notes == ["start", "measure", "measure"]
    assert [len(warmup) for _, warmup in bench.windows] == [2, 0]
    bench.healths = [LATE] * 3
    with pytest.raises(Unworkable, match="did not keep up, 3 times: the client was busy for 100%"):
        objective.score(chosen(), 0)
    assert bench.notes[2:] == ["measure"] * 4  # the server stays


def test_late_windows_count_where_they_are_allowed(bench: Bench, deployment: Path) -> None:
    bench.healths = [LATE]
    allowed = LiveObjective(
        *(deployment, SPACE, WINDOW, SLO),
        practises=False,
        allow_late=True,
        serve=bench.serve,
        measure=bench.measure,
    )
    assert allowed.score(chosen(), 0).attainment == 1


# What cannot be tried ----------------------------------------------------------------------------


def test_what_is_no_deployment_starts_nothing(bench: Bench, deployment: Path) -> None:
    space = Space([Allocation("a", {"decode.replicas": 0})], [])
    live_ = LiveObjective(deployment, space, WINDOW, SLO, serve=bench.serve)
    with pytest.raises(Unworkable, match=r"deployment.yaml: decode.replicas: "):
        live_.score(next(iter(space)), 0)
    assert bench.notes == []


def test_engines_that_do_not_start_are_said_and_the_next_are_started(
    bench: Bench, objective: LiveObjective
) -> None:
    bench.fails = [ServerLost("decode-0 ended\nlog: /logs/decode-0.log")]
    with pytest.raises(Unworkable, match=r"log: /logs/decode-0\.log"):
        objective.score(chosen(), 0)
    objective.score(chosen(), 0)
    assert bench.notes == ["start", "start", "measure"]


def test_an_engine_that_ends_under_load_makes_a_configuration_unworkable(
    bench: Bench, objective: LiveObjective
) -> None:
    bench.loses = "decode-0 ended with signal 9"
    with pytest.raises(Unworkable, match="decode-0 ended with signal 9"):
        objective.score(chosen(), 0)
    objective.score(chosen(), 0)
    assert bench.notes == ["start", "measure", "end", "start", "measure"]


def test_an_engine_that_ended_before_is_nobodys_fault(
    bench: Bench, objective: LiveObjective
) -> None:
    objective.score(chosen(), 0)
    bench.servers[0].lost = "decode-0 ended with signal 9"
    assert objective.score(chosen("greedy"), 0).attainment == 1
    assert bench.notes == ["start", "measure", "end", "start", "measure"]
    assert "decode-0 ended with signal 9" in bench.said


def test_a_knob_that_is_refused_makes_a_configuration_unworkable(
    bench: Bench, objective: LiveObjective, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Server, knobs: Mapping[str, Any]) -> None:
        raise ServerLost("PATCH /admin/knobs: HTTP 400: when")

    objective.score(chosen(), 0)
    monkeypatch.setattr(Server, "turn", refuse)
    with pytest.raises(Unworkable, match="HTTP 400: when"):
        objective.score(chosen("greedy"), 0)


def test_a_client_that_gets_no_answer_ends_the_server(
    bench: Bench, objective: LiveObjective
) -> None:
    bench.fails = [LoadError("none of 2 warm-up requests was answered: HTTP 500")]
    with pytest.raises(Unworkable, match="none of 2 warm-up requests"):
        objective.score(chosen(), 0)
    assert bench.notes == ["start", "measure", "end"]


def test_leaving_ends_the_server(bench: Bench, objective: LiveObjective) -> None:
    bench.fails = [KeyboardInterrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt), objective:
        objective.score(chosen(), 0)
    assert bench.notes == ["start", "measure", "end"]
    objective.close()
    assert bench.notes[-1:] == ["end"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s must be more than 0"),
        ({"duration_s": float("inf")}, "duration_s must be more than 0 and finite"),
        ({"kind": "often"}, "often"),
        ({"cv": 2.0}, "cv"),
        ({"asked": asked.source(dataset=Path("x.jsonl"))}, "x.jsonl: a live search asks nothing"),
    ],
)
def test_a_window_that_cannot_be_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Window(**{"asked": TEXT, "rate_per_s": 1.0, "duration_s": 1.0, **more})


# Deployments and keys ----------------------------------------------------------------------------

DIVIDED = {
    "model": "owner/name",
    "local_prefill": {"max_num_seqs": 7},
    "partition": {"driver": "gate"},
    "policy": {"how": "static", "encode_units": 3, "when": "gap", "remote_share": 0.5},
}
SIDES = Space(
    [
        Allocation("both", {}, {"local_prefill": {}, "partition": {}}),
        Allocation("undivided", {}, {"local_prefill": {}, "partition": None}),
        Allocation("alone", {}, None),
    ],
    [Knob(SHARE, (0.5, 1.0))],
)


def at(allocation: str, share: float) -> dict[str, Any]:
    content = laid(DIVIDED, SIDES, SIDES.configuration(allocation, {SHARE: share}))
    build(content, "file")
    return content


def test_nothing_divides_a_device_that_prefill_does_not_use() -> None:
    half, whole = at("both", 0.5), at("both", 1.0)
    assert half["policy"]["how"] == "static"
    assert whole["policy"] == {**half["policy"], "how": "none", "remote_share": 1.0}
    assert engines_of(half) == engines_of(whole) == engines_of(DIVIDED)


@pytest.mark.parametrize("allocation", ["undivided", "alone"])
def test_without_a_partition_its_rule_goes_too(allocation: str) -> None:
    content = at(allocation, 1.0)
    assert content["partition"] is None
    assert content["policy"] == {"when": "gap", "remote_share": 1.0}
    assert (content["local_prefill"] is None) is (allocation == "alone")


def test_a_rule_of_a_partition_is_no_knob_of_an_allocation_without_one() -> None:
    mixed = Space(SIDES.allocations, [Knob(SHARE, (0.5,)), Knob("policy.how", ("static", "none"))])
    asked = mixed.configuration("undivided", {SHARE: 0.5, "policy.how": "static"})
    content = laid(DIVIDED, mixed, asked)
    build(content, "file")
    assert "how" not in content["policy"]


def test_a_key_is_of_all_that_decides_a_score(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(deployment, WINDOW, SLO)
    monkeypatch.chdir(tmp_path)
    assert key_of(deployment, Window(TEXT, 20.0, 0.5, num_warmup=2), SLO) == key
    others = {
        key,
        key_of(deployment, Window(TEXT, 20.0, 1.0, num_warmup=2), SLO),
        key_of(deployment, WINDOW, Slo(ttft_s=4.0)),
        key_of(deployment, WINDOW, SLO, allow_late=True),
    }
    deployment.write_text(deployment.read_text() + "server: {port: 1}\n")
    assert key_of(deployment, WINDOW, SLO) == key
    deployment.write_text(deployment.read_text() + "engine: {dtype: float32}\n")
    others.add(key_of(deployment, WINDOW, SLO))
    monkeypatch.setattr(live, "__version__", "9.9")
    others.add(key_of(deployment, WINDOW, SLO))
    assert len(others) == 6


def test_a_promise_is_one(deployment: Path) -> None:
    made = build(read_file(deployment), "file")
    given = promised("ttft=2s", made, TEXT, None, None)
    assert given == ("ttft=2s", Slo(ttft_s=2.0))
    reference = ROOT / "references/amd-epyc-2-cores/tiny-llava-shapes.yaml"
    tiny = build({"model": "x", "served_model_name": "tiny-llava"}, "file")
    shapes = asked.source("shapes")
    name, slo = promised("S3", tiny, shapes, reference, None)
    assert name == "S3"
    assert slo.ttft_s == pytest.approx(12 * 0.0289205)
    with pytest.raises(ConfigError, match="--slo S1,S3: a search goes by one promise"):
        promised("S1,S3", tiny, shapes, reference, None)


# With a process of its own -----------------------------------------------------------------------

Start = Callable[..., ServerProcess]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Sockets in a folder of their own, in which nothing is left, and logs in another."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with tempfile.TemporaryDirectory(prefix="ea-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        assert not list(Path(folder).iterdir())


@pytest.fixture
def file(deployment: Path) -> Path:
    deployment.write_text(deployment.read_text() + "engine: {fork_server: false}\n")
    return deployment


def pids_of(objective: LiveObjective) -> dict[str, int]:
    server = objective._server
    assert isinstance(server, ServerProcess)
    return dict(server.served.pids)


@pytest.mark.long
def test_knobs_and_engines_of_a_server_that_runs(alone: Path, file: Path) -> None:
    said: list[str] = []
    window = Window(TEXT, 20.0, 0.2, num_warmup=2)
    with LiveObjective(
        file, SPACE, window, SLO, serve=start, allow_late=True, tell=said.append
    ) as objective:
        for when, share in (("none", 1.0), ("greedy", 0.5)):
            score = objective.score(chosen(when, share), 0)
            assert score.attainment == 1
            assert score.goodput_per_s > 5
            if when == "none":
                first = pids_of(objective)
                assert len(first) == 4
        assert pids_of(objective) == first
        server = objective._server
        assert isinstance(server, ServerProcess)
        knobs = server._ask("GET", "/admin/knobs")
        assert (knobs["when"], knobs["remote_share"]) == ("greedy", 0.5)
        os.kill(first["decode-0"], signal.SIGKILL)
        wait_until(lambda: _is_lost(server))
        with pytest.raises(ServerLost, match=r"decode-0 ended with signal 9\nlog: .*decode-0.log"):
            server.check()
        assert objective.score(chosen(allocation="e1-p1x2-d1"), 1).attainment == 1
        second = pids_of(objective)
        assert "prefill-1" in second
    assert not any(map(is_alive, [*first.values(), *second.values()]))
    assert "decode-0: ready" in said


def _is_lost(server: ServerProcess) -> bool:
    try:
        server.check()
    except ServerLost:
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_search_however_it_ends(
    alone: Path, file: Path, number: signal.Signals
) -> None:
    search = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.live_search", str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert search.stdout is not None
    told = json.loads(search.stdout.readline())
    assert len(told["pids"]) == 5
    assert all(map(is_alive, told["pids"]))
    search.send_signal(number)
    search.communicate(timeout=20)
    wait_until(lambda: not any(map(is_alive, told["pids"])), 10, "server and engines gone")
    wait_until(lambda: not Path(told["run"]).exists(), 10, "folder gone")


@pytest.mark.long
def test_a_start_that_is_interrupted_leaves_nothing(alone: Path, file: Path) -> None:
    def interrupt(text: str) -> None:
        if "starting" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(private(read_file(file)), "file", 10.0, interrupt)


@pytest.mark.long
def test_a_server_that_does_not_end_is_killed(
    alone: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "stuck")
    monkeypatch.setattr(live_process, "STOP_S", 2.0)
    server = start(private(read_file(file)), "file", 10.0, lambda _: None)
    server.close()
    assert not any(map(is_alive, server.served.pids.values()))
    assert server._process.returncode == -signal.SIGKILL


def test_a_server_that_ends_at_once_is_said_with_what_it_printed(alone: Path) -> None:
    told = {"server": {"admin_token": "t"}}
    words = ("-c", "print('no such thing'); raise SystemExit(3)")
    with pytest.raises(ServerLost, match="the server ended with exit code 3; it printed:\nno such"):
        ServerProcess.start(told, "file", 10.0, lambda _: None, words)


@pytest.mark.long
def test_a_server_that_says_nothing_is_given_up(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "mute")
    monkeypatch.setattr(live_process, "START_SLACK_S", 0.1)
    monkeypatch.setattr(live_process, "STOP_S", 0.2)
    with pytest.raises(ServerLost, match="the server was not ready in time"):
        start({"server": {"admin_token": "t"}}, "file", 0.1, lambda _: None)


@pytest.mark.long
def test_what_cannot_be_served_is_said(alone: Path, file: Path) -> None:
    content = private(read_file(file)) | {"model": "./nosuch"}
    with pytest.raises(ServerLost, match=r"model '\./nosuch': no such folder"):
        start(content, "file", 10.0, lambda _: None)

"""``easerve bench``: what is asked wrongly, and what becomes of measured values."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.bench.report import Table, html
from easerve.cli.bench import (
    others,
    shown,
    transfer,
    transfer_engines,
    transfer_folders,
    transfer_shown,
)
from easerve.cli.bench.encode import PARTS, Plan, Result, medians, ratios
from easerve.cli.bench.recorder import Recorder
from easerve.config import Deployment, Policy
from easerve.engines.protocol import EngineError
from easerve.engines.vllm.launch import EngineSpec
from easerve.policy import events as ev
from easerve.types import NS_PER_S, BatchId, MediaItem, Modality, RequestId, Shape, WorkerId

from .conftest import Easerve

SPREAD = {"mean": 0.05, "p50": 0.04, "p99": 0.2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "stage,nosuch"), "--parts: 'nosuch' is none of stage, call, server"),
        (("--rules", "none,greedier"), "--rules: 'greedier' is none of none, greedy"),
        (("--rates", "5,x"), "--rates: '5,x' is not a list of numbers"),
        (("--rates", "0"), "--rates: 0 is not from"),
        (("--rates", "nan"), "--rates: nan is not from"),
        (("--windows-ms", "2000"), "--windows-ms: 2000 is not from 0 to 1000"),
        (("nosuch.yaml",), "nosuch.yaml: No such file"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    easerve: Easerve, options: tuple[str, ...], message: str
) -> None:
    ended = easerve("bench", "encode", *options)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "data,nosuch"), "--parts: 'nosuch' is none of data, engines"),
        (("--items", "0"), "--items: 0 is not from 1"),
        (("--items", "1,2.5"), "--items: 2.5 is not a whole number"),
        (("--disk", "/dev/shm"), "--disk /dev/shm: not a folder on a disk"),
        (("--disk", "/nosuch"), "--disk /nosuch: not a folder"),
    ],
)
def test_a_transfer_that_cannot_be_measured_is_a_usage_error(
    easerve: Easerve, options: tuple[str, ...], message: str
) -> None:
    ended = easerve("bench", "transfer", *options)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


def test_transfers_are_measured_on_a_cpu(easerve: Easerve, deployment: Path) -> None:
    deployment.write_text(f"{deployment.read_text()}device: cuda\n")
    ended = easerve("bench", "transfer", deployment)
    assert (ended.code, ended.out) == (2, "")
    assert "measures on a CPU" in ended.err


@pytest.mark.parametrize("command", ["encode", "flow", "transfer"])
def test_a_report_that_cannot_be_written_is_said_before_anything_starts(
    easerve: Easerve, tmp_path: Path, command: str
) -> None:
    ended = easerve("bench", command, "--html", tmp_path / "no/such.html")
    assert (ended.code, ended.out) == (2, "")
    assert "such.html: No such file or directory" in ended.err


def test_the_commands_are_known_by_their_names(easerve: Easerve) -> None:
    assert all(name in easerve("bench", "--help").out for name in ("encode", "flow", "transfer"))


# Values -------------------------------------------------------------------------------------------


def test_medians_are_taken_value_by_value() -> None:
    rows = [{"a": a, "b": {"c": a}, "d": None if a == 3 else 1.0} for a in (3, 1, 9)]
    assert medians(rows) == {"a": 3, "b": {"c": 3}, "d": None}


def load_row(**values: Any) -> Result:
    row = {
        "cpu_s": 0.04,
        "items_per_s": 9.0,
        "batch_mean": 2.0,
        "encode_wait_s": SPREAD,
        "ttft_s": SPREAD,
        "tpot_s": {"mean": None, "p50": None, "p99": None},
        "busy_share": 0.5,
        "throughput_per_s": 10.0,
        "not_completed": 0,
    }
    return row | values


def stage_row(items_per_s: float, cpu_s: float) -> Result:
    return {"items_per_s": items_per_s, "cpu_s": cpu_s, "batch_mean": 1.0, "busy_share": 0.9}


RESULT: Result = {
    "stage": {"none": stage_row(100, 0.010), "slack": stage_row(300, 0.002)},
    "call": {"num_items": 16, "direct_s": 0.03, "stage_s": 0.033, "ratio": 1.1},
    "server": {"none": load_row(), "slack": load_row(throughput_per_s=12.0)},
    "low": {
        "none": load_row(),
        "slack": load_row(ttft_s={**SPREAD, "mean": 0.051}),
    },
    "rates": {"none": {"5": load_row(), "9": load_row(batch_mean=3.0)}},
    "windows": {"0": load_row(), "0.05": load_row()},
}


def test_the_servers_ratio_is_explained_by_what_the_stage_saves() -> None:
    found = ratios(RESULT, "slack")
    assert found["encode_stage_ratio"] == 3
    assert found["one_call_ratio"] == 1.1
    assert found["server_ratio"] == pytest.approx(1.2)
    assert found["server_ratio_expected"] == pytest.approx(0.04 / (0.04 - 0.008))
    assert found["low_load_ttft_ratio"] == pytest.approx(1.02)
    assert found["systems"]["none"]["batch_mean"] == 3  # at the highest rate
    assert list(found["systems"]["none"]["by_rate"]) == ["5", "9"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_shown_alone_as_well(part: str) -> None:
    result = {part: RESULT[part]}
    (section,) = shown.of_encode(result | ratios(result, "slack"))
    assert any(isinstance(each, Table) for each in section.parts)


def test_everything_goes_onto_a_page() -> None:
    page = html("bench", shown.of_encode(RESULT | ratios(RESULT, "slack")))
    assert all(text in page for text in ("Batched, the stage encodes 3.00", "50.0 / 200"))


def test_engines_that_run_and_modelled_ones_are_in_one_table() -> None:
    part = {"tpot_alone_s": 0.01, "tpot_promise_s": 0.03, "systems": {"credits": load_row()}}
    (section,) = shown.of_flow({"engines": part, "modelled": part})
    (table,) = section.parts
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["credits (engines)", "credits (modelled)"]
    assert "promise 30.0 ms" in section.text


def test_a_plan_counts_its_runs() -> None:
    plan = Plan(Policy(), PARTS, ["none", "slack"], [5, 9], [0, 0.1, 1], 5, 9, 1, 1, 1, 1, 3, 0)
    assert plan.num_runs == 6 + 6 + 7 + 6 + 4 + 3
    assert [rule for rule, _ in plan.pair()] == ["none", "slack"]


# Transfers ----------------------------------------------------------------------------------------


def test_push_is_compared_with_the_better_example() -> None:
    rounds = {"push": [2.0, 3.0, 4.0], "example-shm": [8.0, 5.0, 4.0], "example-disk": [9.0] * 3}
    found = transfer.ratios(4, rounds)
    assert (found["example"], found["push_s"], found["example_s"]) == ("example-shm", 3, 5)
    assert found["ratio"] == pytest.approx(0.6)
    assert found["ratio_in_round"]["median"] == pytest.approx(0.6)  # of 0.25, 0.6 and 1


def test_a_spread_is_of_values_that_were_measured() -> None:
    assert transfer.spread([5, 1, 2, 4, 3]) == {"median": 3, "low": 2, "high": 4}
    assert transfer.spread([7]) == {"median": 7, "low": 7, "high": 7}


def test_a_transfer_plan_counts_the_turns_of_its_parts() -> None:
    plan = transfer.Plan(transfer.PARTS, [1, 4, 16], num_rounds=5, seed=0)
    warm = transfer.NUM_WARM_UPS
    assert plan.num_runs("engines") == 3 * (5 + warm)
    assert plan.num_runs("data") == 2 * 3 * (5 + warm)


def transfer_result() -> Result:
    spread = {"median": 0.02, "low": 0.01, "high": 0.03}
    data = {"case": "small", "num_items": 4, "num_bytes": 51200, "connector": "push"}
    times = {"sent_s": spread, "usable_s": spread, "read_s": spread, "bytes_per_s": 1e9}
    first = {"num_items": 4, "first_token_s": spread, "encode_s": spread, "usable_s": None}
    rounds = {name: [0.02] for name in transfer.SYSTEMS}
    ratios = transfer.ratios(4, rounds)
    return {
        "data": [data | times],
        "disk": {"folder": "/tmp", "file_system": "ext4"},
        "data_others_cores": 0.5,
        "engines_others_cores": 0.25,
        "engines": [first | {"system": name, "wait_s": None} for name in transfer.SYSTEMS],
        "ratios": [ratios],
        "ratio": ratios["ratio"],
    }


def test_transfers_go_onto_a_page_and_the_goal_with_them() -> None:
    data, engines = transfer_shown.of_transfer(transfer_result())
    assert "in /tmp (ext4)" in data.text
    assert "other processes used 0.50 cores" in data.text
    assert "takes 1.000 times as long as the better example, not as aimed at" in engines.text
    page = html("bench", [data, engines])
    assert all(text in page for text in ("4 small, push", "20.0 (10.0 – 30.0)", "example-disk"))


@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("data", ("data", "disk", "data_others_cores")),
        ("engines", ("engines", "ratios", "engines_others_cores")),
    ],
)
def test_a_part_of_the_transfers_is_shown_alone_as_well(part: str, keys: tuple[str, ...]) -> None:
    result = transfer_result()
    (section,) = transfer_shown.of_transfer({key: result[key] for key in keys})
    assert any(isinstance(each, Table) for each in section.parts)
    assert "aimed at" not in section.text  # without the case of four there is no verdict


def test_what_others_use_of_the_machine_is_what_we_do_not() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"cpu  {ticks} {ticks} {ticks} 99 99 0 0 {ticks} 7 7\ncpu0 1 2 3\n"
    assert others.busy_s(stat) == 4  # neither idle nor waiting, and no guest twice
    assert others.Others().cores() >= 0


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/vda rw
23 22 0:5 / /dev/shm rw shared:2 - tmpfs tmpfs rw
24 22 0:6 / /a\\040b rw - xfs /dev/vdb rw
25 22 0:7 / /dev/shm rw - ramfs ramfs rw
""".splitlines()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/nosuch/a", "ext4"), ("/a b/c", "xfs"), ("/dev/shm/x", "ramfs"), ("/a", "ext4")],
)
def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(folder: str, kind: str) -> None:
    assert transfer_folders.file_system(Path(folder), MOUNTS) == kind


def test_folders_of_connectors_go_and_those_of_killed_benches_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, shm = tmp_path / "disk", tmp_path / "shm"
    for root in (disk, shm):
        (root / "easerve-killed").mkdir(parents=True)
        (root / "easerve-killed/lock").touch()
    monkeypatch.setattr(transfer_folders, "SHM_ROOT", shm)
    monkeypatch.setattr(transfer_folders, "IN_MEMORY", ())
    with transfer_folders.storage(disk) as kept:
        assert (kept.disk_root, kept.disk.parent.parent, kept.shm.parent.parent) == (
            disk,
            disk,
            shm,
        )
        assert [len(list(root.iterdir())) for root in (disk, shm)] == [1, 1]
        (kept.shm / "key").mkdir()
        (kept.shm / "key/file").touch()
        kept.empty()
        assert not list(kept.shm.iterdir())
    assert not [*disk.iterdir(), *shm.iterdir()]


@pytest.fixture
def launch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[transfer_engines.Launch]:
    """Nothing of it runs yet. The connectors are ours, and vLLM's with a folder."""
    run = Path(tempfile.mkdtemp(prefix="ea-"))  # short enough for the sockets in it
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setattr("easerve.cluster.local.LOG_ROOT", tmp_path / "logs")
    monkeypatch.setattr(transfer_engines, "MODULE", "tests.cli.dummy_transfer")
    pair = {"replicas": 2}
    deployment = Deployment.model_validate({"model": str(model), "encode": pair, "prefill": pair})
    storages = {"push": None, "example": tmp_path / "files"}
    with transfer_engines.planned(deployment, storages) as planned:
        yield planned
    run.rmdir()  # nothing is left in it


def test_each_connector_has_a_pair_of_engines(
    launch: transfer_engines.Launch, tmp_path: Path
) -> None:
    names = {name: [spec.worker_id for spec in pair] for name, pair in launch.specs.items()}
    assert names == {"push": ["encode-0", "prefill-0"], "example": ["encode-1", "prefill-1"]}
    ours, example = launch.settings["push"], launch.settings["example"]
    assert [ours[role]["ec_role"] for role in ours] == ["ec_producer", "ec_consumer"]
    assert ours["consumer"]["ec_connector_extra_config"]["name"] == "prefill-0"
    assert example["consumer"] == {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }

    def others(spec: EngineSpec) -> list[str]:
        at = spec.argv.index("--ec-transfer-config") + 1
        return [word for word in (*spec.argv[:at], *spec.argv[at + 1 :]) if ".sock" not in word]

    for mine, theirs in zip(*launch.specs.values(), strict=True):
        assert others(mine) == others(theirs)


def order(connector: str, num_items: int = 1) -> Result:
    return {"connector": connector, "num_items": num_items}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_data_plane_has_every_connector(launch: transfer_engines.Launch) -> None:
    heard: list[str] = []
    async with transfer_engines.data_plane(launch, lambda _, state: heard.append(state)) as plane:
        assert await plane.run(order("push")) == {
            "connector": "PushConnector",
            "destination": "prefill-0",
        }
        assert (await plane.run(order("example")))["connector"] == "ECExampleConnector"
    assert heard == ["importing vLLM", "ready"]


async def test_a_data_plane_that_ends_says_why(launch: transfer_engines.Launch) -> None:
    with pytest.raises(EngineError, match="data plane ended") as raised:
        async with transfer_engines.data_plane(launch, lambda *_: None) as plane:
            await plane.run(order("push", num_items=13))
    assert "thirteen is too much" in str(raised.value)


async def test_a_data_plane_goes_with_the_bench_that_is_stopped(
    launch: transfer_engines.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    spawn = transfer_engines._spawn

    def spawn_and_note(plan: transfer_engines.Launch, log: Path) -> Any:
        process, connection = spawn(plan, log)
        pids.append(process.pid)
        return process, connection

    monkeypatch.setattr(transfer_engines, "_spawn", spawn_and_note)
    ready = asyncio.Event()

    async def measure() -> None:
        async with transfer_engines.data_plane(launch, lambda *_: None):
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(measure())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [is_alive(pid) for pid in pids] == [False]


# What is recorded ---------------------------------------------------------------------------------


def prepared(name: str) -> ev.Prepared:
    item = MediaItem(name, Modality.IMAGE, 25)
    return ev.Prepared(RequestId(name), Shape(10, 1, (item,)))


def started(number: int, *names: str) -> ev.StartEncode:
    items = tuple(
        ev.EncodeItem(
            MediaItem(name, Modality.IMAGE, 25),
            (ev.Waiter(RequestId(name), 0, WorkerId("p0")),),
        )
        for name in names
    )
    decision = ev.Decision("full", 0.0, 0.0, "", 0, 0.0, 1.0)
    return ev.StartEncode(BatchId(number), WorkerId("e0"), items, decision)


def test_waits_calls_and_busy_time_are_recorded() -> None:
    recorder = Recorder()
    recorder.reset(0)
    recorder.step(1 * NS_PER_S, [prepared("a")], [])
    recorder.step(2 * NS_PER_S, [prepared("b")], [started(1, "a", "b")])
    recorder.step(3 * NS_PER_S, [], [started(2, "c")])  # of another run: it was prepared before
    recorder.step(5 * NS_PER_S, [ev.EncodeFinished(BatchId(1))], [])
    recorder.step(6 * NS_PER_S, [ev.EncodeFailed(BatchId(2), retryable=True)], [])
    recorder.step(7 * NS_PER_S, [ev.EncodeFinished(BatchId(9))], [])
    run = recorder.run(8 * NS_PER_S, num_encoders=1)
    assert run.waits_s == [1, 0] or run.waits_s == [0, 1]
    assert run.calls_s == [3, 3]
    assert run.batch_mean == 1.5
    assert run.busy_share == pytest.approx(4 / 8)
    assert run.duration_s == 8
    assert run.reasons() == {"full": 2}
    assert run.wait.mean == 0.5


def test_a_reset_forgets() -> None:
    recorder = Recorder()
    recorder.step(1, [prepared("a")], [started(1, "a")])
    recorder.reset(5 * NS_PER_S)
    run = recorder.run(6 * NS_PER_S, num_encoders=2)
    assert (run.batches, run.waits_s, run.batch_mean, run.busy_share) == ([], [], None, 0)

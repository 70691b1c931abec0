from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from easerve.bench import reference as references
from easerve.bench.reference import (
    Reference,
    chosen,
    command_of,
    differences,
    isolated,
    machine_of,
    make,
    path_of,
    resolve,
    this_cpu,
    write,
)
from easerve.config import ConfigError, read_section
from easerve.goodput import Outcome, Record, Slo

MADE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WORDS = ("easerve", "bench", "reference", "--url", "http://127.0.0.1:8000")
MACHINE = "2 x RTX 6000 Ada"


def record(begin_s: float, ttft_s: float, tpot_s: float = 0.01, num_tokens: int = 11) -> Record:
    first_s = begin_s + ttft_s
    end_s = first_s + (num_tokens - 1) * tpot_s
    return Record(begin_s, begin_s, first_s, end_s, num_tokens, "completed")


def made(records: Sequence[Record] = (), **over: Any) -> Reference:
    told: dict[str, Any] = {
        "words": WORDS,
        "machine": MACHINE,
        "model": "llava",
        "system": "easerve",
        "modality": "image",
        "workload": {"image_sizes": "1280x720", "output_tokens": 128},
        "made": MADE,
    }
    default = [record(0, 0.5), record(1, 0.7, 0.02), record(2, 0.6, 0.03)]
    return make(records or default, **(told | over))


def test_the_medians_are_what_tiers_are_multiples_of() -> None:
    reference = made()
    assert (reference.ttft_s, reference.tpot_s) == (0.6, 0.02)
    assert reference.ttfts_s == (0.5, 0.7, 0.6)
    slo = resolve(["S1"], reference)["S1"]
    assert (slo.ttft_s, slo.tpot_s) == pytest.approx((1.8, 0.025))


def test_objectives_are_tiers_or_explicit_and_keep_their_order() -> None:
    slos = resolve(["s3,S1", " ttft=2s, tpot=80ms ", "ttft:500  tpot:50"], made())
    assert list(slos) == ["S3", "S1", "ttft=2s, tpot=80ms", "ttft:500 tpot:50"]
    assert slos["ttft=2s, tpot=80ms"] == Slo(2, 0.08)
    assert slos["ttft:500 tpot:50"] == Slo(0.5, 0.05)
    assert list(resolve(["all"], made())) == ["S1", "S2", "S3", "S4", "S5"]
    assert resolve([], None) == {}


def test_explicit_objectives_need_no_reference() -> None:
    assert resolve(["ttft=2s"], None) == {"ttft=2s": Slo(2)}
    assert chosen(["ttft=2s"], None, "llava", None, "image") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S1", "--slo S1: tiers are multiples .*`easerve bench reference --url"),
        ("S6", "--slo: 'S6' is not like ttft=2s.*or name tiers: S1, S2, S3, S4, S5 or all"),
        ("S1,ttft=2s", "'S1' is not like"),
    ],
)
def test_an_objective_that_cannot_be_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve([text], None)


# The file -----------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.yaml"
    write(made(), path)
    assert read_section(path, Reference) == made()
    assert path.read_text().startswith("# Written by easerve bench reference. Frozen")
    assert [each.name for each in path.parent.iterdir()] == ["file.yaml"]


def test_the_same_requests_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(made(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_it_is_frozen(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    write(made(), path)
    with pytest.raises(ConfigError, match="exists, and what was measured with it would no longer"):
        write(made(model="other"), path)
    assert read_section(path, Reference).model == "llava"
    write(made(model="other"), path, force=True)
    assert read_section(path, Reference).model == "other"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/x\.yaml: "):
        write(made(), tmp_path / "file" / "x.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ttft_s: 0.6", "ttft_s: 0.9", "ttft_s is 0.9, but its samples' median 0.6"),
        ("schema_version: 1", "schema_version: 2", "schema_version: Input should be 1"),
        ("model: llava", "modell: llava", "modell: unknown key; did you mean 'model'"),
        ("num_requests: 3", "num_requests: 0", "num_requests: .*greater than or equal to 1"),
    ],
)
def test_a_file_is_read_strictly(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "file.yaml"
    write(made(), path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        chosen(["S1"], path, "llava", None, "image")


# Which one ----------------------------------------------------------------------------------------


def test_a_reference_is_found_by_model_machine_and_modality(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    write(made(system="kept"), folders[1] / path_of(MACHINE, "llava", "image"))
    write(made(modality="video"), folders[1] / path_of(MACHINE, "llava", "video"))
    found = chosen(["ttft=1s", "S2"], None, "llava", MACHINE, "image", folders)
    assert found is not None
    assert found.system == "kept"
    write(made(system="nearer"), folders[0] / path_of(MACHINE, "llava", "image"))
    found = chosen(["S2"], None, "llava", MACHINE, "image", folders)
    assert found is not None
    assert found.system == "nearer"


def test_none_to_be_found_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="easerve bench reference --url") as error:
        chosen(["S1"], None, "org/LLaVA", MACHINE, "image", [tmp_path / "a", tmp_path / "b"])
    place = f"{tmp_path}/a/2-x-rtx-6000-ada/llava-image.yaml"
    assert f"there is neither {place} nor {tmp_path}/b/" in str(error.value)


def test_a_machine_that_is_not_known_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"--slo S1: .*name it with --machine"):
        chosen(["S1"], None, "llava", None, "image")


def test_a_file_that_was_moved_to_another_s_place_is_an_error(tmp_path: Path) -> None:
    write(made(), tmp_path / path_of("other", "llava", "image"))
    with pytest.raises(ConfigError, match="is not what its path says: machine 'other', in the ref"):
        chosen(["S1"], None, "llava", "other", "image", [tmp_path])


def test_the_file_that_is_named_is_taken_and_what_differs_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    write(made(), path)
    found = chosen([], path, "models/llava", None, "video")
    assert found is not None
    workload = {"image_sizes": "64x64", "output_tokens": 128, "num_items": 1}
    assert differences(found, "models/llava", "video", workload) == [
        "model 'models/llava', in the reference 'llava'",
        "modality 'video', in the reference 'image'",
        "image_sizes '64x64', in the reference '1280x720'",
    ]
    assert differences(found, "llava", "image", {"output_tokens": 128}) == []


def test_folders_are_those_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert references.search_path() == [Path("references"), tmp_path / "easerve/references"]


def test_the_machine_is_this_one_or_the_one_that_is_named() -> None:
    assert machine_of("http://localhost:8000", None) == this_cpu()
    assert machine_of("http://[::1]:8000/v1", None) == this_cpu()
    assert machine_of("http://gpu-host:8000", None) is None
    assert machine_of("http://localhost:8000", MACHINE) == MACHINE
    assert this_cpu().endswith("core") or this_cpu().endswith("cores")


def test_paths_are_of_plain_letters() -> None:
    assert path_of("AMD EPYC, 2 cores", "org/LLaVA-v1.6 34b/", "image") == Path(
        "amd-epyc-2-cores/llava-v1.6-34b-image.yaml"
    )
    assert path_of("../..", "..", "x") == Path("-/x.yaml")


# Making -------------------------------------------------------------------------------------------


def test_a_single_token_has_no_time_between() -> None:
    assert isolated([record(0, 0.5, num_tokens=1), record(1, 0.7)]) == ([0.5, 0.7], [0.01])


@pytest.mark.parametrize("outcome", ["failed", "rejected", "timed_out"])
def test_each_request_must_have_been_completed(outcome: Outcome) -> None:
    lost = Record(1, 1, None, 2, 0, outcome)
    with pytest.raises(ValueError, match="1 of 2 requests were not completed"):
        made([record(0, 0.5), lost])


def test_requests_that_overlap_did_not_have_the_system_to_themselves() -> None:
    with pytest.raises(ValueError, match="two requests were open at once"):
        made([record(1, 0.5), record(0, 0.5, 0.06)])


def test_answers_must_have_tokens_to_be_measured() -> None:
    for records in ([record(0, 0.5, num_tokens=1)], [Record(0, 0, None, 1, 12, "completed")]):
        with pytest.raises(ValueError, match="streamed, and of two tokens or more"):
            made(records)


def test_a_command_is_kept_without_its_secrets() -> None:
    words = [
        "easerve",
        "--api-key",
        "sk-1",
        "--api-key=sk-2",
        "--url",
        "http://me:pw@host/v1",
        "a b",
    ]
    assert command_of(words) == (
        "easerve --api-key '***' '--api-key=***' --url http://host/v1 'a b'"
    )


def test_references_of_the_repository_are_where_they_are_looked_for() -> None:
    folder = Path(__file__).parents[2] / "references"
    paths = sorted(folder.rglob("*.yaml"))
    assert paths
    for path in paths:
        found = read_section(path, Reference)
        assert path == folder / path_of(found.machine, found.model, found.modality)

"""Embeddings as files: who gets one depends on nobody else, and nothing is left behind."""

from pathlib import Path

import pytest

from easerve.engines.protocol import Prompt
from easerve.serve.embeddings import PART, Embeddings
from easerve.serve.job import Job
from easerve.types import BatchId, MediaItem, Modality, RequestId

NAME = "{}.safetensors"


@pytest.fixture
def embeddings(tmp_path: Path) -> Embeddings:
    return Embeddings(tmp_path)


def asked(embeddings: Embeddings, name: str, *keys: str) -> Job:
    """A job that wants these."""
    items = tuple(MediaItem(key, Modality.IMAGE, 4) for key in keys)
    job = Job(RequestId(name), {}, [], 1, prompt=Prompt([1], {"max_tokens": 1}, items=items))
    embeddings.want(job)
    return job


def encode(embeddings: Embeddings, number: int, *keys: str, made: str | None = None) -> Path:
    """A batch that hands over; it ``made`` these, or all."""
    batch = embeddings.open_batch(BatchId(number))
    for key in keys if made is None else made:
        (batch / NAME.format(key)).write_text(f"{key} of {number}")
    embeddings.hand_over(keys, batch)
    embeddings.close_batch(batch)
    return batch


def content(job: Job, key: str) -> str:
    assert job.folder is not None
    return (job.folder / NAME.format(key)).read_text()


def left(embeddings: Embeddings, root: Path) -> list[object]:
    return [*root.iterdir(), *embeddings._users, *embeddings._wanting, *embeddings._files]


def test_a_folder_is_new_and_nobody_elses(embeddings: Embeddings) -> None:
    batch = embeddings.open_batch(BatchId(7))
    assert batch.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        embeddings.open_batch(BatchId(7))


def test_what_is_handed_over_outlives_its_batch_and_goes_with_the_last_user(
    embeddings: Embeddings, tmp_path: Path
) -> None:
    first, second = asked(embeddings, "r", "a"), asked(embeddings, "s", "a", "b")
    assert [job.request_id for job in embeddings.wanting("a")] == ["r", "s"]
    encode(embeddings, 1, "a", "b")
    assert not embeddings.wanting("a")
    embeddings.close(first)
    assert (content(second, "a"), content(second, "b")) == ("a of 1", "b of 1")
    embeddings.close(second)
    assert left(embeddings, tmp_path) == []


def test_what_comes_from_several_batches_is_linked_into_one_folder(
    embeddings: Embeddings, tmp_path: Path
) -> None:
    job, other = asked(embeddings, "r", "a", "b"), asked(embeddings, "s", "b")
    encode(embeddings, 1, "a")
    encode(embeddings, 2, "b")
    assert (content(job, "a"), content(job, "b")) == ("a of 1", "b of 2")
    embeddings.close(other)
    assert content(job, "b") == "b of 2"
    embeddings.close(job)
    assert left(embeddings, tmp_path) == []


def test_a_latecomer_has_what_an_open_request_has(embeddings: Embeddings, tmp_path: Path) -> None:
    first = asked(embeddings, "r", "a")
    encode(embeddings, 1, "a")
    late = asked(embeddings, "s", "a", "b")
    assert not embeddings.wanting("a")
    assert embeddings.wanting("b")
    embeddings.close(first)
    assert content(late, "a") == "a of 1"
    embeddings.close(late)
    assert left(embeddings, tmp_path) == []


def test_one_that_is_gone_from_disk_is_wanted(embeddings: Embeddings) -> None:
    first = asked(embeddings, "r", "a")
    batch = encode(embeddings, 1, "a")
    (batch / NAME.format("a")).unlink()
    late = asked(embeddings, "s", "a")
    assert list(embeddings.wanting("a")) == [late]
    assert first.folder == batch


def test_what_was_lost_is_wanted_again_from_nobody_else(
    embeddings: Embeddings, tmp_path: Path
) -> None:
    jobs = [asked(embeddings, name, "a") for name in ("r", "s")]
    encode(embeddings, 1, "a")
    embeddings.want(jobs[0], again=True)
    assert list(embeddings.wanting("a")) == [jobs[0]]
    encode(embeddings, 2, "a")
    assert [content(job, "a") for job in jobs] == ["a of 2", "a of 1"]
    for job in jobs:
        embeddings.close(job)
    assert left(embeddings, tmp_path) == []


@pytest.mark.parametrize("parts", [(), (f"{NAME.format('a')}{PART}",)])
def test_only_what_is_complete_is_handed_over(
    embeddings: Embeddings, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    job = asked(embeddings, "r", "a")
    batch = embeddings.open_batch(BatchId(1))
    for part in parts:
        (batch / part).touch()
    embeddings.hand_over(["a"], batch)
    embeddings.close_batch(batch)
    folder = embeddings.folder(job)
    assert folder is not None
    assert list(folder.iterdir()) == []  # there prefill finds that it is missing
    embeddings.close(job)
    assert left(embeddings, tmp_path) == []


def test_a_text_has_no_folder(embeddings: Embeddings, tmp_path: Path) -> None:
    job = asked(embeddings, "r")
    assert embeddings.folder(job) is None
    embeddings.close(job)
    assert left(embeddings, tmp_path) == []


def test_who_left_gets_nothing(embeddings: Embeddings, tmp_path: Path) -> None:
    job = asked(embeddings, "r", "a")
    embeddings.close(job)
    encode(embeddings, 1, "a")
    assert job.folder is None
    assert left(embeddings, tmp_path) == []


def test_who_still_writes_into_a_folder_that_is_gone_finds_none(
    embeddings: Embeddings, tmp_path: Path
) -> None:
    batch = embeddings.open_batch(BatchId(1))
    embeddings.close_batch(batch)
    with pytest.raises(FileNotFoundError):
        (batch / "late.safetensors").touch()
    assert left(embeddings, tmp_path) == []

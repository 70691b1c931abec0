"""Embeddings as files: who gets one depends on nobody else, and nothing is left behind."""

from pathlib import Path

import pytest

from easerve.serve.embeddings import PART, Embeddings
from easerve.types import BatchId


@pytest.fixture
def embeddings(tmp_path: Path) -> Embeddings:
    return Embeddings(tmp_path)


@pytest.fixture
def batch(embeddings: Embeddings) -> Path:
    """With the embeddings a and b, and a part of c."""
    batch = embeddings.batch(BatchId(1))
    for name in ("a.safetensors", "b.safetensors", f"c.safetensors{PART}"):
        (batch / name).write_text(name)
    return batch


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folders_are_new_and_nobody_elses(embeddings: Embeddings) -> None:
    for folder in (embeddings.batch(BatchId(7)), embeddings.request("r")):
        assert names(folder) == []
        assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        embeddings.request("r")


def test_only_what_is_complete_was_made(embeddings: Embeddings, batch: Path) -> None:
    files = {key: batch / f"{key}.safetensors" for key in ("a", "b")}
    assert embeddings.made(batch) == files
    assert embeddings.made(embeddings.batch(BatchId(2))) == {}


def test_what_is_handed_over_outlives_its_batch(embeddings: Embeddings, batch: Path) -> None:
    request, files = embeddings.request("r"), embeddings.made(batch)
    for file in files.values():
        embeddings.link(file, request)
    assert (request / "a.safetensors").samefile(files["a"]), "no copy is made"
    embeddings.remove(batch)
    assert names(request) == ["a.safetensors", "b.safetensors"]
    assert (request / "a.safetensors").read_text() == "a.safetensors"


def test_those_who_share_it_do_not_depend_on_each_other(
    embeddings: Embeddings, batch: Path, tmp_path: Path
) -> None:
    first, second = (embeddings.request(name) for name in ("r", "s"))
    for request in (first, second):
        embeddings.link(embeddings.made(batch)["a"], request)
    embeddings.remove(batch)
    embeddings.remove(first)
    assert (second / "a.safetensors").read_text() == "a.safetensors"
    embeddings.remove(second)
    assert names(tmp_path) == []


def test_one_that_is_handed_over_again_stays_as_it_was(embeddings: Embeddings, batch: Path) -> None:
    request = embeddings.request("r")
    (request / "a.safetensors").write_text("the first")
    embeddings.link(embeddings.made(batch)["a"], request)
    assert (request / "a.safetensors").read_text() == "the first"


def test_who_still_writes_into_a_removed_folder_finds_none(
    embeddings: Embeddings, batch: Path, tmp_path: Path
) -> None:
    embeddings.remove(batch)
    with pytest.raises(FileNotFoundError):
        (batch / "late.safetensors").touch()
    embeddings.remove(batch)  # harmless
    assert names(tmp_path) == []

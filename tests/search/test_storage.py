import os
import sqlite3
from pathlib import Path

import pytest

from easerve.search.methods.method import method
from easerve.search.objective import Score
from easerve.search.records import Records, read
from easerve.search.space import Configuration
from easerve.search.storage import StorageError, open_storage, path_of
from easerve.search.study import Study
from tests.search.landscapes import Fake, space


def study(path: Path, objective: Fake) -> Study:
    return Study(path, "s", space(), objective, method("grid", space(), 0))


def test_a_path_and_its_url_are_the_same() -> None:
    assert path_of("sqlite:///a/study.db") == path_of("a/study.db") == Path("a/study.db")
    assert path_of("sqlite:////a/study.db") == Path("/a/study.db")
    with pytest.raises(StorageError, match="postgresql://there/x: studies are kept in a file"):
        path_of("postgresql://there/x")


def test_a_study_is_written_by_one_search_and_read_by_anybody(path: Path) -> None:
    class Nested(Fake):
        def score(self, configuration: Configuration, seed: int) -> Score:
            second = study(path, Fake())
            assert [each.state for each in second.trials] == ["running"]
            with pytest.raises(StorageError, match=f"process {os.getpid()} is writing"):
                second.run(5)
            assert len(read(path, "s")[1]) == 1
            return super().score(configuration, seed)

    study(path, Nested()).run(1)
    assert len(study(path, Fake()).run(2)) == 2


def test_two_studies_of_a_database_are_written_at_once(path: Path) -> None:
    class Nested(Fake):
        def score(self, configuration: Configuration, seed: int) -> Score:
            Study(path, "other", space(), Fake(), method("grid", space(), 0)).run(1)
            return super().score(configuration, seed)

    study(path, Nested()).run(1)
    assert len(read(path, "other")[1]) == 1


def test_what_is_no_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no directory .*nowhere"):
        open_storage(tmp_path / "nowhere" / "study.db")
    text = tmp_path / "notes.db"
    text.write_text("this is not a database, whatever its name says\n" * 50)
    with pytest.raises(StorageError, match=r"notes.db: no database of studies"):
        open_storage(text)
    assert "not a database" in text.read_text()


def test_what_cannot_be_written_is_named(path: Path) -> None:
    storage = open_storage(path)
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE studies")
    with pytest.raises(StorageError, match=r"study 's' in .*: no such table: studies$"):
        Records(storage, "s", space(), 0.9)
    Path(f"{path}.7.lock").mkdir()
    with pytest.raises(StorageError, match=r"\.7\.lock: Is a directory"), storage.locked(7):
        pass

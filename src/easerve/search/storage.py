"""Where studies are kept: a SQLite database, as Optuna makes it. One search at a time writes a
study; anybody reads.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

SQLITE = "sqlite:///"
BUSY_S = 60
"""For how long a write waits for another one."""


class StorageError(Exception):
    """The text names the database."""


@dataclass(frozen=True, slots=True)
class Storage:
    """``path``: of the database, None: in memory, for as long as this object lives."""

    optuna: BaseStorage
    path: Path | None

    @property
    def name(self) -> str:
        return str(self.path or "memory")

    @contextmanager
    def locked(self, study_id: int) -> Iterator[None]:
        """No other process writes this study meanwhile; who reads is not kept out. Raises
        StorageError, which names the process that does.
        """
        if self.path is None:
            yield
            return
        path = Path(f"{self.path}.{study_id}.lock")  # is left there: to remove it would race
        try:
            opened = path.open("a+")
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from None
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise StorageError(
                    f"{self.path}: process {file.read().strip()} is writing this study"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield


def path_of(where: str | Path) -> Path:
    """Of a path or a URL, as in ``sqlite:///study.db``. Raises StorageError for other URLs."""
    text = str(where)
    if text.startswith(SQLITE):
        return Path(text.removeprefix(SQLITE))
    if "://" in text:
        raise StorageError(f"{text}: studies are kept in a file: give a path or {SQLITE}PATH")
    return Path(text)


def open_storage(where: str | Path | None) -> Storage:
    """The database is made if there is none. Raises StorageError."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if where is None:
        return Storage(InMemoryStorage(), None)
    path = path_of(where)
    if not path.parent.is_dir():
        raise StorageError(f"{path}: there is no directory {path.parent}")
    arguments = {"connect_args": {"timeout": BUSY_S}}
    try:
        return Storage(RDBStorage(f"{SQLITE}{path}", engine_kwargs=arguments), path)
    except Exception as error:  # of a driver, a schema or a file: whatever it is, it is not ours
        raise StorageError(f"{path}: no database of studies: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """What a database says, without the statement that it was given."""
    return str(getattr(error, "orig", None) or error)

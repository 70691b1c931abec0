"""The embeddings of the open requests: who wants one, who has it, and the files they are.

An encoder writes into the folder of its batch. A request uses the folder of the first batch that
made something for it; what it has from elsewhere is linked into that. A file goes with the last who
has it, a folder with the last who uses it, so that a request depends on no other and keeps nothing
of another. A folder is renamed before it is removed: an engine that still writes finds none, and
leaves nothing behind.
"""

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

from easerve.serve.job import Job
from easerve.types import BatchId, RequestId

Row = TypeVar("Row")
PART = ".part"  # of a file that is not complete


class Embeddings:
    """By the keys of the items. ``root`` holds the folders."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._users: Counter[Path] = Counter()
        self._wanting: dict[str, dict[RequestId, Job]] = {}
        self._files: dict[str, dict[RequestId, Path]] = {}

    # Requests ---------------------------------------------------------------------------------

    def want(self, job: Job, again: bool = False) -> None:
        """Every item: what others have now, what is being encoded when it is there.

        ``again``: it had them and they are lost, so that nobody's are trusted.
        """
        assert job.prompt is not None
        if again:
            self._give_up(job)
        for item in job.prompt.items:
            files = [] if again else [*self._files.get(item.key, {}).values()]
            if not any(self._give(job, item.key, file) for file in files):
                self._wanting.setdefault(item.key, {})[job.request_id] = job

    def wanting(self, key: str) -> Collection[Job]:
        """Who waits for an item."""
        return self._wanting.get(key, {}).values()

    def want_no_more(self, job: Job) -> None:
        """What is being encoded is not for this request any more."""
        _forget(job, self._wanting)

    def close(self, job: Job) -> None:
        """The request has ended."""
        self.want_no_more(job)
        self._give_up(job)

    def folder(self, job: Job) -> Path | None:
        """Where prefill looks, and says what is missing; None for text."""
        if job.folder is None and job.prompt and job.prompt.items:
            job.folder = self._new(job.request_id)
        return job.folder

    # Batches ----------------------------------------------------------------------------------

    def open_batch(self, batch_id: BatchId) -> Path:
        """A new folder for an encoder."""
        return self._new(f"batch-{batch_id}")

    def hand_over(self, keys: Iterable[str], batch: Path) -> None:
        """Give what was made to all who want it, also to those who came meanwhile."""
        made = {path.stem: path for path in batch.iterdir() if path.suffix != PART}
        for key in keys:
            for job in self._wanting.pop(key, {}).values():
                if key in made:
                    self._give(job, key, made[key])

    def close_batch(self, batch: Path) -> None:
        """The encoder is done, or called off."""
        self._leave(batch)

    # Files ------------------------------------------------------------------------------------

    def _give(self, job: Job, key: str, file: Path) -> bool:
        """Whether the file is still there."""
        if job.folder is None:
            job.folder = file.parent
            self._users[file.parent] += 1
        given = job.folder / file.name
        if given != file:
            try:
                os.link(file, given)
            except FileExistsError:
                pass
            except FileNotFoundError:
                return False
        elif not file.exists():
            return False
        self._files.setdefault(key, {})[job.request_id] = given
        return True

    def _give_up(self, job: Job) -> None:
        for key, file in _forget(job, self._files):
            if file not in self._files.get(key, {}).values():
                file.unlink(missing_ok=True)
        if job.folder is not None:
            self._leave(job.folder)
            job.folder = None

    def _new(self, name: str) -> Path:
        path = self._root / name
        path.mkdir(mode=0o700)
        self._users[path] = 1
        return path

    def _leave(self, folder: Path) -> None:
        self._users[folder] -= 1
        if self._users[folder] > 0:
            return
        del self._users[folder]
        gone = folder.with_name(f"{folder.name}.gone")
        with contextlib.suppress(OSError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _forget(job: Job, table: dict[str, dict[RequestId, Row]]) -> list[tuple[str, Row]]:
    """Take what a request has out of a table by key and request."""
    taken = []
    for item in job.prompt.items if job.prompt else ():
        rows = table.get(item.key, {})
        if job.request_id in rows:
            taken.append((item.key, rows.pop(job.request_id)))
        if not rows:
            table.pop(item.key, None)
    return taken

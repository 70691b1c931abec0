"""The embeddings as files: a folder for each batch under way, one for each request that has some.

An encoder writes into the folder of its batch; what it made is linked to everybody who wants it,
so that a request depends on no other. A folder is renamed before it is removed: an engine that
still writes finds no folder, and leaves nothing behind.
"""

import contextlib
import os
import shutil
from pathlib import Path

from easerve.types import BatchId

PART = ".part"  # of a file that is not complete


class Embeddings:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def batch(self, batch_id: BatchId) -> Path:
        """A new folder for a batch."""
        return self._new(f"batch-{batch_id}")

    def request(self, request_id: str) -> Path:
        """A new folder for a request."""
        return self._new(request_id)

    def _new(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(mode=0o700)
        return path

    @staticmethod
    def made(batch: Path) -> dict[str, Path]:
        """The file of each embedding that was made, by key. Prefill says what is missing."""
        return {path.stem: path for path in batch.iterdir() if path.suffix != PART}

    @staticmethod
    def link(file: Path, request: Path) -> Path | None:
        """Hand an embedding over to a request; its file there. None: it is no more."""
        linked = request / file.name
        try:
            os.link(file, linked)
        except FileExistsError:
            return linked
        except FileNotFoundError:
            return None
        return linked

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove a folder and what is in it."""
        gone = folder.with_name(f"{folder.name}.gone")
        with contextlib.suppress(OSError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

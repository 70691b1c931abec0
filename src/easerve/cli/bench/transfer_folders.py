"""Where vLLM's example connector keeps its files: private folders that go with the bench.

They are made and locked as the run folders of deployments are, so that what a killed bench leaves
is swept by the next one.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from easerve.cli.doctor import SHM_ROOT
from easerve.cluster import supervisor
from easerve.config import ConfigError

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class Storage:
    """``disk`` is a folder in ``disk_root``, whose file system is ``file_system``; ``shm`` one in
    memory.
    """

    disk: Path
    shm: Path
    disk_root: Path
    file_system: str

    def empty(self) -> None:
        """Remove all files of the connectors, before the kernel writes them to the disk."""
        for folder in (self.disk, self.shm):
            for entry in folder.iterdir():
                shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def storage(disk_root: Path | None) -> Iterator[Storage]:
    """``disk_root``: a folder to use for the disk; None: one that is on a disk.

    Raises ConfigError where there is none, or it cannot be written.
    """
    root, kind = _on_disk(disk_root)
    with _private(root) as disk, _private(SHM_ROOT) as shm:
        yield Storage(disk, shm, root, kind)


def _on_disk(given: Path | None) -> tuple[Path, str]:
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home(), Path.cwd()]  # noqa: S108
    for root in [given] if given is not None else candidates:
        kind = file_system(root, MOUNTS.read_text().splitlines())
        if kind not in IN_MEMORY and os.access(root, os.W_OK):
            return root, kind
    if given is None:
        raise ConfigError("no folder on a disk was found: name one by --disk")
    raise ConfigError(f"--disk {given}: not a folder on a disk that can be written ({kind})")


def file_system(folder: Path, mounts: Sequence[str]) -> str:
    """The kind of file system that a folder is on, by the lines of /proc/self/mountinfo."""
    path, found, kind = folder.resolve(), Path(), "?"
    for line in mounts:
        mounted, _, described = line.partition(" - ")
        point = Path(_unescaped(mounted.split()[4]))
        # Of two at one point the later one hides the other.
        if path.is_relative_to(point) and len(point.parts) >= len(found.parts):
            found, kind = point, described.split()[0]
    return kind


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)


@contextmanager
def _private(root: Path) -> Iterator[Path]:
    """A folder of ours for the connector's, beside which the lock lies."""
    try:
        supervisor.sweep(root)
        run_dir, lock = supervisor.make_run_dir(root)
    except OSError as error:
        raise ConfigError(f"cannot make a folder in {root}: {error.strerror}") from None
    try:
        folder = run_dir / "embeddings"
        folder.mkdir()
        yield folder
    finally:
        with contextlib.suppress(OSError):
            os.close(lock)
        shutil.rmtree(run_dir, ignore_errors=True)

"""Living with CUDA's Multi-Process Service (MPS), without which two processes take turns on a GPU.

A control daemon listens behind a folder of pipes and starts a server for its user; whoever has the
folder in its environment when CUDA starts in it is a client. What that costs: a fatal fault of one
client (an illegal address, say) ends all clients that use the same GPU, the other engine with it,
and the server lets nobody in until every one of them is gone. Static partitions contain the faults
of SMs from driver 610 on. MPS needs compute capability 7.0 and a Linux host; one user has it at a
time.

Sources: NVIDIA's MPS manual, pages "Legacy MPS v2 Interface" (docs.nvidia.com/deploy/mps/latest/
mpsv2-interface.html), "Common Tasks", section "Using Static SM Partitioning" (common-tasks.html),
and "Environment Variables" (appendix-environment-variables.html).
"""

import errno
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from easerve.engines.partition.sides import DriverError

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
PARTITION = "CUDA_MPS_SM_PARTITION"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
PRIORITY, BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = (VISIBLE, PERCENTAGE, PARTITION)
"""What a daemon of ours may not have in its environment."""
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 (the driver's own)
NUM_CONNECTIONS = 8
"""Hardware queues of a client. MPS gives a client two, and kernels of one queue wait in turn."""
STATIC_FLAGS = frozenset({"-S", "--static-partitioning"})
LONGEST_SOCKET = 107
CONNECT_S = 1.0
ASK_S = 30.0
"""The first command about partitions starts CUDA in the daemon."""


# The daemon --------------------------------------------------------------------------------------


def pipes_of(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder behind which a process with this environment looks for a daemon."""
    return Path(environment.get(PIPES, DEFAULT_PIPES))


def alive(pipes: Path) -> bool:
    """That somebody listens there, whoever may connect, and whatever the socket's type."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(CONNECT_S)
        try:
            client.connect(str(pipes / "control"))
        except OSError as error:
            return error.errno in (errno.EPROTOTYPE, errno.EACCES, errno.EPERM)
        return True


def is_static(pipes: Path, processes: Path = Path("/proc")) -> bool | None:
    """That the daemon there hands out static partitions; None: its process cannot be seen."""
    try:
        pid = int((pipes / f"{CONTROL}.pid").read_text())
        words = (processes / str(pid) / "cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return None
    return bool(STATIC_FLAGS & set(words)) if CONTROL in Path(words[0]).name else None


def command(*, static: bool) -> list[str]:
    """Of a daemon in the foreground. ``static``: for fixed partitions alone (CUDA 13.1)."""
    return [CONTROL, "-f", *(["-S"] if static else [])]


def daemon_environment(environment: Mapping[str, str], pipes: Path, logs: Path) -> dict[str, str]:
    """Of a daemon of our own. It sees every GPU, so that its clients count them as ever.

    Both folders have to exist. Raises DriverError for a path that is too long for a socket.
    """
    if len(os.fsencode(pipes / "control_privileged")) > LONGEST_SOCKET:
        raise DriverError(f"MPS: {pipes} is too long for a socket's path; use a shorter one")
    kept = {name: value for name, value in environment.items() if name not in HIDDEN}
    return {**kept, PIPES: str(pipes), LOGS: str(logs)}


def client_environment(
    environment: Mapping[str, str],
    pipes: Path,
    logs: Path,
    partition: str | None = None,
    *,
    below_normal: bool = False,
) -> dict[str, str]:
    """Of an engine. A percentage of SMs would override a green context's, so there is none.

    ``partition``: the one to be in, where the daemon hands out static ones. ``below_normal``: its
    kernels are scheduled after those of other clients (appendix-environment-variables.html).
    """
    hidden = (PERCENTAGE, PARTITION)
    kept = {name: value for name, value in environment.items() if name not in hidden}
    kept |= {PIPES: str(pipes), LOGS: str(logs), CONNECTIONS: str(NUM_CONNECTIONS)}
    kept |= {PRIORITY: BELOW_NORMAL} if below_normal else {}
    return kept if partition is None else {**kept, PARTITION: partition}


# Static partitions -------------------------------------------------------------------------------


class Free(NamedTuple):
    """What of a GPU is in no partition. The SMs are more than chunks times a chunk's SMs where
    the last partition gets the remainder too.
    """

    chunks: int
    sms: int


class Split(NamedTuple):
    """Names of the two partitions of a GPU, for ``client_environment``."""

    encode: str
    prefill: str


class Control:
    """The daemon behind ``pipes``, asked through ``program``, which reads a command from stdin.

    Raises DriverError where there is no program, no answer, or another than expected.
    """

    def __init__(self, pipes: Path, program: str = CONTROL) -> None:
        self._pipes, self._program = pipes, program

    def ask(self, line: str) -> str:
        try:
            asked = subprocess.run(
                [self._program],
                input=f"{line}\n",
                env={**os.environ, PIPES: str(self._pipes)},
                capture_output=True,
                text=True,
                timeout=ASK_S,
            )
        except FileNotFoundError:
            raise DriverError(
                f"{self._program} is not installed; it comes with the driver's compute utilities"
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DriverError(f"{self._program}: {line}: {error}") from None
        if asked.returncode:
            raise _refused(line, asked.stdout + asked.stderr)
        return asked.stdout

    def free(self, uuid: str) -> Free:
        """Of the GPU with this UUID."""
        table = self.ask("lspart")
        for row in map(str.split, table.splitlines()):
            if len(row) >= 6 and row[1] == "-" and uuid.startswith(row[0]):
                return Free(int(row[2]), int(row[4]))
        raise _refused("lspart", table)

    def add(self, uuid: str, num_chunks: int) -> str:
        """The name of a new partition, which is whole until it is removed or the daemon ends."""
        line = f"sm_partition add {uuid} {num_chunks}"
        answer = self.ask(line)
        if found := re.search(rf"{re.escape(uuid)}/\S+", answer):
            return found[0]
        raise _refused(line, answer)

    def remove(self, partition: str) -> None:
        """One whose clients are gone."""
        uuid, name = partition.split("/", 1)
        self.ask(f"sm_partition rm {uuid} {name}")

    def split(self, uuid: str, encode_sms: int | None = None) -> Split:
        """A GPU that is in no partition yet: about ``encode_sms`` (None: half), and all the rest.

        To be done before any engine starts; nothing of it can be changed while they run.
        """
        free = self.free(uuid)
        if free.chunks < 2:
            raise DriverError(f"MPS: {uuid} has {free.chunks} free chunks of SMs; it takes two")
        share = 0.5 if encode_sms is None else encode_sms / free.sms
        encode = min(max(1, round(free.chunks * share)), free.chunks - 1)
        first = self.add(uuid, encode)
        try:
            return Split(first, self.add(uuid, free.chunks - encode))
        except DriverError:
            self.remove(first)
            raise

    def quit(self) -> None:
        """Once every client is gone. A daemon that was killed instead leaves its server behind."""
        self.ask("quit")


def _refused(line: str, answer: str) -> DriverError:
    said = " ".join(answer.split()) or "nothing"
    return DriverError(
        f"MPS: {line}: the daemon said {said!r}; static partitions take CUDA 13.1 and a daemon "
        "that was started with -S"
    )

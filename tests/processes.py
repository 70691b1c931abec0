"""Small words for tests that start processes: wait with a deadline, and ask whether one lives."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 5.0


def wait_until(
    holds: Callable[[], object], patience_s: float = PATIENCE_S, what: str = "what was waited for"
) -> None:
    """Poll until it holds; fails at the deadline."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen in {patience_s:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

"""Work that waits for one of several lanes, first come, first served, and is never given up."""

from heapq import heapreplace

from easerve.types import NS_PER_S


class Lanes:
    """As many pieces of work at once; a link has one lane."""

    def __init__(self, num: int = 1) -> None:
        self._free_ns = [0] * num

    def take(self, seconds: float, now_ns: int) -> tuple[int, int]:
        """When work that comes now begins and ends (ns)."""
        begin_ns = max(now_ns, self._free_ns[0])
        end_ns = begin_ns + round(seconds * NS_PER_S)
        heapreplace(self._free_ns, end_ns)
        return begin_ns, end_ns

"""Which engine has which embedding, as far as the core was told.

Fed by what encoders pushed, by what engines say they evicted and by their loss. It may be wrong (a
bundle that got lost, an eviction not told yet): then prefill misses the embedding, says so, and it
is encoded again.
"""

from collections.abc import Iterable, Iterator

from easerve.types import WorkerId

MAX_KEYS = 1 << 16  # of one engine; should it never say what it evicts


class Directory:
    """By the keys of items. What an engine got first is forgotten first, beyond ``MAX_KEYS``."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[WorkerId, None]] = {}
        self._keys: dict[WorkerId, dict[str, None]] = {}

    def gained(self, worker_id: WorkerId, key: str) -> None:
        """It was encoded there, or sent there."""
        keys = self._keys.setdefault(worker_id, {})
        keys.pop(key, None)
        keys[key] = None
        self._holders.setdefault(key, {})[worker_id] = None
        if len(keys) > MAX_KEYS:
            self.dropped(worker_id, [next(iter(keys))])

    def dropped(self, worker_id: WorkerId, keys: Iterable[str]) -> None:
        """It is not there any more, or never came."""
        held = self._keys.get(worker_id, {})
        for key in keys:
            if key in held:
                del held[key]
                self._let_go(worker_id, key)

    def lost(self, worker_id: WorkerId) -> None:
        """The engine ended, and all that it had with it."""
        for key in self._keys.pop(worker_id, {}):
            self._let_go(worker_id, key)

    def _let_go(self, worker_id: WorkerId, key: str) -> None:
        holders = self._holders[key]
        del holders[worker_id]
        if not holders:
            del self._holders[key]

    def holds(self, worker_id: WorkerId, key: str) -> bool:
        return worker_id in self._holders.get(key, ())

    def holders(self, key: str) -> Iterator[WorkerId]:
        return iter(self._holders.get(key, ()))

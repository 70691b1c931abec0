"""What a prefill engine keeps of the embeddings that came to it.

Memory comes and goes by the bundle: the bundle that was used least recently goes first, and none
that has an item some request holds. A request holds its items by their keys, there or not. A bundle
is sent for a request that may be seen only later: until then, or for ``fresh_s``, others go first.
What goes and what comes is remembered until it is told.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import Item
from easerve.engines.vllm.ec.transport import DeviceMemory

FRESH_FACTOR = 2  # times the limit, for bundles that nobody has used yet
MAX_NEWS = 1 << 16  # of each kind; older ones are forgotten when nobody asks


class Placed(NamedTuple):
    """An item and the memory of its bundle."""

    memory: Memory | DeviceMemory
    item: Item


class Arrival(NamedTuple):
    """A bundle that came; ``usable_s`` after it was sent."""

    num_items: int
    num_bytes: int
    usable_s: float


@dataclass(eq=False, slots=True)
class _Bundle:
    memory: Memory | DeviceMemory
    keys: dict[str, None]  # of the items that are looked up here
    fresh_until: float


class Store:
    """Holds up to ``max_bytes`` in ``max_bundles``, and more only as far as requests hold them.

    May be called from any thread.
    """

    def __init__(
        self,
        max_bytes: int,
        max_bundles: int,
        fresh_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._max_bundles = max_bytes, max_bundles
        self._fresh_s, self._clock = fresh_s, clock
        self._lock = threading.Lock()
        self._bundles: OrderedDict[_Bundle, None] = OrderedDict()  # least recently used first
        self._items: dict[str, tuple[_Bundle, Item]] = {}
        self._holders: dict[str, set[str]] = {}  # key -> requests
        self._held: dict[str, tuple[str, ...]] = {}  # request -> keys
        self._arrivals: deque[Arrival] = deque(maxlen=MAX_NEWS)
        self._evicted: dict[str, None] = {}
        self.num_bytes = 0

    def add(
        self, memory: Memory | DeviceMemory, items: Sequence[Item], usable_s: float
    ) -> list[Memory | DeviceMemory]:
        """A bundle came; of an item that is there already nothing is kept.

        What had to go for it: to give memory back takes time, so that is the caller's.
        """
        with self._lock:
            self._arrivals.append(Arrival(len(items), memory.num_bytes, usable_s))
            bundle = _Bundle(memory, {}, self._clock() + self._fresh_s)
            for item in items:
                if item.key in self._items:  # somebody wants it all the same
                    there, _ = self._items[item.key]
                    there.fresh_until = bundle.fresh_until
                    if there is not bundle:
                        self._bundles.move_to_end(there)
                    continue
                self._items[item.key] = bundle, item
                bundle.keys[item.key] = None
                self._evicted.pop(item.key, None)
            if bundle.keys:
                self._bundles[bundle] = None
                self.num_bytes += memory.num_bytes
            return self._shrink(newest=bundle)

    def hold(self, request: str, keys: Iterable[str]) -> None:
        """Keep these items, or whatever comes of them, until the request lets go."""
        with self._lock:
            self._held[request] = tuple(keys)
            for key in self._held[request]:
                self._holders.setdefault(key, set()).add(request)
                if key in self._items:
                    bundle, _ = self._items[key]
                    bundle.fresh_until = 0.0
                    self._bundles.move_to_end(bundle)

    def release(self, request: str) -> None:
        with self._lock:
            for key in self._held.pop(request, ()):
                holders = self._holders.get(key, set())
                holders.discard(request)
                if not holders:
                    self._holders.pop(key, None)
            gone = self._shrink()
        del gone  # without the lock

    def get(self, key: str) -> Placed | None:
        with self._lock:
            if key not in self._items:
                return None
            bundle, item = self._items[key]
            return Placed(bundle.memory, item)

    def missing(self, keys: Iterable[str]) -> tuple[str, ...]:
        with self._lock:
            return tuple(key for key in keys if key not in self._items)

    def reject(self, request: str, key: str) -> None:
        """Forget an item that is not what the request takes, unless another one holds it."""
        with self._lock:
            if key in self._items and self._holders.get(key, set()) <= {request}:
                self._forget(key)

    def take_news(self) -> tuple[list[Arrival], list[str]]:
        """The bundles that came and the keys of the items that went since the last call."""
        with self._lock:
            arrivals, self._arrivals = list(self._arrivals), deque(maxlen=MAX_NEWS)
            evicted, self._evicted = list(self._evicted), {}
            return arrivals, evicted

    def _shrink(self, newest: _Bundle | None = None) -> list[Memory | DeviceMemory]:
        """Drop what nobody holds until it fits. What nobody has used yet goes only where there is
        too much of it: its request is on its way.
        """
        gone: list[Memory | DeviceMemory] = []
        now = self._clock()
        for factor in (1, FRESH_FACTOR):
            for bundle in list(self._bundles):
                if not self._is_over(factor):
                    break
                is_held = any(key in self._holders for key in bundle.keys)
                is_fresh = bundle.fresh_until > now
                if bundle is newest or is_held or is_fresh is (factor == 1):
                    continue
                gone.append(bundle.memory)
                for key in list(bundle.keys):
                    self._forget(key)
        return gone

    def _is_over(self, factor: int) -> bool:
        return self.num_bytes > factor * self._max_bytes or len(self._bundles) > self._max_bundles

    def _forget(self, key: str) -> None:
        bundle, _ = self._items.pop(key)
        del bundle.keys[key]
        if not bundle.keys:
            del self._bundles[bundle]
            self.num_bytes -= bundle.memory.num_bytes
        self._evicted[key] = None
        if len(self._evicted) > MAX_NEWS:
            del self._evicted[next(iter(self._evicted))]

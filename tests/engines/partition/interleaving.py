"""Threads that share a memory, interleaved at every load and store, in virtual time.

One runs at a time. At each access a seed says how long it takes, and whoever is next goes on.
Stores sit in a buffer for a while, as on x86-64, and a fence drains it.
"""

import heapq
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from easerve.types import NS_PER_S

MS = NS_PER_S // 1000
SHORT_NS, LONG_NS, VERY_LONG_NS = MS // 20, 5 * MS // 2, 15 * MS
BUFFERED_NS = MS // 2


class Died(BaseException):
    """An actor, between two accesses."""


class Over(BaseException):
    """The run."""


class Memory(Protocol):
    def __getitem__(self, word: int, /) -> int: ...
    def __setitem__(self, word: int, value: int, /) -> None: ...


def _closed() -> threading.Lock:
    """A gate that lets one through each time it is released."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Actor:
    """A thread, and its store buffer."""

    def __init__(self) -> None:
        self.turn = _closed()
        self.stores: deque[tuple[int, int]] = deque()
        self.over = False


class World:
    """``moment`` numbers the loads and stores in their one order; ``on_write`` hears of a word."""

    def __init__(self, seed: int, memory: Memory, on_write: Callable[[int], None]) -> None:
        self.draw = random.Random(seed)
        self.now_ns = NS_PER_S
        self.moment = 0
        self.memory = memory
        self.p_death = 0.0
        self._on_write = on_write
        self._events: list[tuple[int, int, Actor | Callable[[], None]]] = []
        self._num_events = 0
        self._main = _closed()
        self._actors: list[Actor] = []
        self._stopping = False
        self._errors: list[BaseException] = []

    def clock_ns(self) -> int:
        return self.now_ns

    def up_to(self, longest_ns: int) -> int:
        return int(self.draw.random() * longest_ns)

    def at(self, delay_ns: int, what: Actor | Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._num_events, what))

    def sleep(self, me: Actor, delay_ns: int) -> None:
        """Others run meanwhile."""
        wake_ns = self.now_ns + delay_ns
        if wake_ns < self._events[0][0]:
            self.now_ns = wake_ns
        else:
            self.at(delay_ns, me)
            self._next(me)
        if self._stopping:
            raise Over

    # Memory -------------------------------------------------------------------------------------

    def load(self, me: Actor, word: int) -> int:
        self._access(me)
        self.moment += 1
        return self.view(me, word)

    def view(self, me: Actor, word: int) -> int:
        """What a load would give, in no time."""
        for stored, value in reversed(me.stores):
            if stored == word:
                return value
        return self.memory[word]

    def store(self, me: Actor, word: int, value: int) -> None:
        self._access(me)
        chance = self.draw.random()
        if chance < 0.6 and not me.stores:
            self.write(word, value)
        else:
            me.stores.append((word, value))
            self.at(round(chance * BUFFERED_NS), lambda: self._drain_one(me))

    def write(self, word: int, value: int) -> None:
        """For all to see, at once."""
        self.moment += 1
        self.memory[word] = value
        self._on_write(word)

    def drain(self, me: Actor) -> None:
        while me.stores:
            self._drain_one(me)

    def _drain_one(self, me: Actor) -> None:
        if me.stores:
            self.write(*me.stores.popleft())

    def _access(self, me: Actor) -> None:
        """What comes before it: some time, and now and then the end."""
        chance = self.draw.random()
        if chance < self.p_death:
            raise Died
        if chance < 0.45:
            delay_ns = 0
        elif chance < 0.975:
            delay_ns = round((chance - 0.45) * SHORT_NS)
        else:
            longest = LONG_NS if chance < 0.9993 else VERY_LONG_NS
            delay_ns = self.up_to(longest)
        self.sleep(me, delay_ns)

    # Turns --------------------------------------------------------------------------------------

    def run(self, bodies: dict[Actor, Callable[[], None]]) -> None:
        """Until one raises Over; raises what another error was."""
        self._actors = list(bodies)
        threads = [threading.Thread(target=self._live, args=each) for each in bodies.items()]
        for actor, thread in zip(bodies, threads, strict=True):
            self.at(0, actor)
            thread.start()
        self._next(None)
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _live(self, me: Actor, body: Callable[[], None]) -> None:
        sys.settrace(None)  # coverage would take most of the time; what it asks for is not here
        me.turn.acquire()
        try:
            body()
        except Over:
            pass
        except BaseException as error:  # the main thread's to raise
            self._errors.append(error)
        me.over = self._stopping = True
        left = [actor.turn for actor in self._actors if not actor.over]
        (left or [self._main])[0].release()

    def _next(self, me: Actor | None) -> None:
        """Events up to mine, or up to that of another, who goes on."""
        while True:
            self.now_ns, _, what = heapq.heappop(self._events)
            if what is me:
                return
            if isinstance(what, Actor):
                what.turn.release()
                (self._main if me is None else me.turn).acquire()
                return
            what()


class Words:
    """An actor's way to the memory. ``on_load`` and ``on_store`` hear of its words afterwards."""

    def __init__(
        self,
        world: World,
        actor: Actor,
        on_load: Callable[[int], None],
        on_store: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._world, self._actor = world, actor
        self._on_load, self._on_store = on_load, on_store

    def __getitem__(self, word: int) -> int:
        value = self._world.load(self._actor, word)
        self._on_load(word)
        return value

    def __setitem__(self, word: int, value: int) -> None:
        self._world.store(self._actor, word, value)
        self._on_store(word)


class Plain:
    """Words of whoever stores one word at a time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, word: int) -> int:
        return self._world.memory[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._world.write(word, value)


class Fence:
    """A lock that nobody else wants."""

    def __init__(self, world: World, actor: Actor) -> None:
        self._world, self._actor = world, actor

    def __enter__(self) -> None:
        self._world.drain(self._actor)

    def __exit__(self, *_: object) -> None:
        self._world.drain(self._actor)

"""Runs in an encoder's API server, around vLLM's routes: it announces what a request will take.

The demand comes in a header, so that it is known before the body is read and its media are
preprocessed. It is renewed while the request is open, and gone when it is answered, or the client
has left, or this process has ended.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from easerve.engines.partition.cell import Cell, Word
from easerve.engines.partition.setup import division, read_setup
from easerve.engines.partition.sides import LEASE_NS
from easerve.policy.partition import MAX_UNITS, Demand
from easerve.types import NS_PER_S

DEMAND = "x-easerve-demand"
PARTITION = "/easerve/partition"
STANDING = "standing"
STUCK_S = 5.0  # without a forward, or a request that begins or ends: the worker hangs
RENEW_S = LEASE_NS / NS_PER_S / 4
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def header(demand: Demand) -> str:
    """``24``, or ``24 standing``."""
    return f"{demand.units} {STANDING}" if demand.standing else str(demand.units)


def parse(value: str) -> tuple[int, bool]:
    """Units, and whether they are standing. Raises ValueError."""
    number, _, rest = value.partition(" ")
    if not (number.isascii() and number.isdecimal()) or rest not in ("", STANDING):
        raise ValueError(value)
    if (units := int(number)) > MAX_UNITS:
        raise ValueError(value)
    return units, bool(rest)


class Announcer:
    """ASGI middleware, named to vLLM by ``--middleware``."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        setup = read_setup()
        assert setup is not None, "the launcher sets it where it names this class"
        self._app, self._setup = app, setup
        self._cell = Cell(Path(setup.cell))
        self._open: dict[int, int] = {}  # units of each open request
        self._standing = 0
        self._numbers = count()
        self._renewing: asyncio.Task[None] | None = None
        self._moved_s = 0.0  # when a request or a forward last began or ended
        self._publish()  # what one before it, which was killed, had announced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"] if scope["method"] == "POST" else ()
        given = dict(headers).get(DEMAND.encode())
        try:
            demand = None if given is None else parse(given.decode("latin-1"))
        except ValueError:
            await _answer(send, 400, {"error": {"message": f"{DEMAND}: {given!r}", "code": 400}})
            return
        if demand is not None:
            self._standing = demand[0] if demand[1] else 0
        if scope["path"] == PARTITION:
            if demand is not None:
                self._publish()
            await _answer(send, 200, division(self._setup, self._cell))
        elif demand is None:
            await self._app(scope, receive, send)
        else:
            async with self._announced(demand[0]):
                await self._app(scope, receive, send)

    @asynccontextmanager
    async def _announced(self, units: int) -> AsyncIterator[None]:
        number = next(self._numbers)
        self._open[number] = units
        self._moved_s = time.monotonic()
        self._publish()
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            del self._open[number]
            self._moved_s = time.monotonic()
            self._publish()

    def _publish(self) -> None:
        """The most that an open request wants, or what stands. A worker that hangs gets nothing."""
        hangs = time.monotonic() - self._moved_s > STUCK_S
        units = 0 if hangs else max(self._open.values(), default=0)
        if units > self._standing:
            self._cell.announce(units, LEASE_NS, several=len(self._open) > 1)
        else:
            self._cell.announce(self._standing, None)

    async def _renew(self) -> None:
        num_forwards = self._cell.words[Word.ENCODE_FORWARDS]
        try:
            while self._open:
                await asyncio.sleep(RENEW_S)
                if num_forwards != (num_forwards := self._cell.words[Word.ENCODE_FORWARDS]):
                    self._moved_s = time.monotonic()
                self._publish()
        finally:
            self._renewing = None


async def _answer(send: Send, status: int, content: Any) -> None:
    body = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

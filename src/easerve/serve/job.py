"""What is known of one prompt on its way, and what it has to say to its client."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from easerve.engines.protocol import Delta, Media, Prompt, Route
from easerve.serve.errors import ApiError
from easerve.types import RequestId, WorkerId

MAX_UNREAD = 1024  # tokens of an answer that wait for a slow client; then decode's stream waits


@dataclass(slots=True)
class MediaPart:
    """A media part of a request: what the client sent, and where (for error messages).

    ``part`` is the dictionary in the request's body; the canonical media replace its content.
    """

    part: dict[str, Any]
    url: str
    path: str


Output: TypeAlias = tuple[int, Delta] | ApiError | None


class Outputs:
    """What the jobs of a request have to say: pieces, each with its choice, then None or an error.

    Whoever streams asks for room first, so that a client who does not read fills no memory.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._num_unread = 0  # tokens
        self._room = asyncio.Event()
        self._room.set()

    def put(self, output: Output) -> None:
        self._queue.put_nowait(output)
        self._count(output, 1)

    async def room(self) -> None:
        await self._room.wait()

    async def pieces(self, num_jobs: int) -> AsyncIterator[tuple[int, Delta]]:
        """The answer, piece by piece. Raises ApiError when there is none."""
        while num_jobs:
            output = await self._queue.get()
            self._count(output, -1)
            if output is None:
                num_jobs -= 1
            elif isinstance(output, ApiError):
                raise output
            else:
                yield output

    def _count(self, output: Output, sign: int) -> None:
        """Engines put what waits for its reader into one large piece: tokens count, not pieces."""
        if isinstance(output, tuple):
            self._num_unread += sign * (len(output[1].token_ids) or 1)
            if self._num_unread < MAX_UNREAD:
                self._room.set()
            else:
                self._room.clear()


@dataclass(slots=True)
class Job:
    """One prompt on its way. ``timeline``: stamps in seconds since it was received.

    Jobs of one request share ``outputs``; their choices are numbered from ``first_choice`` on.
    """

    request_id: RequestId
    body: dict[str, Any]
    media_parts: list[MediaPart]
    num_bytes: int
    num_choices: int = 1
    route: Route = Route.TEXT
    stream: bool = True
    first_choice: int = 0
    outputs: Outputs = field(default_factory=Outputs)
    media: list[Media] = field(default_factory=list)
    prompt: Prompt | None = None
    folder: Path | None = None
    handles: dict[tuple[int, int], tuple[WorkerId, Mapping[str, Any]]] = field(default_factory=dict)
    """By leg and attempt: the KV cache that waits for decode, and who holds it."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """What runs for each leg now (PREPARATION: for all). A new attempt ends the old one's."""
    error: ApiError | None = None
    withdrawn: bool = False
    received_ns: int = 0
    decoded_bytes: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Of the answer so far, by leg."""
    timeline: dict[str, float] = field(default_factory=dict)

    def count(self, leg: int, delta: Delta) -> None:
        """A piece goes to the client."""
        self.num_tokens[leg] = delta.num_tokens(self.num_tokens.get(leg, 0))

"""What is known of one prompt on its way, and what it has to say to its client."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from easerve.engines.protocol import Delta, Media, Prompt, Route
from easerve.serve.errors import ApiError
from easerve.types import NS_PER_S, RequestId, WorkerId

MAX_UNREAD = 1024  # tokens of an answer that wait for a slow client; then decode's stream waits


@dataclass(slots=True)
class MediaPart:
    """A media part of a request: what the client sent, and where (for error messages).

    ``part`` is the dictionary in the request's body; the canonical media replace its content.
    """

    part: dict[str, Any]
    url: str
    path: str


Piece: TypeAlias = tuple[int, Delta]
Output: TypeAlias = Piece | ApiError | None


class Outputs:
    """What the jobs of a request have to say: pieces, each with its choice, then None or an error.

    Whoever streams asks for room first, so that a client who does not read fills no memory.
    """

    def __init__(self) -> None:
        self._waiting: deque[Output] = deque()
        self._came = asyncio.Event()
        self._num_unread = 0  # tokens
        self._room = asyncio.Event()
        self._room.set()

    def put(self, output: Output) -> None:
        self._waiting.append(output)
        self._came.set()
        self._count(output, 1)

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    async def room(self) -> None:
        await self._room.wait()

    async def batches(self, num_jobs: int, most: int | None = None) -> AsyncIterator[list[Piece]]:
        """The answer, all pieces at once that are there, or at ``most`` so many.

        Raises ApiError when there is no (more) answer.
        """
        while num_jobs:
            await self._came.wait()
            batch: list[Piece] = []
            while self._waiting and len(batch) != most:
                output = self._waiting.popleft()
                self._count(output, -1)
                if output is None:
                    num_jobs -= 1
                elif isinstance(output, ApiError):
                    if batch:
                        yield batch
                    raise output
                else:
                    batch.append(output)
            if not self._waiting:
                self._came.clear()
            if batch:
                yield batch

    async def pieces(self, num_jobs: int) -> AsyncIterator[Piece]:
        """The answer, piece by piece."""
        async for (piece,) in self.batches(num_jobs, 1):
            yield piece

    def _count(self, output: Output, sign: int) -> None:
        """Engines put what waits for its reader into one large piece: tokens count, not pieces."""
        if isinstance(output, tuple):
            self._num_unread += sign * (len(output[1].token_ids) or 1)
            if self._num_unread < MAX_UNREAD:
                self._room.set()
            else:
                self._room.clear()


@dataclass(slots=True)
class Pace:
    """How fast an engine decodes one leg, without the time that it waited for the client.

    ``since_ns``: when its work on the next piece began. ``decode_ns``: its work up to the last one,
    ``first_ns`` up to the first.
    """

    since_ns: int
    decode_ns: int = 0
    first_ns: int | None = None
    num_first: int = 0
    num_tokens: int = 0

    def piece(self, delta: Delta, now_ns: int) -> None:
        """One more piece has come."""
        self.num_tokens = delta.num_tokens(self.num_tokens)
        self.decode_ns += now_ns - self.since_ns
        self.since_ns = now_ns
        if self.first_ns is None:
            self.first_ns, self.num_first = self.decode_ns, self.num_tokens

    def resume(self, now_ns: int) -> None:
        """The client has room for the next piece."""
        self.since_ns = now_ns

    @property
    def decode_s(self) -> float:
        return self.decode_ns / NS_PER_S

    @property
    def tpot_s(self) -> float:
        """After the first piece; of an answer that came in one piece, from the begin on."""
        later = self.num_tokens - self.num_first
        if later > 0 and self.first_ns is not None:
            return (self.decode_ns - self.first_ns) / later / NS_PER_S
        return self.decode_s / max(1, self.num_tokens)


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
    handles: dict[tuple[int, int], tuple[WorkerId, Mapping[str, Any]]] = field(default_factory=dict)
    """By leg and attempt: the KV cache that waits for decode, and who holds it."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """What runs for each leg now (PREPARATION: for all). A new attempt ends the old one's."""
    error: ApiError | None = None
    withdrawn: bool = False
    received_ns: int = 0
    wanting_ns: int = 0
    """When it began to wait for its embeddings."""
    decoded_bytes: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Of the answer so far, by leg."""
    timeline: dict[str, float] = field(default_factory=dict)

    def index(self, key: str) -> int:
        """Of the first item with a key."""
        assert self.prompt is not None
        return [item.key for item in self.prompt.items].index(key)

    def count(self, leg: int, delta: Delta) -> None:
        """A piece goes to the client."""
        self.num_tokens[leg] = delta.num_tokens(self.num_tokens.get(leg, 0))

"""The real HTTP server over fake engines, and short words for what a client does with it."""

import asyncio
import base64
import contextlib
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from easerve.cli.deploy import listen, recipe
from easerve.config import Deployment
from easerve.costs.linear import LinearCosts
from easerve.engines.fake import INSTANT, Fabric, FakeEngine, words
from easerve.policy.core import Core
from easerve.policy.lifecycle import RequestState
from easerve.serve.app import create_app
from easerve.serve.decisions import StepLog
from easerve.serve.driver import Driver
from easerve.serve.media import Picture, prepare
from easerve.serve.metrics import Metrics
from easerve.serve.preparation import PreparationPool
from easerve.types import Stage, WorkerId

MODEL = "fake-model"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_PIXELS = 1_000_000
STAGES = {"e": Stage.ENCODE, "l": Stage.PREFILL, "p": Stage.PREFILL, "d": Stage.DECODE}
ONE_OF_EACH, TWO_OF_EACH = ("e0", "p0", "d0"), ("e0", "e1", "p0", "p1", "d0", "d1")
PATIENCE_S = 5.0
POLL_S = 0.001

Content = str | Sequence[Mapping[str, Any] | str]


async def until(holds: Callable[[], object], what: str = "it") -> None:
    """Wait for a condition; fail when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE_S:g} s"
        await asyncio.sleep(POLL_S)


# Requests and answers -----------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def picture(color: str, size: tuple[int, int] = (4, 3)) -> str:
    """A data URL of a picture of one color."""
    return data_url(encoded(Image.new("RGB", size, color)))


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def pictures(number: int) -> list[str]:
    """So many pictures, no two alike."""
    return [picture(f"#{index + 1:06x}") for index in range(number)]


def ask_about(text: str, *urls: str) -> list[dict[str, Any]]:
    """The content of a message: pictures, then a question."""
    return [*map(image_part, urls), text_part(text)]


def body(content: Content, **parameters: Any) -> dict[str, Any]:
    """A chat request of one message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **parameters}


def key(url: str) -> str:
    return prepare(url, MAX_PIXELS).key


def answer_words(text: str, *urls: str, seed: int | None = None) -> list[str]:
    """What the fake engines say about a text and pictures in this order."""
    return words(" ".join(text.split()), [key(url) for url in urls], seed)


def answer(text: str, *urls: str, seed: int | None = None) -> str:
    return "".join(answer_words(text, *urls, seed=seed))


def answer_of(response: httpx.Response) -> str:
    return answers_of(response)[0]


def answers_of(response: httpx.Response) -> list[str]:
    """The text of every choice, which must be in order."""
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [
        str(choice["message"]["content"] if "message" in choice else choice["text"])
        for choice in choices
    ]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have one, in OpenAI's form."""
    assert response.status_code == status, response.text
    content = response.json()
    assert content.keys() == {"error"}
    error: dict[str, Any] = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@dataclass(slots=True)
class Streamed:
    """A streamed answer: its events, without the ``num_done`` closing ones."""

    status: int
    headers: httpx.Headers
    events: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [event["choices"][0] for event in self.events if event.get("choices")]

    @property
    def text(self) -> str:
        """Of the only choice."""
        (text,) = self.texts or [""]
        return text

    @property
    def texts(self) -> list[str]:
        """Of each choice."""
        texts: dict[int, str] = {}
        for chunk in self.chunks:
            piece = chunk["text"] if "text" in chunk else chunk["delta"].get("content", "")
            texts[chunk["index"]] = texts.get(chunk["index"], "") + piece
        assert sorted(texts) == list(range(len(texts)))
        return [texts[index] for index in sorted(texts)]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.num_done += 1
        elif line:
            assert self.num_done == 0, "nothing follows [DONE]"
            self.events.append(json.loads(line.removeprefix("data: ")))


# The server ---------------------------------------------------------------------------------------


class InlinePreparation(PreparationPool):
    """Decodes in this process: tests start no workers but to test the workers."""

    async def prepare(self, url: str) -> Picture:
        return prepare(url, self._max_pixels, self._options)


class Uvicorn(uvicorn.Server):
    """uvicorn in the test's event loop, without its signal handlers and its naps of 0.1 s."""

    async def start(self) -> str:
        listener = listen("127.0.0.1", 0)
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([listener])
        await self.on_tick(0)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        state = self.server_state
        await until(lambda: not state.connections and not state.tasks, "the end of the server")
        await self.lifespan.shutdown()


class Server:
    """An app, its driver and fake engines.

    ``e0`` encodes, ``l0`` prefills beside it, ``p0`` prefills elsewhere, ``d0`` decodes.
    """

    def __init__(
        self,
        deployment: Deployment,
        engines: Sequence[str] = ONE_OF_EACH,
        costs: LinearCosts = INSTANT,
        preparation: PreparationPool | None = None,
        log: StepLog | None = None,
    ) -> None:
        self._costs = costs
        self.core: Core = recipe(deployment).make_core()
        limits = deployment.limits
        inline = InlinePreparation(limits.preparation_workers, limits.max_image_pixels)
        self.driver = Driver(
            self.core, preparation or inline, Metrics(), int(limits.max_decoded), log
        )
        self.fabric = Fabric()
        self.engines: dict[str, FakeEngine] = {}
        self._names = engines
        app = create_app(deployment, self.driver)
        self._uvicorn = Uvicorn(uvicorn.Config(app, log_config=None, access_log=False))

    async def start(self) -> None:
        for name in self._names:
            self.add(name)
        self.url = await self._uvicorn.start()
        self.client = httpx.AsyncClient(
            base_url=self.url, verify=False, trust_env=False, timeout=PATIENCE_S
        )

    async def stop(self) -> None:
        await self.client.aclose()
        await self._uvicorn.stop()
        await self.driver.close()

    # Engines ----------------------------------------------------------------------------------

    def add(self, name: str, **bounds: Any) -> FakeEngine:
        """``bounds``: num_slots, max_batch_tokens, cache_items, timeout_s."""
        beside = (WorkerId(f"e{name[1:]}"),) if name[0] == "l" else ()
        stage, costs = STAGES[name[0]], self._costs
        engine = FakeEngine(WorkerId(name), stage, self.fabric, costs, beside=beside, **bounds)
        self.engines[name] = engine
        self.driver.add_engine(engine)
        return engine

    def lose(self, name: str) -> None:
        self.engines[name].dead = True
        self.fabric.stores.pop(WorkerId(name), None)
        self.driver.lose_engine(WorkerId(name))

    def hold(self, call: str, permits: int = 0) -> None:
        """Let so many calls of a kind (tokens of decode) pass on each engine, and no more."""
        for engine in self.engines.values():
            engine.permits[call] = asyncio.Semaphore(permits)

    def release(self) -> None:
        """What is held goes on, and nothing is held any more."""
        for engine in self.engines.values():
            for permits in engine.permits.values():
                for _ in range(1000):
                    permits.release()
            engine.permits.clear()

    def num_calls(self, call: str) -> int:
        return sum(engine.calls[call] for engine in self.engines.values())

    @property
    def encode_calls(self) -> list[int]:
        """Items of each call to the encoders, one encoder after the other."""
        return [number for engine in self.engines.values() for number in engine.encode_calls]

    @property
    def num_preparing(self) -> int:
        requests = self.core._requests.values()
        return sum(request.state is RequestState.PREPARING for request in requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for embeddings, whether their pictures are being encoded or not."""
        entries = self.core._encoding._entries.values()
        return len({request.request_id for entry in entries for request, _ in entry.waiters})

    async def working(self, call: str) -> str:
        """Wait until an engine works on a call of this kind; its name."""

        def names() -> list[str]:
            return [
                name for name, each in self.engines.items() if each.calls[call] and each.running
            ]

        await until(names, f"a call of {call}")
        return names()[0]

    # Clients ----------------------------------------------------------------------------------

    async def post(self, content: Any, **headers: str) -> httpx.Response:
        return await self.client.post(CHAT, json=content, headers=headers)

    async def ask(self, content: Content, **parameters: Any) -> httpx.Response:
        return await self.post(body(content, **parameters))

    async def stream(self, content: Content, **parameters: Any) -> Streamed:
        return await self.stream_body(body(content, **parameters))

    async def complete(self, prompt: Any, **parameters: Any) -> httpx.Response:
        request = {"model": MODEL, "prompt": prompt, **parameters}
        return await self.client.post(COMPLETIONS, json=request)

    async def stream_completion(self, prompt: Any, **parameters: Any) -> Streamed:
        request = {"model": MODEL, "prompt": prompt, **parameters}
        return await self.stream_body(request, COMPLETIONS)

    async def stream_body(self, request: dict[str, Any], path: str = CHAT) -> Streamed:
        async with self.client.stream("POST", path, json=request | {"stream": True}) as response:
            streamed = Streamed(response.status_code, response.headers)
            async for line in response.aiter_lines():
                streamed.take(line)
        return streamed

    async def connect(self, request: dict[str, Any], path: str = CHAT) -> "Client":
        """A client that has sent its request on a connection of its own."""
        host, port = self.url.removeprefix("http://").split(":")
        client = Client(*await asyncio.open_connection(host, int(port)))
        content = json.dumps(request).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        client.writer.write(head.encode() + content)
        await client.writer.drain()
        return client

    def open_connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    # What is left -----------------------------------------------------------------------------

    def leftovers(self) -> dict[str, object]:
        """Everything that is held for requests."""
        held = {
            "open requests": self.core.num_open,
            "queued": sum(self.core.queue_lengths().values()),
            "backlog": sum(worker.backlog_tokens for worker in self.core.pool),
            "jobs": len(self.driver._jobs),
            "batches": len(self.driver._batches),
            "decoded": self.driver._decoded_bytes,
            "items": len(self.core._encoding._entries),
            "batches of the core": len(self.core._encoding._batches),
            "work": sum(len(worker.work) + len(worker.running) for worker in self.core.pool),
            "at the gate": len(self.core._flow.gate._waiting),
            "past the gate": self.core._flow.gate.num_passed,
            "tasks": sum(map(len, self.driver._calls.values())),
            "rendering": sum(self.driver._rendering.values()),
            "running": sum(engine.running for engine in self.engines.values()),
        }
        return {name: value for name, value in held.items() if value}

    async def idle(self) -> None:
        """Wait until nothing is held for any request."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.leftovers():
            assert time.monotonic() < deadline, left
            await asyncio.sleep(POLL_S)
        assert self.core.next_deadline() is None
        assert max(self.fabric.uses.values(), default=0) <= 1, "a KV handle is used once"


async def metrics_of(server: Server) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@dataclass(slots=True)
class Client:
    """The client's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def leave(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

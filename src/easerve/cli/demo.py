"""``easerve demo``: a picture drawn just now, a question, an answer through E, P and D."""

import asyncio
import json
import math
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from easerve.cli.deploy import Service, service, stop_signals
from easerve.cli.progress import StartProgress
from easerve.cluster.local import EngineStartError
from easerve.config import ConfigError, Deployment, build, merge, read_file
from easerve.engines.protocol import EngineError
from easerve.types import Stage
from easerve.workload import shapes

# Next to the package in a checkout: the model's weights are not part of the wheel.
DEFAULT_DEPLOYMENT = Path(__file__).parents[3] / "examples/tiny-llava.yaml"
# The three engines of a demo share the first GPU.
_SHARE = {"devices": [[0]], "gpu_memory_utilization": 0.25}
ONE_GPU: dict[str, Any] = {
    "device": "cuda",
    "engine": {"fork_server": None},
    "local_prefill": None,
    "policy": {"remote_share": 1},
    **{stage.value: _SHARE for stage in Stage},
}
KV_TRANSFER = re.compile(r"^vllm:nixl_xfer_time_seconds_sum(?:\{.*\})? (\S+)$", re.MULTILINE)
PREVIEW_COLUMNS = 30
TIMELINE = {
    "prepare": "check the picture, render the prompt",
    "encode_wait": "waiting for an encode batch",
    "encode": "picture to embeddings (E)",
    "transfer": "embeddings pushed from E to P",
    "prefill": "prompt to KV cache, first token (P)",
    "kv_transfer": "KV cache pulled by D",
    "decode": "all tokens (D)",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "total": "request",
}


def run(path: Path | None, seed: int | None, device: str | None, as_json: bool) -> int:
    """The exit code: 0 when there was an answer."""
    if path is None and not DEFAULT_DEPLOYMENT.exists():
        raise ConfigError("the demo's model comes with the repository: run it from a checkout")
    path = path or DEFAULT_DEPLOYMENT
    content = merge(read_file(path), {"server": {"port": 0, "host": "127.0.0.1"}})
    if device is not None:
        content = merge(content, ONE_GPU if device == "cuda" else {"device": device})
    deployment = build(content, str(path))
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    try:
        result = uvloop.run(_demo(deployment, seed, Console(stderr=as_json)))
    except (EngineStartError, EngineError) as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    if result is None:
        print("easerve: ended before there was an answer", file=sys.stderr)
        return 130
    if as_json:
        print(json.dumps(result))
    return 0


async def _demo(deployment: Deployment, seed: int, console: Console) -> dict[str, Any] | None:
    main = asyncio.current_task()
    assert main is not None
    rng = random.Random(seed)  # noqa: S311 (a picture, not a secret)
    scene = shapes.draw(rng)
    _, question, expected = rng.choice(shapes.questions(scene, rng))

    def stop() -> None:
        if not main.cancelling():
            main.cancel()

    with stop_signals(stop):
        try:
            with StartProgress(console) as progress:
                async with service(deployment, progress, lambda *_: None) as running:
                    progress.close()
                    ready_s = progress.elapsed_s
                    picture = _save(scene.picture)
                    console.print(f"engines ready in {ready_s:.1f} s\n")
                    console.print(f"picture: {picture} (seed {seed})", soft_wrap=True)
                    console.print(render(scene.picture, console.color_system is not None))
                    console.print(f"question: {question}")
                    other = shapes.draw(rng).picture  # an embedding is not made twice
                    await _ask(running, other, question)  # a first call warms every path
                    answer, timeline = await _ask(running, scene.picture, question)
                    console.print(f"answer:   [bold]{answer}[/bold]")
                    correct = answer == expected
                    verdict = (
                        "[green]true[/green]" if correct else f"[red]not true[/red]: {expected}"
                    )
                    console.print(f"          {verdict}\n")
                    console.print(table(timeline))
        except asyncio.CancelledError:
            return None
    return {
        "answer": answer,
        "expected": expected,
        "correct": correct,
        "question": question,
        "picture": picture,
        "seed": seed,
        "timeline_s": timeline,
        "ready_s": ready_s,
        "model": deployment.name,
    }


def _save(picture: Image.Image) -> str:
    """The path of a new file that stays."""
    with tempfile.NamedTemporaryFile(prefix="easerve-demo-", suffix=".png", delete=False) as file:
        picture.save(file)
    return file.name


async def _ask(
    running: Service, picture: Image.Image, question: str
) -> tuple[str, dict[str, float]]:
    """The answer over HTTP, streamed, and the stages' seconds."""
    content = [
        {"type": "image_url", "image_url": {"url": shapes.data_url(picture)}},
        {"type": "text", "text": question},
    ]
    body = {
        "model": running.deployment.name,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "stream": True,
    }
    key = running.deployment.server.api_key
    headers = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    before = await _kv_transfer_s(running)
    text = ""
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{running.address}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise EngineError(f"the server answered {response.status}: {await response.text()}")
        request_id = response.headers.get("x-request-id", "")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise EngineError(event["error"]["message"])
                text += event["choices"][0]["delta"]["content"]
    timeline = running.driver.timelines[request_id]
    moved = await _kv_transfer_s(running) - before
    seen = {**timeline, "kv_transfer": moved, "total": timeline["end"]}
    return text.strip(), {name: seen[name] for name in TIMELINE if name in seen}


async def _kv_transfer_s(running: Service) -> float:
    """Seconds that the decode engines have spent pulling KV caches, from their own metrics."""
    total = 0.0
    for engine in running.driver.engines():
        if engine.stage is Stage.DECODE:
            total += sum(float(value) for value in KV_TRANSFER.findall(await engine.metrics()))
    return total


def render(picture: Image.Image, coloured: bool) -> Text:
    """A small rendering for the terminal: two pixels per character, or a letter per colour."""
    small = picture.resize((PREVIEW_COLUMNS, PREVIEW_COLUMNS), Image.Resampling.BOX)
    text = Text()
    for y in range(0, PREVIEW_COLUMNS, 2):
        for x in range(PREVIEW_COLUMNS):
            top, bottom = _pixel(small, x, y), _pixel(small, x, y + 1)
            if coloured:
                text.append("▀", "#{:02x}{:02x}{:02x} on #{:02x}{:02x}{:02x}".format(*top, *bottom))
            else:
                text.append(_letter(top))
        text.append("\n")
    return text


def _pixel(picture: Image.Image, x: int, y: int) -> tuple[int, int, int]:
    red, green, blue = picture.getpixel((x, y))  # type: ignore[misc]
    return int(red), int(green), int(blue)


def _letter(pixel: tuple[int, int, int]) -> str:
    """The initial of the nearest colour; a dot for the background."""
    known = {".": (240, 240, 240)} | {name[0]: rgb for name, rgb in shapes.COLOURS.items()}
    return min(known, key=lambda letter: math.dist(known[letter], pixel))


def table(timeline: dict[str, float]) -> Table:
    """The timeline for people."""
    shown = Table(title="timeline of the second call (the first one warms the engines)")
    for name, justify in (("stage", "left"), ("ms", "right"), ("what it is", "left")):
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, seconds in timeline.items():
        shown.add_row(name, f"{1e3 * seconds:.1f}", TIMELINE[name])
    return shown

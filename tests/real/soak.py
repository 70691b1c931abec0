"""Load on a server with offload, for as long as asked: ``python -m tests.real.soak --minutes 30``.

Rounds of 600 requests about 250 pictures, 16 in flight, a prefill of which runs beside the encoder
or on the prefill engine. Nothing may fail, each answer must be that of Hugging Face (some are
asked for, the others have to be the same in every round), and in the second half of the time no
open files or shared memory may be gained, nor more memory than vLLM's prefill engine gains by
itself. (The first half is for what fills once: caches of embeddings, KV blocks, allocators.)
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from easerve.workload import shapes

from .conftest import ROOT, RealServer, descendants, golden, servers
from .requests import picture_part, text_part, user

OFFLOAD = ROOT / "examples/tiny-llava-offload.yaml"
MAX_TOKENS = 24
IN_FLIGHT = 16
NUM_PICTURES, NUM_REQUESTS, NUM_GOLDEN = 250, 600, 30
MIN_ROUNDS = 4
OWN = ("Pss_Anon:", "Pss_Shmem:")  # not the files that others map as well
MEMORY_SLACK, FILES_SLACK = 0.03, 16
BYTES_PER_REQUEST = 4096  # it gains about 2 kB, of texts as well; an embedding has 12.8 kB


def questions(number: int, seed: int) -> list[list[dict[str, Any]]]:
    """The messages of so many requests, each about a picture of its own."""
    rng, asked = random.Random(seed), []
    for _ in range(number):
        scene = shapes.draw(rng)
        question = rng.choice(shapes.questions(scene, rng))
        asked.append([user([picture_part(scene.picture), text_part(question.text)])])
    return asked


@dataclass
class Answers:
    """Token ids by the number of the question; what went wrong, in words."""

    tokens: defaultdict[int, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))
    failures: list[str] = field(default_factory=list)

    @property
    def unequal(self) -> list[int]:
        """Questions that were not always answered the same."""
        return [number for number, seen in self.tokens.items() if len(seen) > 1]

    def wrong(self, expected: Sequence[Sequence[int]]) -> list[int]:
        """Of the first questions, those whose answer is another one."""
        return [n for n, right in enumerate(expected) if self.tokens[n] - {tuple(right)}]


async def ask(
    url: str, asked: Sequence[list[dict[str, Any]]], order: Sequence[int], answers: Answers
) -> None:
    """Ask the questions in this order, ``IN_FLIGHT`` at a time."""
    numbers = iter(order)

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            body = {
                "model": "tiny-llava",
                "messages": asked[number],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            }
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    answers.failures.append(f"{response.status} {await response.text()}")
                    continue
                choice = (await response.json())["choices"][0]
                answers.tokens[number].add(tuple(choice["token_ids"]))

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(IN_FLIGHT)))


@dataclass(frozen=True)
class Footprint:
    """Of a server and all its processes. ``memory``: in bytes; what they share counts once."""

    memory: int
    num_files: int
    shared: frozenset[str]


def footprint(server: RealServer) -> Footprint:
    pids = descendants(server.process.pid) | {server.process.pid}
    memory = num_files = 0
    for pid in pids:
        with suppress(OSError):  # it may just have ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            memory += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(OWN))
            num_files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Footprint(memory, num_files, frozenset(path.name for path in Path("/dev/shm").iterdir()))


def growth(before: Footprint, after: Footprint, num_requests: int) -> list[str]:
    """What is more than it was so many requests ago, in words."""
    found = []
    allowed = before.memory * MEMORY_SLACK + num_requests * BYTES_PER_REQUEST
    if after.memory > before.memory + allowed:
        found.append(f"memory {before.memory >> 20} -> {after.memory >> 20} MiB")
    if after.num_files > before.num_files + FILES_SLACK:
        found.append(f"open files {before.num_files} -> {after.num_files}")
    if more := after.shared - before.shared:
        found.append(f"in /dev/shm: {sorted(more)}")
    return found


def soak(server: RealServer, minutes: float) -> list[str]:
    """What was wrong; a line is printed for every round."""
    asked, answers, rng = questions(NUM_PICTURES, seed=1), Answers(), random.Random(2)
    right = [each["answer"] for each in golden(asked[:NUM_GOLDEN])]
    number, start = 0, time.monotonic()
    while number < MIN_ROUNDS or time.monotonic() < start + 60 * minutes:
        number += 1
        order = [*range(NUM_PICTURES), *rng.choices(range(NUM_PICTURES), k=NUM_REQUESTS)]
        order = order[:NUM_REQUESTS]
        rng.shuffle(order)
        begin = time.monotonic()
        asyncio.run(ask(server.url, asked, order, answers))
        seconds, now = time.monotonic() - begin, footprint(server)
        if number <= MIN_ROUNDS // 2 or time.monotonic() < start + 60 * minutes / 2:
            base, base_number = now, number
        print(
            f"round {number}: {NUM_REQUESTS / seconds:.1f} requests/s, "
            f"{len(answers.failures)} failed, memory {now.memory >> 20} MiB, "
            f"{now.num_files} open files, {len(now.shared)} entries in /dev/shm",
            flush=True,
        )
    wrong = growth(base, now, (number - base_number) * NUM_REQUESTS)
    wrong += [f"unequal answers: {answers.unequal}"] if answers.unequal else []
    wrong += [f"wrong answers: {answers.wrong(right)}"] if answers.wrong(right) else []
    return wrong + answers.failures[:5]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    with servers() as start:
        server = start("--port", "0", source=OFFLOAD).wait_ready()
        wrong = soak(server, minutes)
        code = server.stop()
    print(json.dumps({"wrong": wrong, "exit_code": code}))
    return 1 if wrong or code else 0


if __name__ == "__main__":
    sys.exit(main())

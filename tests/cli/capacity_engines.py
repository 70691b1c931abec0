"""Stand-ins for the engines whose capacity is measured: each does one call at a time, in a time of
its own. ``python -m tests.cli.capacity_engines FILE`` measures them slowly, for who kills it.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from easerve.cli import profile_capacity as capacity
from easerve.cli import profile_capacity_bench as bench
from easerve.cli.profile_capacity_bench import Workload
from easerve.cli.profile_capacity_sets import sets_of
from easerve.config import Deployment
from easerve.engines.protocol import Delta, EncodeCall, Encoded, Engine, Prefilled, Prompt
from easerve.search.capacity import Key
from easerve.types import MediaItem, Modality, Stage, WorkerId

PLACEHOLDER, ITEM_TOKENS, FRAME_TOKENS = 3, 25, 2
CALL_S, ITEM_S, STEP_S = 0.002, 0.0005, 0.001
WORKLOAD = Workload(1, (60, 60), 24, 4)
KEY = Key("A CPU, 4 cores", "tiny", "1", str(WORKLOAD))
KV_TOKENS = 2000


@dataclass
class StandIn:
    """``spans``: begin and end of each call of its stage, by the loop's clock. ``slow``: how many
    times as long all takes. ``handles``: KV caches that prefill holds.
    """

    stage: Stage
    handles: set[int]
    slow: float = 1.0
    max_batch_tokens: int = 400
    num_slots: int = 16
    keys: list[str] = field(default_factory=list)
    texts: list[tuple[int, ...]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _numbers: "count[int]" = field(default_factory=count)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(f"{self.stage}-0")

    async def metrics(self) -> str:
        blocks = KV_TOKENS // 16
        return f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        (part,) = body["messages"][0]["content"]
        if part["type"] == "text":
            return Prompt([7, 8, 9, 10, 11, 12, 13], {})
        item = MediaItem(part["uuid"], Modality.IMAGE, ITEM_TOKENS)
        tokens = [1, *[PLACEHOLDER] * ITEM_TOKENS, 2]
        return Prompt(tokens, {}, items=(item,), placeholders=(PLACEHOLDER,))

    async def encode(self, calls: Sequence[EncodeCall]) -> Encoded:
        self.keys += [call.media.key for call in calls]
        await self._take(CALL_S + ITEM_S * len(calls))
        return Encoded()

    async def prefill(self, prompt: Prompt, coming: Collection[int]) -> Prefilled:
        self.texts.append(tuple(prompt.token_ids))
        await self._take(CALL_S)
        if prompt.max_new_tokens == 1:
            return Prefilled(answer=Delta("", (1,), "length"))
        number = next(self._numbers)
        self.handles.add(number)
        return Prefilled(handle={"number": number})

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        self.handles.remove(handle["number"])  # used once
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        begin = asyncio.get_running_loop().time()
        for _ in range(prompt.max_new_tokens):
            await asyncio.sleep(self.slow * STEP_S)
            yield Delta("", (1,))
        self.spans.append((begin, asyncio.get_running_loop().time()))
        self._now -= 1

    async def release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        self.handles.remove(handle["number"])

    async def _take(self, seconds: float) -> None:
        async with self._turn:
            begin = asyncio.get_running_loop().time()
            await asyncio.sleep(self.slow * seconds)
            self.spans.append((begin, asyncio.get_running_loop().time()))


@dataclass
class Starter:
    """Notes which deployments were started, and with what engines."""

    slow: float = 1.0
    change: Callable[[dict[Stage, StandIn]], None] = lambda engines: None
    max_model_len: int = 1024
    deployments: list[Deployment] = field(default_factory=list)
    engines: list[dict[Stage, StandIn]] = field(default_factory=list)

    @asynccontextmanager
    async def __call__(
        self, deployment: Deployment, progress: object
    ) -> AsyncIterator[capacity.Running]:
        handles: set[int] = set()
        made = {stage: StandIn(stage, handles, self.slow) for stage in Stage}
        self.change(made)
        self.deployments.append(deployment)
        self.engines.append(made)
        yield capacity.Running(cast(dict[Stage, Engine], made), self.max_model_len)


def plan(
    file: Path,
    deployment: Deployment | None = None,
    batches: Sequence[int] = (1, 4),
    sizes: Sequence[int] | None = None,
    num_gpus: int = 0,
    workload: Workload = WORKLOAD,
    fresh: bool = False,
) -> capacity.Plan:
    sets = sets_of(deployment or on_cpu(), batches, sizes, num_gpus)
    return capacity.Plan(workload, sets, KEY, file, fresh)


def on_cpu() -> Deployment:
    return Deployment.model_validate(
        {"model": "a/b", "prefill": {"max_num_seqs": 4}, "decode": {"max_num_seqs": 4}}
    )


def main() -> None:
    bench.UNDER_LOAD_S = 0.02
    asyncio.run(capacity.measure(plan(Path(sys.argv[1])), Console(stderr=True), Starter(slow=5)))


if __name__ == "__main__":
    main()

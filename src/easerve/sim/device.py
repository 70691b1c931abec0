"""A GPU with SMs that are divided between an encoder and prefill, in virtual time.

All of it is an estimate of an H200, by its data sheet and what others have published; nothing was
measured on one. The encoder is ViT-L/14-336, prefill a layer of an 8B Llama; both are lists of
matrix products, each cut into tiles. SMs work through tiles in waves, so latency falls by steps
as 1/SMs, and stops falling where a product has fewer tiles than there are SMs.

What they do to each other is in three assumptions: ``Sharing`` of SMs that are in both parts, the
more important the more a rule shares; a step that began keeps its part; ``crowding``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from easerve.engines.partition.gpu import (
    CHUNK_TOKENS,
    VIT_HEADS,
    VIT_LAYERS,
    VIT_TOKENS,
    VIT_WIDTH,
)
from easerve.policy.partition import Layout
from easerve.types import NS_PER_S, Stage

NUM_SMS = 132
GRANULE = 8
"""SMs; smallest part of a compute capability of 9.0 (cuda.h, CUDA 13.0)."""


class Sharing(Enum):
    """Of SMs that are in the parts of both."""

    SLICES = "half of their time for each"
    """Processes without MPS. The kindest to an encoder that has many short kernels."""
    ORDER = "kernels in the order in which they come"
    """With MPS: a kernel's tiles are dispatched when those of the one before are. So each kernel
    of the encoder waits for one of prefill."""
    PRIORITY = "the encoder's kernels first"
    """No preemption: each waits until a tile of prefill ends, on average half of one."""


EQUAL = (Sharing.SLICES, Sharing.ORDER)
"""Without priorities, one of these holds; which, only a GPU can say."""


@dataclass(frozen=True, slots=True)
class Model:
    """Of each figure, where it comes from.

    ``sm_flops_per_s``: sustained in bf16, 48 % of the data sheet's 989e12 over 132 SMs, as large
    products reach beside all else in a model. ``kernel_s``: start and end of a kernel; a guess.
    ``launch_s`` by ``num_launches``: the host's time for a forward that runs eagerly, which bounds
    small batches; a guess, of the order of PyTorch's launches. ``crowding``: how much longer each
    takes beside the other for want of bandwidth; half of what the start-up probe lets pass.
    ``switch_s``: of the host, to another stream; a guess. ``noise``: standard deviation of a
    duration; a guess. ``sharing``: see there.
    """

    sm_flops_per_s: float = 3.6e12
    kernel_s: float = 2e-6
    launch_s: float = 8e-6
    num_launches: int = 300
    crowding: float = 0.075
    switch_s: float = 5e-6
    noise: float = 0.03
    sharing: Sharing = Sharing.ORDER


class Product(NamedTuple):
    """``num`` products of (rows, depth) and (depth, columns) in one kernel."""

    rows: int
    columns: int
    depth: int
    num: int = 1


class Tile(NamedTuple):
    """``efficiency``: small tiles reload their operands more often (an estimate)."""

    rows: int
    columns: int
    efficiency: float


TILES = (Tile(128, 256, 1.0), Tile(128, 128, 0.9), Tile(64, 64, 0.6))
ROUNDING = 1e-9


@lru_cache(None)
def vit_layer(batch: int) -> tuple[Product, ...]:
    """Query, key and value; scores and their sum; output; the two of the MLP."""
    rows, width = batch * VIT_TOKENS, VIT_WIDTH
    head = VIT_WIDTH // VIT_HEADS
    return (
        Product(rows, 3 * width, width),
        Product(VIT_TOKENS, VIT_TOKENS, 2 * head, batch * VIT_HEADS),
        Product(rows, width, width),
        Product(rows, 4 * width, width),
        Product(rows, width, 4 * width),
    )


NUM_VIT_KERNELS = VIT_LAYERS * len(vit_layer(1))
LLAMA_LAYER = (
    Product(CHUNK_TOKENS, 6144, 4096),
    Product(CHUNK_TOKENS, CHUNK_TOKENS // 2, 256, 32),  # causal: half of the scores
    Product(CHUNK_TOKENS, 4096, 4096),
    Product(CHUNK_TOKENS, 28672, 4096),
    Product(CHUNK_TOKENS, 4096, 14336),
)


@lru_cache(None)
def layer_s(model: Model, products: tuple[Product, ...], sms: int) -> float:
    """Seconds of one product after another on so many SMs."""
    return sum(kernel(model, product, sms)[0] for product in products)


def kernel(model: Model, product: Product, sms: int) -> tuple[float, float]:
    """Seconds of it and of one of its tiles, of those that suit best, as a library chooses."""
    return min(_waves(model, product, tile, sms) for tile in TILES)


def _waves(model: Model, product: Product, tile: Tile, sms: int) -> tuple[float, float]:
    tiles = ceil(product.rows / tile.rows) * ceil(product.columns / tile.columns)
    flops = 2 * tile.rows * tile.columns * product.depth
    tile_s = flops / (model.sm_flops_per_s * tile.efficiency)
    return model.kernel_s + ceil(tiles * product.num / sms) * tile_s, tile_s


@dataclass(slots=True)
class Job:
    """Submitted work: ``units`` of the part that it was submitted to, and how much is left of 1."""

    size: int
    units: int
    noise: float
    left: float = 1.0


class SimulatedDevice:
    """``Device`` of engines.partition.sweep."""

    name = "simulated"
    item_tokens = VIT_TOKENS

    def __init__(self, seed: int, model: Model | None = None) -> None:
        self.layout = Layout(NUM_SMS, GRANULE)
        self.levels: Sequence[int] = self.layout.parts
        self._rng = random.Random(seed)  # noqa: S311
        self._model = model or Model()
        shared = self._model.sharing.value
        self.source = f"simulated, {NUM_SMS} SMs, estimates (shared SMs: {shared})"
        self._now_ns = 0
        self._units = dict.fromkeys(Stage, 0)
        self._running: dict[Stage, Job] = {}
        self._sharing = self._model.sharing

    def close(self) -> None:
        pass

    def now_ns(self) -> int:
        return self._now_ns

    def confine(self, stage: Stage, units: int) -> None:
        """What runs stays where it is."""
        self._units[stage] = units
        self._pass(self._model.switch_s)

    def prefer_encode(self, preferred: bool) -> None:
        self._sharing = Sharing.PRIORITY if preferred else self._model.sharing

    def encode(self, batch: int) -> Callable[[], bool]:
        return self._submit(Stage.ENCODE, batch)

    def prefill(self, chunks: int) -> Callable[[], bool]:
        return self._submit(Stage.PREFILL, chunks)

    def wait(self, seconds: float) -> None:
        ends_s = (job.left * self._whole_s(stage) for stage, job in self._running.items())
        self._pass(min((seconds, *ends_s)))

    # Alone --------------------------------------------------------------------------------------

    def encode_s(self, batch: int, sms: int) -> float:
        """Of a forward on so many SMs beside which nothing runs."""
        return max(self._encode_busy_s(batch, sms), self._launches_s)

    def prefill_s(self, chunks: int, sms: int) -> float:
        return chunks * layer_s(self._model, LLAMA_LAYER, sms)

    def _encode_busy_s(self, batch: int, sms: int) -> float:
        """Without what it waits for the host."""
        return VIT_LAYERS * layer_s(self._model, vit_layer(batch), sms)

    @property
    def _launches_s(self) -> float:
        return self._model.num_launches * self._model.launch_s

    # Together -----------------------------------------------------------------------------------

    def _submit(self, stage: Stage, size: int) -> Callable[[], bool]:
        assert stage not in self._running, f"one {stage} at a time"
        noise = max(0.5, self._rng.gauss(1, self._model.noise))
        job = Job(size, self._units[stage], noise)
        self._running[stage] = job
        return lambda: job.left <= 0

    def _pass(self, seconds: float) -> None:
        """Nobody starts meanwhile; whoever is done first frees what the other shared with it."""
        while self._running and seconds > 0:
            whole_s = {stage: self._whole_s(stage) for stage in self._running}
            ends_s = (job.left * whole_s[stage] for stage, job in self._running.items())
            step_s = min((seconds, *ends_s))
            for stage, job in list(self._running.items()):
                job.left -= step_s / whole_s[stage]
                if job.left < ROUNDING:
                    job.left = 0.0
                    del self._running[stage]
            seconds -= step_s
            self._now_ns += ceil(step_s * NS_PER_S)
        self._now_ns += ceil(max(0.0, seconds) * NS_PER_S)

    def _whole_s(self, stage: Stage) -> float:
        """What all of the stage's work would take, were it to run as it does now."""
        job = self._running[stage]
        if len(self._running) == 1:
            return job.noise * self._alone_s(stage, job.size, self._sms(stage, job))
        encode, prefill = self._running[Stage.ENCODE], self._running[Stage.PREFILL]
        whole_s = self._together(encode, prefill)[stage is Stage.PREFILL]
        return job.noise * (1 + self._model.crowding) * whole_s

    def _alone_s(self, stage: Stage, size: int, sms: int) -> float:
        return (self.encode_s if stage is Stage.ENCODE else self.prefill_s)(size, sms)

    def _sms(self, stage: Stage, job: Job) -> int:
        if stage is Stage.ENCODE:
            return job.units or NUM_SMS
        return NUM_SMS - job.units

    def _together(self, encode: Job, prefill: Job) -> tuple[float, float]:
        """Seconds of both, by what becomes of the SMs that are in both parts.

        Prefill takes all time that the encoder leaves: one with a small batch waits for the host.
        """
        encode_sms, prefill_sms = self._sms(Stage.ENCODE, encode), NUM_SMS - prefill.units
        both = max(0, encode_sms - prefill.units)
        whole_s = self.encode_s(encode.size, encode_sms)
        busy_s = self._encode_busy_s(encode.size, encode_sms)
        if not both:
            return whole_s, self.prefill_s(prefill.size, prefill_sms)
        if self._sharing is Sharing.SLICES:
            gets = min(busy_s / whole_s, 0.5)
            worth = encode_sms - both * (1 - gets * whole_s / busy_s)
            whole_s = self.encode_s(encode.size, max(1, round(worth)))
        else:
            whole_s += NUM_VIT_KERNELS * self._dispatch_s(prefill_sms)
            gets = busy_s / whole_s
        return whole_s, self.prefill_s(prefill.size, max(1, round(prefill_sms - both * gets)))

    def _dispatch_s(self, sms: int) -> float:
        """Until a kernel of the encoder gets ``sms`` of prefill: by what it finds there."""
        prefill_s = layer_s(self._model, LLAMA_LAYER, sms)
        if self._sharing is Sharing.ORDER:
            return prefill_s / len(LLAMA_LAYER)
        kernels = (kernel(self._model, product, sms) for product in LLAMA_LAYER)
        return sum(kernel_s * tile_s / 2 for kernel_s, tile_s in kernels) / prefill_s

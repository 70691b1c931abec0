"""A GPU under the sweep and the contention: torch alone, random weights, no vLLM.

The encoder has the shapes of ViT-L/14-336, a chunk of prefill those of a layer of an 8B Llama over
2048 tokens, both in bfloat16. What runs is CUDA graphs, one for each part and size: a graph keeps
the SMs of the stream in which it was captured, and one thread can feed both sides.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from easerve.engines.partition.cell import Cell
from easerve.engines.partition.cuda import Cuda
from easerve.engines.partition.green import PROFILED, GreenDriver, TorchStreams
from easerve.engines.partition.probe import Gemm, Verdict, prove
from easerve.policy.partition import HALF, Layout
from easerve.types import Stage

VIT_LAYERS, VIT_WIDTH, VIT_HEADS, VIT_TOKENS, PATCH_VALUES = 24, 1024, 16, 577, 592
"""PATCH_VALUES: 14 by 14 pixels of 3 colours, in multiples of 16."""
LLAMA_WIDTH, LLAMA_HEADS, LLAMA_KV_HEADS, LLAMA_MLP, CHUNK_TOKENS = 4096, 32, 8, 14336, 2048
STAGES = (Stage.ENCODE, Stage.PREFILL)
NUM_SWITCHES = 1000
MEET_S = 20.0
WEIGHT = 0.02
"""Standard deviation of weights: values stay finite through all layers."""


def make_driver() -> GreenDriver:
    """For both stages, as all is one process here."""
    return GreenDriver(STAGES, levels=PROFILED)


class GpuDevice:
    """``Device`` of engines.partition.sweep, on the first GPU that the process sees."""

    name = GreenDriver.name
    item_tokens = VIT_TOKENS

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()
        self._driver = make_driver()
        self.layout: Layout = self._driver.layout
        self.levels: Sequence[int] = self._driver.layout.levels
        self.source = str(torch.cuda.get_device_name())
        self._models: dict[Stage, _Vit | _LlamaLayer] = {
            Stage.ENCODE: _Vit(torch),
            Stage.PREFILL: _LlamaLayer(torch),
        }
        self._pools = {stage: torch.cuda.graph_pool_handle() for stage in self._models}
        self._streams = {
            Stage.ENCODE: torch.cuda.Stream(),
            Stage.PREFILL: torch.cuda.Stream(),
        }
        self._first = TorchStreams().first()
        self._encode_first = False
        self._units = dict.fromkeys(self._models, 0)
        self._graphs: dict[tuple[Any, Stage, int], tuple[Any, Any]] = {}
        self._under_way: dict[Stage, Any] = {}

    def close(self) -> None:
        self._torch.cuda.synchronize()
        self._graphs.clear()
        self._driver.close()

    def prepare(self, batches: Sequence[int]) -> None:
        """Capture every graph, which takes longer than what is measured."""
        for units in (0, *self.levels):
            for batch in batches:
                self._graph(self._stream(Stage.ENCODE, units), Stage.ENCODE, batch)
            self._graph(self._stream(Stage.PREFILL, units), Stage.PREFILL, 1)
        for batch in batches:
            self._graph(self._first, Stage.ENCODE, batch)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def confine(self, stage: Stage, units: int) -> None:
        self._units[stage] = units

    def prefer_encode(self, preferred: bool) -> None:
        """By a stream of the highest priority, where the encoder is not confined."""
        self._encode_first = preferred

    def encode(self, batch: int) -> Callable[[], bool]:
        return self._launch(Stage.ENCODE, batch, 1)

    def prefill(self, chunks: int) -> Callable[[], bool]:
        return self._launch(Stage.PREFILL, 1, chunks)

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if any(event.query() for event in self._under_way.values()):
                return

    def _stream(self, stage: Stage, units: int) -> Any:
        if units:
            return self._driver.stream(stage, units)
        if stage is Stage.ENCODE and self._encode_first:
            return self._first
        return self._streams[stage]

    def _launch(self, stage: Stage, size: int, times: int) -> Callable[[], bool]:
        stream = self._stream(stage, self._units[stage])
        graph = self._graph(stream, stage, size)
        event = self._torch.cuda.Event()
        with self._torch.cuda.stream(stream):
            for _ in range(times):
                graph.replay()
            event.record(stream)
        self._under_way[stage] = event
        return partial(self._is_done, stage, event)

    def _is_done(self, stage: Stage, event: Any) -> bool:
        if not event.query():
            return False
        if self._under_way.get(stage) is event:
            del self._under_way[stage]
        return True

    def _graph(self, stream: Any, stage: Stage, size: int) -> Any:
        key = (stream, stage, size)
        if key not in self._graphs:
            model = self._models[stage]
            run = partial(model, model.input(size))
            graph = _capture(self._torch, stream, run, self._pools[stage])
            self._graphs[key] = graph, run  # which has the input that the graph reads
        return self._graphs[key][0]


def _capture(torch: Any, stream: Any, run: Callable[[], Any], pool: Any) -> Any:
    """``run`` as a graph; it runs twice first, for what libraries set up on a new stream."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            run()
    torch.cuda.synchronize()
    return graph


def _random(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * WEIGHT


class _Vit:
    """Pre-norm layers; (batch, VIT_TOKENS, PATCH_VALUES) -> (batch, VIT_TOKENS, VIT_WIDTH)."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._functional = torch, torch.nn.functional
        width = VIT_WIDTH
        self._patches = _random(torch, width, PATCH_VALUES)
        shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        self._layers = [[_random(torch, *shape) for shape in shapes] for _ in range(VIT_LAYERS)]

    def input(self, batch: int) -> Any:
        return _random(self._torch, batch, VIT_TOKENS, PATCH_VALUES)

    def __call__(self, patches: Any) -> Any:
        functional = self._functional
        hidden = functional.linear(patches, self._patches)
        batch = hidden.shape[0]
        for query_key_value, output, up, down in self._layers:
            normed = functional.layer_norm(hidden, (VIT_WIDTH,))
            heads = functional.linear(normed, query_key_value).view(
                batch, VIT_TOKENS, 3, VIT_HEADS, VIT_WIDTH // VIT_HEADS
            )
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value)
            mixed = mixed.transpose(1, 2).reshape(batch, VIT_TOKENS, VIT_WIDTH)
            hidden = hidden + functional.linear(mixed, output)
            normed = functional.layer_norm(hidden, (VIT_WIDTH,))
            inner = functional.gelu(functional.linear(normed, up))
            hidden = hidden + functional.linear(inner, down)
        return hidden


class _LlamaLayer:
    """Grouped-query attention and a gated MLP; (1, CHUNK_TOKENS, LLAMA_WIDTH) -> the same."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._functional = torch, torch.nn.functional
        head = LLAMA_WIDTH // LLAMA_HEADS
        self._query = _random(torch, LLAMA_WIDTH, LLAMA_WIDTH)
        self._key_value = _random(torch, 2 * LLAMA_KV_HEADS * head, LLAMA_WIDTH)
        self._output = _random(torch, LLAMA_WIDTH, LLAMA_WIDTH)
        self._gate_up = _random(torch, 2 * LLAMA_MLP, LLAMA_WIDTH)
        self._down = _random(torch, LLAMA_WIDTH, LLAMA_MLP)

    def input(self, batch: int) -> Any:
        return _random(self._torch, batch, CHUNK_TOKENS, LLAMA_WIDTH)

    def __call__(self, hidden: Any) -> Any:
        functional = self._functional
        normed = functional.rms_norm(hidden, (LLAMA_WIDTH,))
        query = self._heads(functional.linear(normed, self._query), LLAMA_HEADS)
        key_value = functional.linear(normed, self._key_value).chunk(2, -1)
        key, value = (
            self._heads(each, LLAMA_KV_HEADS)
            .unsqueeze(2)
            .expand(-1, -1, LLAMA_HEADS // LLAMA_KV_HEADS, -1, -1)
            .flatten(1, 2)
            for each in key_value
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + functional.linear(mixed, self._output)
        normed = functional.rms_norm(hidden, (LLAMA_WIDTH,))
        gate, up = functional.linear(normed, self._gate_up).chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate) * up, self._down)

    def _heads(self, values: Any, num: int) -> Any:
        """(1, tokens, width) -> (1, heads, tokens, width of a head)."""
        return values.view(*values.shape[:2], num, -1).transpose(1, 2)


# What a driver costs, and whether its parts are apart --------------------------------------------


def card() -> Iterator[dict[str, Any]]:
    """What there is, what its parts took to make, and what a switch between them takes."""
    import torch

    torch.cuda.init()
    yield {"source": str(torch.cuda.get_device_name()), "torch": str(torch.__version__)}
    driver = make_driver()
    try:
        yield {"num_sms": driver.layout.total, "cuda": Cuda().version(), **creation(driver)}
        yield switching(driver)
    finally:
        driver.close()


def creation(driver: GreenDriver) -> dict[str, Any]:
    """Of every part, in the order in which they were made."""
    parts = driver.parts.values()
    return {
        "context_ms": [1e3 * part.context_s for part in parts],
        "stream_ms": [1e3 * part.stream_s for part in parts],
        "part_sms": {f"{stage} {units}": num for (stage, units), num in driver.counts.items()},
        "granule": driver.layout.granule,
        "idle_sms": driver.idle_sms,
    }


def switching(driver: GreenDriver) -> dict[str, float]:
    """Microseconds of the host: of making a stream current, and of ``confine``, which waits too."""
    levels = driver.layout.levels[:2]
    streams = TorchStreams()
    pair = [driver.stream(Stage.PREFILL, units) for units in levels]
    home = streams.current()
    try:
        set_stream_us = _mean_us(lambda at: streams.make_current(pair[at % 2]))
    finally:
        streams.make_current(home)
    confine_us = _mean_us(lambda at: driver.confine(Stage.PREFILL, levels[at % 2]))
    driver.confine(Stage.PREFILL, 0)
    return {"set_stream_us": set_stream_us, "confine_us": confine_us}


def _mean_us(switch: Callable[[int], None]) -> float:
    begin = time.perf_counter()
    for number in range(NUM_SWITCHES):
        switch(number)
    return 1e6 * (time.perf_counter() - begin) / NUM_SWITCHES


def prove_side(path: Path, stage: Stage) -> Verdict:
    """One side's part in the proof that parts are disjoint, with a driver of its own.

    The other side is in another thread or process, and has the same cell.
    """
    driver = make_driver()
    cell = Cell(path)
    try:
        units = driver.layout.round(HALF)
        return prove(cell, stage, Gemm(driver, units), meet_s=MEET_S)
    finally:
        cell.close()
        driver.close()

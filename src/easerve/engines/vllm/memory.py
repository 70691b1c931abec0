"""The memory plan: what each engine's share of its device holds, from the file and the weights.

An estimate made before anything starts. Weights come from file headers and are taken to be stored
in 16 bit; the KV cache is what is left; activations are a round figure for CUDA (vLLM profiles them
itself when it starts).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from easerve.config import GIB, ConfigError, Deployment
from easerve.engines.vllm.launch import (
    CPU_KV_CACHE_BYTES,
    assign_devices,
    section_of,
    worker_ids,
)
from easerve.engines.vllm.models import ModelInfo
from easerve.types import Stage, WorkerId

CUDA_ACTIVATION_BYTES = int(1.5 * GIB)
FP32_FACTOR = 2  # weights are stored in 16 bit


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes on each device of one engine; None where the model's folder does not tell.

    ``available`` is the engine's share of the device; ``device_bytes`` the whole device.
    """

    worker_id: WorkerId
    devices: tuple[int, ...]
    weights: int | None
    activations: int
    kv_cache: int | None
    kv_tokens: int | None
    available: int | None
    device_bytes: int | None
    share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(deployment: Deployment, info: ModelInfo) -> list[Row]:
    """One row per engine."""
    devices = assign_devices(deployment)
    cuda = deployment.device == "cuda"
    device_bytes = (int(deployment.gpu_memory or 0) or detect_gpu_bytes()) if cuda else None
    rows = []
    for worker_id, stage, _ in worker_ids(deployment):
        section = section_of(deployment, stage)
        stored = info.encoder_bytes if stage is Stage.ENCODE else info.language_bytes
        if stored and stage is Stage.PREFILL and info.media_at_prefill:
            stored += info.encoder_bytes or 0  # vLLM loads it where media are allowed
        weights = stored and stored // section.tensor_parallel_size
        if weights and deployment.engine.dtype == "float32":
            weights *= FP32_FACTOR
        activations = CUDA_ACTIVATION_BYTES if cuda else 0
        available = device_bytes and int(device_bytes * section.gpu_memory_utilization)
        kv_cache = _kv_cache(deployment, stage, weights, activations, available)
        per_token = info.kv_bytes_per_token
        if per_token and deployment.engine.dtype == "float32":
            per_token *= FP32_FACTOR
        tensor_parallel = section.tensor_parallel_size
        rows.append(
            Row(
                worker_id,
                devices[worker_id],
                weights,
                activations,
                kv_cache,
                kv_cache * tensor_parallel // per_token if kv_cache and per_token else None,
                available,
                device_bytes,
                section.gpu_memory_utilization,
            )
        )
    return rows


def _kv_cache(
    deployment: Deployment,
    stage: Stage,
    weights: int | None,
    activations: int,
    available: int | None,
) -> int | None:
    if stage is Stage.ENCODE:
        return 0
    asked = section_of(deployment, stage).kv_cache_memory
    if asked is not None:
        return int(asked)
    if deployment.device == "cpu":
        return CPU_KV_CACHE_BYTES
    if weights is None or available is None:
        return None
    return available - weights - activations


def check(rows: Sequence[Row]) -> None:
    """Raise ConfigError for a plan that cannot hold, with its numbers."""
    shares: dict[int, list[Row]] = {}
    for row in rows:
        for gpu in row.devices:
            shares.setdefault(gpu, []).append(row)
        need = (row.weights or 0) + row.activations + max(row.kv_cache or 0, 0)
        if row.available is not None and (need > row.available or (row.kv_cache or 0) < 0):
            raise ConfigError(
                f"{row.worker_id}: weights {gib(row.weights or 0)} and activations "
                f"{gib(row.activations)} leave no room for a KV cache in {gib(row.available)} "
                f"({row.share:g} of a GPU of {gib(row.device_bytes or 0)}); raise "
                "tensor_parallel_size or gpu_memory_utilization"
            )
    for gpu, sharers in shares.items():
        total = round(sum(row.share for row in sharers), 6)  # 0.05 + 0.55 + 0.3 + 0.1 is 1
        if total > 1:
            parts = " + ".join(f"{row.worker_id} {row.share:g}" for row in sharers)
            raise ConfigError(f"GPU {gpu}: gpu_memory_utilization {parts} = {total:g} is over 1")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def detect_gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
    except Exception:  # no package, no driver, no GPU: the plan says "?"
        return None

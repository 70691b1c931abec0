"""The memory plan: what each engine's share of its device holds, from the file and the weights.

An estimate made before anything starts. Weights come from file headers and are taken to be stored
in 16 bit; the KV cache is what is left; activations are a round figure for CUDA (vLLM profiles them
itself when it starts). Only where an encoder and a local prefill engine share a GPU the plan is
more: vLLM's profiling counts what the other takes meanwhile, so both are told what they get.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from easerve.config import GIB, ConfigError, Deployment
from easerve.engines.partition.green import LEVELS
from easerve.engines.vllm.models import ModelInfo
from easerve.engines.vllm.topology import Member, members
from easerve.types import Stage, WorkerId

CPU_KV_CACHE_BYTES = 64 << 20
CUDA_ACTIVATION_BYTES = int(1.5 * GIB)
CUDA_ENCODER_CACHE_BYTES = GIB // 2  # 8192 tokens of 8192 values and what is being pushed
FP32_FACTOR = 2  # weights are stored in 16 bit
GPU_SHARE = 0.9  # of a GPU that is divided; the rest is for CUDA contexts and graphs
ENCODER_MARGIN = 1.1
MAKES_PARTS = ("auto", "green-context")
MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes on each device of one engine; None where the model's folder does not tell.

    ``available`` is the engine's share of the device; ``device_bytes`` the whole device.
    ``embeddings`` are kept on the device by engines that share it (see Member.beside).
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
    embeddings: int = 0
    beside: tuple[WorkerId, ...] = ()

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return (self.weights or 0) + self.activations + self.embeddings

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Need:
    """What an engine holds on each of its devices besides a KV cache."""

    weights: int | None
    activations: int
    embeddings: int

    @property
    def total(self) -> int:
        return (self.weights or 0) + self.activations + self.embeddings


def plan(deployment: Deployment, info: ModelInfo) -> list[Row]:
    """One row per engine.

    Raises ConfigError where a GPU is to be divided and the size of it, or of the weights, is not
    known.
    """
    cuda = deployment.device == "cuda"
    device_bytes = (int(deployment.gpu_memory or 0) or detect_gpu_bytes()) if cuda else None
    engines = members(deployment)
    needs = {each.worker_id: _need(deployment, each, info) for each in engines}
    shares = _shares(deployment, engines, needs, device_bytes)
    per_token = info.kv_bytes_per_token
    if per_token and deployment.engine.dtype == "float32":
        per_token *= FP32_FACTOR
    rows = []
    for each in engines:
        need, share = needs[each.worker_id], shares[each.worker_id]
        available = device_bytes and int(device_bytes * share)
        kv_cache = _kv_cache(deployment, each, need, available)
        num_shards = each.section.tensor_parallel_size
        rows.append(
            Row(
                each.worker_id,
                each.devices,
                need.weights,
                need.activations,
                kv_cache,
                kv_cache * num_shards // per_token if kv_cache and per_token else None,
                available,
                device_bytes,
                share,
                need.embeddings,
                each.beside,
            )
        )
    return rows


def _need(deployment: Deployment, member: Member, info: ModelInfo) -> _Need:
    encodes = member.stage is Stage.ENCODE
    stored = info.encoder_bytes if encodes else info.language_bytes
    if stored and member.stage is Stage.PREFILL and info.media_at_prefill:
        stored += info.encoder_bytes or 0  # vLLM loads it where media are allowed
    weights = stored and stored // member.section.tensor_parallel_size
    if weights and deployment.engine.dtype == "float32":
        weights *= FP32_FACTOR
    if deployment.device == "cpu":
        return _Need(weights, 0, 0)
    activations, embeddings = CUDA_ACTIVATION_BYTES, 0
    makes_parts = deployment.partition is not None and deployment.partition.driver in MAKES_PARTS
    if makes_parts and (encodes or member.beside):
        # torch keeps the memory of each part's stream apart, and of the stream without a part.
        activations *= len(LEVELS) + 2
    if deployment.local_prefill is not None and encodes:
        embeddings = CUDA_ENCODER_CACHE_BYTES
    elif member.beside:
        embeddings = int(deployment.engine.embedding_cache)
    return _Need(weights, activations, embeddings)


def _shares(
    deployment: Deployment,
    engines: Sequence[Member],
    needs: Mapping[WorkerId, _Need],
    device_bytes: int | None,
) -> dict[WorkerId, float]:
    """Of each engine's devices: as the file says, or as encode and local prefill divide them.

    An encoder gets what it needs, the local engine the rest of GPU_SHARE, in hundredths.
    """
    local = deployment.local_prefill
    divides = deployment.device == "cuda" and local is not None
    computes = divides and local is not None and local.gpu_memory_utilization is None
    if divides:
        _assert_known(deployment, needs, device_bytes, computes)
    shares: dict[WorkerId, float] = {}
    taken: defaultdict[int, float] = defaultdict(float)
    for each in sorted(engines, key=lambda each: bool(each.beside)):  # who gets the rest is last
        given = each.section.gpu_memory_utilization or GPU_SHARE
        if computes and device_bytes and each.stage is Stage.ENCODE:
            needed = ENCODER_MARGIN * needs[each.worker_id].total / device_bytes
            given = math.ceil(100 * needed) / 100
        elif computes and each.beside:
            most = max(taken[gpu] for gpu in each.devices)
            given = math.floor(100 * (GPU_SHARE - most) + 1e-6) / 100
        shares[each.worker_id] = given
        for gpu in each.devices:
            taken[gpu] += given
    return shares


def _assert_known(
    deployment: Deployment,
    needs: Mapping[WorkerId, _Need],
    device_bytes: int | None,
    computes: bool,
) -> None:
    """What it takes to say how much a local prefill engine's KV cache gets."""
    assert deployment.local_prefill is not None
    given = deployment.local_prefill.kv_cache_memory is not None
    if given and not computes:
        return
    keys = ["local_prefill.kv_cache_memory"] * (not given)
    if computes:
        keys += ["encode.gpu_memory_utilization", "local_prefill.gpu_memory_utilization"]
    if device_bytes is None:
        raise ConfigError(
            "local_prefill: the memory of a GPU is not known, so it cannot be divided; set "
            f"gpu_memory, or {' and '.join(keys)}"
        )
    if any(need.weights is None for need in needs.values()):
        raise ConfigError(
            f"local_prefill: the weights of {deployment.model!r} are not on this machine, so their "
            f"size is not known; download the model first, or set {' and '.join(keys)}"
        )


def _kv_cache(
    deployment: Deployment, member: Member, need: _Need, available: int | None
) -> int | None:
    if member.stage is Stage.ENCODE:
        return 0
    asked = member.section.kv_cache_memory
    if asked is not None:
        return int(asked)
    if deployment.device == "cpu":
        return CPU_KV_CACHE_BYTES
    if need.weights is None or available is None:
        return None
    return available - need.total


def check(rows: Sequence[Row]) -> None:
    """Raise ConfigError for a plan that cannot hold, with its numbers."""
    by_id = {row.worker_id: row for row in rows}
    shares: dict[int, list[Row]] = {}
    for row in rows:
        for gpu in row.devices:
            shares.setdefault(gpu, []).append(row)
        if row.available is None:
            continue
        if row.fixed + max(row.kv_cache or 0, 0) > row.available or (row.kv_cache or 0) < 0:
            if row.beside:
                raise ConfigError(_no_room_beside(row, [by_id[each] for each in row.beside]))
            raise ConfigError(
                f"{row.worker_id}: {_fixed(row)} leave no room for a KV cache in "
                f"{gib(row.available)} ({row.share:g} of a GPU of {gib(row.device_bytes or 0)}); "
                "raise tensor_parallel_size or gpu_memory_utilization"
            )
    for gpu, sharers in shares.items():
        total = round(sum(row.share for row in sharers), 6)  # 0.05 + 0.55 + 0.3 + 0.1 is 1
        if total > 1:
            parts = " + ".join(f"{row.worker_id} {row.share:g}" for row in sharers)
            raise ConfigError(f"GPU {gpu}: gpu_memory_utilization {parts} = {total:g} is over 1")
    _check_host([row for row in rows if not row.devices])


def _no_room_beside(row: Row, encoders: Sequence[Row]) -> str:
    encoder = max(encoders, key=lambda each: each.fixed)
    left = (row.available or 0) - row.fixed
    asked = f" of {gib(row.kv_cache)}" if row.kv_cache and row.kv_cache > 0 else ""
    return (
        f"{row.worker_id} beside {', '.join(row.beside)}: a GPU has {gib(row.device_bytes or 0)}; "
        f"{encoder.worker_id} gets {encoder.share:g} of it ({_fixed(encoder)}), {row.worker_id} "
        f"{row.share:g}, of which {_fixed(row)} leave {gib(left)} for a KV cache{asked}; raise "
        "local_prefill.tensor_parallel_size, so that more GPUs hold the weights"
    )


def _fixed(row: Row) -> str:
    embeddings = f" and embeddings {gib(row.embeddings)}" if row.embeddings else ""
    between = "," if embeddings else " and"
    return (
        f"weights {gib(row.weights or 0)}{between} activations {gib(row.activations)}{embeddings}"
    )


def _check_host(rows: Sequence[Row]) -> None:
    """Engines of a CPU share its memory."""
    needs = {row.worker_id: row.fixed + (row.kv_cache or 0) for row in rows}
    available = detect_host_bytes() if needs else None
    if available is not None and sum(needs.values()) > available:
        parts = " + ".join(f"{worker_id} {gib(need)}" for worker_id, need in needs.items())
        raise ConfigError(
            f"weights and KV caches {parts} = {gib(sum(needs.values()))}, but this machine has "
            f"{gib(available)} of memory available; lower kv_cache_memory or replicas, or serve a "
            "smaller model"
        )


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


def detect_host_bytes() -> int | None:
    """Memory that this machine, or this process's control group, has yet; None: it does not say."""
    lines = _text(MEMINFO).splitlines()
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return min((*free, *_cgroup_bytes()), default=None)


def _cgroup_bytes() -> Iterator[int]:
    """What is left below the limit of each control group (version 2) that this process is in."""
    own = next((line for line in _text(OWN_CGROUP).splitlines() if line.startswith("0::")), "0::/")
    folder = CGROUPS / own.removeprefix("0::").strip("/")
    while folder.is_relative_to(CGROUPS):
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            pages = [line.split() for line in _text(folder / "memory.stat").splitlines()]
            cached = sum(int(size) for name, size in pages if name == "inactive_file")
            yield max(0, int(limit) - int(used) + cached)
        folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

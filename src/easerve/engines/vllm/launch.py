"""Launch lines: one vLLM API server per engine, from the deployment file.

An encoder loads the vision tower and its projector only (vLLM does that for an EC producer);
prefill and decode engines load the language model only (no media allowed, embeddings come in).
"""

import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easerve.config import ConfigError, Deployment, StageSection
from easerve.types import Stage, WorkerId

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
SITE = Path(__file__).parent / "site"
CPU_KV_CACHE_BYTES = 64 << 20
MAX_SOCKET_PATH = 107  # sun_path of a Unix socket, less the closing zero
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ENCODE_BATCH_TOKENS = 8192  # the budget of one encoder forward, and the size of its cache
NO_MEDIA = {"image": 0, "video": 0, "audio": 0}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start one engine: ``python -m ENTRY *argv`` with ``env`` added to the environment."""

    worker_id: WorkerId
    stage: Stage
    argv: tuple[str, ...]
    env: Mapping[str, str]
    socket: Path
    log: Path
    devices: tuple[int, ...] = ()

    def command(self) -> list[str]:
        return [sys.executable, "-m", ENTRY, *self.argv]


def section_of(deployment: Deployment, stage: Stage) -> StageSection:
    return {
        Stage.ENCODE: deployment.encode,
        Stage.PREFILL: deployment.prefill,
        Stage.DECODE: deployment.decode,
    }[stage]


def worker_ids(deployment: Deployment) -> Iterator[tuple[WorkerId, Stage, int]]:
    """Every engine: its id (``encode-0``), its stage and its number within the stage."""
    for stage in Stage:
        for index in range(section_of(deployment, stage).replicas):
            yield WorkerId(f"{stage}-{index}"), stage, index


def assign_devices(deployment: Deployment) -> dict[WorkerId, tuple[int, ...]]:
    """The GPUs of each engine: those the file names, else the lowest that nobody named."""
    if deployment.device == "cpu":
        return {worker_id: () for worker_id, _, _ in worker_ids(deployment)}
    sections = [section_of(deployment, stage) for stage in Stage]
    named = {gpu for section in sections for group in section.devices or () for gpu in group}
    free = (gpu for gpu in range(1 << 16) if gpu not in named)
    assigned = {}
    for worker_id, stage, index in worker_ids(deployment):
        section = section_of(deployment, stage)
        assigned[worker_id] = (
            section.devices[index]
            if section.devices
            else tuple(next(free) for _ in range(section.tensor_parallel_size))
        )
    return assigned


def engine_specs(
    deployment: Deployment, run_dir: Path, log_dir: Path, media_at_prefill: bool = False
) -> list[EngineSpec]:
    """The launch of every engine; sockets in ``run_dir``, logs in ``log_dir``.

    ``media_at_prefill``: prefill engines get the media, too (see models.CAPABILITIES).
    """
    template = deployment.engine.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"engine.chat_template: there is no file {template!r}")
    devices = assign_devices(deployment)
    ports = iter(_free_ports(len(devices)))
    specs = []
    for worker_id, stage, _ in worker_ids(deployment):
        address = run_dir / f"{worker_id}.sock"
        if len(os.fsencode(address)) > MAX_SOCKET_PATH:
            raise ConfigError(f"{address}: too long for a Unix socket; choose a shorter TMPDIR")
        specs.append(
            EngineSpec(
                worker_id,
                stage,
                tuple(_arguments(deployment, stage, address, media_at_prefill)),
                _environment(deployment, run_dir, devices[worker_id], next(ports)),
                address,
                log_dir / f"{worker_id}.log",
                devices[worker_id],
            )
        )
    return specs


def _arguments(
    deployment: Deployment, stage: Stage, address: Path, media_at_prefill: bool
) -> Iterator[str]:
    engine, section = deployment.engine, section_of(deployment, stage)
    cpu = deployment.device == "cpu"
    # Without a size vLLM reserves a share of all memory, on a CPU even for an encoder.
    default_kv_cache = CPU_KV_CACHE_BYTES if cpu else None
    takes_media = stage is Stage.ENCODE or (media_at_prefill and stage is Stage.PREFILL)
    processor = takes_media and engine.mm_processor_kwargs
    batch_tokens = ENCODE_BATCH_TOKENS if stage is Stage.ENCODE else None
    yield from ("--model", deployment.model, "--served-model-name", deployment.name)
    yield from ("--uds", str(address), "--enable-scale-out", "--disable-uvicorn-access-log")
    yield from ("--dtype", engine.dtype)
    optional: dict[str, Any] = {
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": section.max_num_seqs,
        "--max-num-batched-tokens": section.max_num_batched_tokens or batch_tokens,
        "--kv-cache-memory-bytes": section.kv_cache_memory or default_kv_cache,
        "--chat-template": engine.chat_template,
        "--tool-call-parser": engine.tool_call_parser,
        "--reasoning-parser": engine.reasoning_parser,
        "--mm-processor-kwargs": json.dumps(engine.mm_processor_kwargs) if processor else None,
    }
    for flag, value in optional.items():
        if value is not None:
            yield from (flag, str(int(value) if isinstance(value, int) else value))
    if engine.trust_remote_code:
        yield "--trust-remote-code"
    if engine.enable_auto_tool_choice:
        yield "--enable-auto-tool-choice"
    if cpu:
        executor = "easerve.engines.vllm.executor.SingleProcessExecutor"
        yield from ("--enforce-eager", "--distributed-executor-backend", executor)
    else:
        yield from ("--tensor-parallel-size", str(section.tensor_parallel_size))
        yield from ("--gpu-memory-utilization", str(section.gpu_memory_utilization))
    if stage is Stage.ENCODE:
        yield from ("--ec-transfer-config", _ec_config("ec_producer"))
        yield "--no-enable-prefix-caching"
    else:
        # Items come without data here; a processor cache would look for the data.
        yield from ("--mm-processor-cache-gb", "0")
        if not takes_media:
            yield from ("--limit-mm-per-prompt", json.dumps(NO_MEDIA))
        role = "kv_producer" if stage is Stage.PREFILL else "kv_consumer"
        yield from ("--kv-transfer-config", _kv_config(role, deployment.device))
    if stage is Stage.PREFILL:
        yield from ("--ec-transfer-config", _ec_config("ec_consumer"))
    yield from engine.extra_args
    yield from section.extra_args


def _ec_config(role: str) -> str:
    return json.dumps(
        {
            "ec_connector": "FileConnector",
            "ec_connector_module_path": "easerve.engines.vllm.ec_files",
            "ec_role": role,
        }
    )


def _kv_config(role: str, device: str) -> str:
    return json.dumps(
        {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": device,
            # "recompute" would need embeddings that a decode engine does not have.
            "kv_load_failure_policy": "fail",
        }
    )


def _environment(
    deployment: Deployment, run_dir: Path, devices: tuple[int, ...], nixl_port: int
) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    env = {
        "PYTHONPATH": os.pathsep.join([str(SITE), *([inherited] if inherited else [])]),
        # Longer than the router keeps a connection, so that it never writes to a closed one.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl_port),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(run_dir),
        "TMPDIR": str(run_dir),
        # All engines of a local deployment are on this host: UCX has no business elsewhere.
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
    }
    if deployment.device == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(deployment.engine.cpu_threads)
        # vLLM loads pictures in eight threads, which only get in each other's way on few cores.
        env["VLLM_MEDIA_LOADING_THREAD_COUNT"] = str(deployment.engine.cpu_threads)
        # Eager engines would still compile one function, for 15 s, at the first log-probability.
        env["TORCHDYNAMO_DISABLE"] = "1"
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return env


def _free_ports(count: int) -> list[int]:
    """Free loopback ports, all different, outside the range that the kernel hands out.

    Each engine opens dozens of ports from that range while it starts; one that took another's
    side channel would make that one wait for ever.
    """
    low, high = map(int, PORT_RANGE.read_text().split())
    candidates = list(range(10_000, low)) or list(range(high + 1, 1 << 16))
    ports: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(ports) == count:
            return ports
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        ports.append(port)
    raise ConfigError(f"fewer than {count} free ports outside {low}-{high} on loopback")


def fork_server_command(architecture: str, model_type: str) -> tuple[str, ...]:
    """The fork server; its socket's number goes where ``{fd}`` stands."""
    module = "easerve.engines.vllm.forkserver"
    return (sys.executable, "-m", module, "{fd}", architecture, model_type)

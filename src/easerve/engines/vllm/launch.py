"""Launch lines: one vLLM API server per engine, from the deployment file.

An encoder loads the vision tower and its projector only (vLLM does that for an EC producer);
prefill and decode engines load the language model only (no media allowed, embeddings come in).
Encoders push embeddings into the inboxes of prefill engines, which need not know who they are: one
secret, in the environment, is a deployment's.
"""

import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from easerve.config import GIB, ConfigError, Deployment
from easerve.engines.partition.ladder import Choice
from easerve.engines.partition.setup import Setup
from easerve.engines.vllm import dividing
from easerve.engines.vllm.memory import CPU_KV_CACHE_BYTES, Row
from easerve.engines.vllm.topology import Member, members
from easerve.types import Stage, WorkerId

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
SITE = Path(__file__).parent / "site"
TOKEN, CORES = "EASERVE_EC_TOKEN", "EASERVE_CORES"  # also in ec/connector, site/sitecustomize
SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
MAX_SOCKET_PATH = 107  # sun_path of a Unix socket, less the closing zero
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ENCODE_BATCH_TOKENS = 8192  # the budget of one encoder forward, and the size of its cache
NO_MEDIA = {"image": 0, "video": 0, "audio": 0}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start one engine: ``python -m ENTRY *argv`` with ``env`` added to the environment.

    ``inbox``: where a prefill engine listens for embeddings. ``beside``: the encoders whose devices
    a local prefill engine shares. ``cell``: of the device that it is one of two engines on, where
    that is divided.
    """

    worker_id: WorkerId
    stage: Stage
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # it holds the secret
    socket: Path
    log: Path
    devices: tuple[int, ...] = ()
    inbox: Path | None = None
    beside: tuple[WorkerId, ...] = ()
    cell: Path | None = None

    @property
    def unpinned_env(self) -> dict[str, str]:
        """For a process that is not this engine's alone: it may use every core."""
        return {name: value for name, value in self.env.items() if name != CORES}

    def command(self) -> list[str]:
        return [sys.executable, "-m", ENTRY, *self.argv]

    def again(self) -> "EngineSpec":
        """For another start: where the last one's port may be in use yet."""
        (port,) = free_ports(1)
        return replace(self, env={**self.env, SIDE_CHANNEL_PORT: str(port)})


def engine_specs(
    deployment: Deployment,
    plan: Sequence[Row],
    run_dir: Path,
    log_dir: Path,
    token: str,
    media_at_prefill: bool = False,
    choice: Choice | None = None,
) -> list[EngineSpec]:
    """The launch of every engine; sockets in ``run_dir``, logs in ``log_dir``.

    ``plan`` is the deployment's memory plan, ``token`` the secret that its encoders and prefill
    engines know each other by. ``media_at_prefill``: prefill engines get the media, too (see
    models.CAPABILITIES). ``choice``: by what encode and local prefill divide a device.
    """
    template = deployment.engine.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"engine.chat_template: there is no file {template!r}")
    engines = members(deployment)
    rows = {row.worker_id: row for row in plan}
    specs = []
    for each, port in zip(engines, free_ports(len(engines)), strict=True):
        address = run_dir / f"{each.worker_id}.sock"
        inbox = run_dir / f"{each.worker_id}.ec.sock" if each.stage is Stage.PREFILL else None
        for path in (inbox or address, address):
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise ConfigError(f"{path}: too long for a Unix socket; choose a shorter TMPDIR")
        row = rows[each.worker_id]
        setup = dividing.setup_of(deployment, each, run_dir, choice)
        env = _environment(deployment, each, run_dir, port, token)
        specs.append(
            EngineSpec(
                each.worker_id,
                each.stage,
                tuple(_arguments(deployment, each, row, address, media_at_prefill, setup)),
                env if setup is None else env | setup.to_environment(),
                address,
                log_dir / f"{each.worker_id}.log",
                each.devices,
                inbox,
                each.beside,
                None if setup is None else Path(setup.cell),
            )
        )
    return specs


def _arguments(
    deployment: Deployment,
    member: Member,
    row: Row,
    address: Path,
    media_at_prefill: bool,
    setup: Setup | None,
) -> Iterator[str]:
    engine, section, stage = deployment.engine, member.section, member.stage
    cpu = deployment.device == "cpu"
    # Without a size vLLM reserves a share of all memory, on a CPU even for an encoder. Beside an
    # encoder it would take what that one takes meanwhile for its own.
    default_kv_cache = CPU_KV_CACHE_BYTES if cpu else row.kv_cache if member.beside else None
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
        yield from ("--gpu-memory-utilization", f"{row.share:g}")
    if stage is Stage.ENCODE:
        yield from ("--ec-transfer-config", _ec_config("ec_producer", deployment, address))
        yield "--no-enable-prefix-caching"
        yield from ("--mm-processor-cache-gb", f"{deployment.engine.media_cache / GIB:g}")
    else:
        # Items come without data here; a processor cache would look for the data.
        yield from ("--mm-processor-cache-gb", "0")
        if not takes_media:
            yield from ("--limit-mm-per-prompt", json.dumps(NO_MEDIA))
        role = "kv_producer" if stage is Stage.PREFILL else "kv_consumer"
        yield from ("--kv-transfer-config", _kv_config(role, deployment.device))
    if stage is Stage.PREFILL:
        yield from ("--ec-transfer-config", _ec_config("ec_consumer", deployment, address))
    if setup is not None:
        yield from dividing.arguments(deployment, member, setup)
    yield from engine.extra_args
    yield from section.extra_args


def _ec_config(role: str, deployment: Deployment, address: Path) -> str:
    """``address``: the engine's socket, whose name is the engine's."""
    return json.dumps(
        {
            "ec_connector": "PushConnector",
            "ec_connector_module_path": "easerve.engines.vllm.ec.connector",
            "ec_role": role,
            "ec_connector_extra_config": {
                "name": address.stem,
                "inboxes": str(address.parent),
                "cache_bytes": int(deployment.engine.embedding_cache),
                "timeout_s": deployment.engine.embedding_timeout_s,
                # On GPUs memory goes from process to process, and by memfd where it cannot.
                "transport": "memfd" if deployment.device == "cpu" else "cuda-ipc",
            },
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
    deployment: Deployment, member: Member, run_dir: Path, nixl_port: int, token: str
) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    env = {
        "PYTHONPATH": os.pathsep.join([str(SITE), *([inherited] if inherited else [])]),
        # Longer than the router keeps a connection, so that it never writes to a closed one.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        SIDE_CHANNEL_PORT: str(nixl_port),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(run_dir),
        "TMPDIR": str(run_dir),
        # All engines of a local deployment are on this host: UCX has no business elsewhere.
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
    }
    if member.stage is not Stage.DECODE:
        env[TOKEN] = token
    if member.cores:
        env[CORES] = ",".join(map(str, member.cores))
    if deployment.device == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(deployment.engine.cpu_threads)
        # vLLM loads pictures in eight threads, which only get in each other's way on few cores.
        env["VLLM_MEDIA_LOADING_THREAD_COUNT"] = str(deployment.engine.cpu_threads)
        # Eager engines would still compile one function, for 15 s, at the first log-probability.
        env["TORCHDYNAMO_DISABLE"] = "1"
        if deployment.partition is not None:
            # Threads that spin while they wait, more of them than cores, take many times as long.
            env["OMP_WAIT_POLICY"] = "passive"
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, member.devices))
    return env


def free_ports(count: int) -> list[int]:
    """Free loopback ports, all different, outside the range that the kernel hands out.

    Each engine opens dozens of ports from that range while it starts; one that took another's
    side channel would make that one wait for ever.
    """
    low, high = map(int, PORT_RANGE.read_text().split())
    candidates = list(range(10_000, low)) or list(range(high + 1, 1 << 16))
    ports: list[int] = []
    random.shuffle(candidates)  # not a secret, and the system's randomness takes ten times as long
    for port in candidates:
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

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from easerve.config import GIB, ConfigError, build
from easerve.engines.vllm import launch
from easerve.engines.vllm.launch import EngineSpec, engine_specs
from easerve.engines.vllm.memory import plan
from easerve.engines.vllm.models import ModelInfo
from easerve.types import Stage

RUN, LOGS, SECRET = Path("/run/x"), Path("/log/x"), "hunter2"
INFO = ModelInfo(encoder_bytes=GIB // 2, language_bytes=14 * GIB)


def specs(media_at_prefill: bool = False, run: Path = RUN, **content: Any) -> dict[str, EngineSpec]:
    """The launches of a deployment, by engine."""
    gpu = {"gpu_memory": "48GiB"} if content.get("device") == "cuda" else {}
    deployment = build({"model": "owner/name", **gpu, **content}, "test")
    made = engine_specs(deployment, plan(deployment, INFO), run, LOGS, SECRET, media_at_prefill)
    return {spec.worker_id: spec for spec in made}


def value(spec: EngineSpec, flag: str) -> str | None:
    """What follows a flag that is given at most once."""
    assert spec.argv.count(flag) <= 1
    return spec.argv[spec.argv.index(flag) + 1] if flag in spec.argv else None


def config(spec: EngineSpec, flag: str) -> dict[str, Any] | None:
    text = value(spec, flag)
    return None if text is None else json.loads(text)


def roles(spec: EngineSpec) -> tuple[str | None, str | None]:
    """In the transfer of KV caches and of embeddings."""
    kv, ec = (config(spec, f"--{kind}-transfer-config") or {} for kind in ("kv", "ec"))
    return kv.get("kv_role"), ec.get("ec_role")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Roles ----------------------------------------------------------------------------------------


def test_an_encoder_produces_embeddings_and_has_no_kv_transfer(device: str) -> None:
    encoder = specs(device=device)["encode-0"]
    assert encoder.stage is Stage.ENCODE
    assert roles(encoder) == (None, "ec_producer")
    assert "--kv-transfer-config" not in encoder.argv
    assert "--limit-mm-per-prompt" not in encoder.argv
    assert "--no-enable-prefix-caching" in encoder.argv


@pytest.mark.parametrize(
    ("name", "kv_role", "ec_role"),
    [
        ("local-prefill-0", "kv_producer", "ec_consumer"),
        ("prefill-0", "kv_producer", "ec_consumer"),
        ("decode-0", "kv_consumer", None),
    ],
)
def test_prefill_and_decode_load_the_language_model_only(
    device: str, name: str, kv_role: str, ec_role: str | None
) -> None:
    spec = specs(device=device, local_prefill={})[name]
    assert config(spec, "--limit-mm-per-prompt") == {"image": 0, "video": 0, "audio": 0}
    assert value(spec, "--mm-processor-cache-gb") == "0"
    assert config(spec, "--kv-transfer-config") == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_buffer_device": device,
        "kv_load_failure_policy": "fail",
    }
    assert roles(spec) == (kv_role, ec_role)


def test_a_local_prefill_engine_is_a_prefill_engine_beside_its_encoders(device: str) -> None:
    made = specs(device=device, encode={"replicas": 2}, local_prefill={})
    assert list(made) == [
        *("encode-0", "encode-1", "local-prefill-0", "local-prefill-1", "prefill-0", "decode-0"),
    ]
    assert [spec.beside for spec in made.values()] == [
        *((), (), ("encode-0",), ("encode-1",)),
        *((), ()),
    ]
    for encoder, local in (("encode-0", "local-prefill-0"), ("encode-1", "local-prefill-1")):
        assert made[local].stage is Stage.PREFILL
        assert made[local].devices == made[encoder].devices


def test_embeddings_are_pushed_into_the_inboxes_of_prefill_engines(device: str) -> None:
    engine = {"embedding_cache": "2MiB", "embedding_timeout_s": 1.5}
    made = specs(device=device, engine=engine, local_prefill={})
    for name, spec in made.items():
        inbox = RUN / f"{name}.ec.sock" if spec.stage is Stage.PREFILL else None
        assert spec.inbox == inbox
        ec = config(spec, "--ec-transfer-config")
        if spec.stage is Stage.DECODE:
            assert ec is None
            continue
        assert ec == {
            "ec_connector": "PushConnector",
            "ec_connector_module_path": "easerve.engines.vllm.ec.connector",
            "ec_role": "ec_producer" if spec.stage is Stage.ENCODE else "ec_consumer",
            "ec_connector_extra_config": {
                "name": name,
                "inboxes": str(RUN),
                "cache_bytes": 2 << 20,
                "timeout_s": 1.5,
                "transport": "memfd" if device == "cpu" else "cuda-ipc",
            },
        }


def test_encoders_keep_as_much_media_as_they_may(device: str) -> None:
    for spec in specs(device=device, engine={"media_cache": "512MiB"}, local_prefill={}).values():
        kept = "0.5" if spec.stage is Stage.ENCODE else "0"
        assert value(spec, "--mm-processor-cache-gb") == kept


def test_the_secret_is_in_the_environment_of_those_who_push_and_are_pushed_to(device: str) -> None:
    for spec in specs(device=device, local_prefill={}).values():
        known = None if spec.stage is Stage.DECODE else SECRET
        assert spec.env.get("EASERVE_EC_TOKEN") == known
        assert SECRET not in " ".join(spec.command())
        assert SECRET not in repr(spec)


def test_a_prefill_that_gets_media_may_be_given_them(device: str) -> None:
    dense, sparse = specs(device=device), specs(device=device, media_at_prefill=True)
    assert list(sparse) == list(dense)
    for name, spec in sparse.items():
        limited = config(spec, "--limit-mm-per-prompt")
        assert limited == ({"image": 0, "video": 0, "audio": 0} if name == "decode-0" else None)
        if name != "prefill-0":
            assert spec.argv == dense[name].argv
    prefill = sparse["prefill-0"]
    assert value(prefill, "--mm-processor-cache-gb") == "0"
    for flag in ("--kv-transfer-config", "--ec-transfer-config"):
        assert config(prefill, flag) == config(dense["prefill-0"], flag)


def test_every_engine_serves_the_model_under_its_name_on_its_own_socket(device: str) -> None:
    made = specs(device=device, served_model_name="short", encode={"replicas": 2})
    assert list(made) == ["encode-0", "encode-1", "prefill-0", "decode-0"]
    for name, spec in made.items():
        assert value(spec, "--model") == "owner/name"
        assert value(spec, "--served-model-name") == "short"
        assert "--enable-scale-out" in spec.argv
        assert spec.socket == RUN / f"{name}.sock"
        assert value(spec, "--uds") == str(spec.socket)
        assert spec.log == LOGS / f"{name}.log"
        assert spec.command() == [sys.executable, "-m", launch.ENTRY, *spec.argv]
        assert not {"--host", "--port"} & set(spec.argv), "a socket file is its only address"


# Devices --------------------------------------------------------------------------------------


def test_cpu_engines_run_eagerly_in_one_process_with_their_threads() -> None:
    made = specs(engine={"cpu_threads": 3})
    for spec in made.values():
        assert "--enforce-eager" in spec.argv
        executor = value(spec, "--distributed-executor-backend")
        assert executor == "easerve.engines.vllm.executor.SingleProcessExecutor"
        assert value(spec, "--kv-cache-memory-bytes") == str(64 << 20)
        assert not {"--tensor-parallel-size", "--gpu-memory-utilization"} & set(spec.argv)
        assert spec.devices == ()
        assert spec.env["OMP_NUM_THREADS"] == "3"
        assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert "CUDA_VISIBLE_DEVICES" not in spec.env
        assert "EASERVE_CORES" not in spec.env


def test_engines_of_a_cpu_are_told_their_cores() -> None:
    made = specs(encode={"cores": [[0, 2]]}, local_prefill={}, decode={"cores": [[1]]})
    told = {name: spec.env.get("EASERVE_CORES") for name, spec in made.items()}
    assert told == {"encode-0": "0,2", "local-prefill-0": "0,2", "prefill-0": None, "decode-0": "1"}


def test_cuda_engines_get_their_gpus_and_their_share_of_them() -> None:
    prefill = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}
    made = specs(device="cuda", prefill=prefill)
    assert value(made["prefill-0"], "--tensor-parallel-size") == "2"
    assert value(made["prefill-0"], "--gpu-memory-utilization") == "0.5"
    assert value(made["decode-0"], "--tensor-parallel-size") == "1"
    assert value(made["decode-0"], "--gpu-memory-utilization") == "0.9"
    visible = {name: spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in made.items()}
    assert visible == {"encode-0": "0", "prefill-0": "1,2", "decode-0": "3"}
    for spec in made.values():
        cpu_only = {"--enforce-eager", "--distributed-executor-backend", "--kv-cache-memory-bytes"}
        assert not cpu_only & set(spec.argv)
        assert "OMP_NUM_THREADS" not in spec.env


def test_an_encoder_and_its_local_engine_are_told_what_they_get_of_their_gpu() -> None:
    """vLLM's own profiling is wrong where two engines start on one GPU."""
    made = specs(device="cuda", local_prefill={})
    for name, share in (("encode-0", "0.06"), ("local-prefill-0", "0.84"), ("decode-0", "0.9")):
        assert value(made[name], "--gpu-memory-utilization") == share
    left = int(48 * GIB * 0.84) - 14 * GIB - 3 * GIB // 2 - GIB
    assert value(made["local-prefill-0"], "--kv-cache-memory-bytes") == str(left)
    for name in ("encode-0", "prefill-0", "decode-0"):
        assert "--kv-cache-memory-bytes" not in made[name].argv
    assert made["local-prefill-0"].env["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_shares_and_the_kv_cache_of_a_local_engine_may_be_given() -> None:
    local = {"gpu_memory_utilization": 0.5, "kv_cache_memory": "2GiB"}
    made = specs(device="cuda", encode={"gpu_memory_utilization": 0.25}, local_prefill=local)
    assert value(made["encode-0"], "--gpu-memory-utilization") == "0.25"
    assert value(made["local-prefill-0"], "--gpu-memory-utilization") == "0.5"
    assert value(made["local-prefill-0"], "--kv-cache-memory-bytes") == str(2 * GIB)


def test_engines_may_be_put_on_one_gpu() -> None:
    share = {"devices": [[0]], "gpu_memory_utilization": 0.3}
    made = specs(device="cuda", encode=share, prefill=share)
    assert [made[name].devices for name in ("encode-0", "prefill-0", "decode-0")] == [
        *((0,), (0,)),
        (1,),
    ]


# Options --------------------------------------------------------------------------------------


def test_options_of_a_stage_go_to_its_engines_only() -> None:
    decode = {"max_num_seqs": 7, "max_num_batched_tokens": 999, "kv_cache_memory": "1MiB"}
    made = specs(decode=decode, engine={"max_model_len": 512, "dtype": "float32"})
    flags = ("--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-memory-bytes")
    assert [value(made["decode-0"], flag) for flag in flags] == ["7", "999", str(1 << 20)]
    assert [value(made["prefill-0"], flag) for flag in flags] == ["256", None, str(64 << 20)]
    for spec in made.values():
        assert value(spec, "--max-model-len") == "512"
        assert value(spec, "--dtype") == "float32"


def test_an_encoder_takes_batches_of_so_many_tokens_and_requests(device: str) -> None:
    """The core is told the same numbers, so they are always said."""
    default = specs(device=device)
    assert {value(spec, "--max-num-seqs") for spec in default.values()} == {"256"}
    batched = "--max-num-batched-tokens"
    assert value(default["encode-0"], batched) == str(launch.ENCODE_BATCH_TOKENS) == "8192"
    assert value(default["prefill-0"], batched) is value(default["decode-0"], batched) is None
    made = specs(device=device, encode={"max_num_batched_tokens": 4096, "max_num_seqs": 32})
    flags = (batched, "--max-num-seqs")
    assert [value(made["encode-0"], flag) for flag in flags] == ["4096", "32"]


@pytest.mark.parametrize("trusted", [True, False])
def test_code_from_a_model_is_run_only_where_the_file_says_so(trusted: bool) -> None:
    for spec in specs(engine={"trust_remote_code": trusted}).values():
        assert ("--trust-remote-code" in spec.argv) is trusted


TEXT_FLAGS = {
    "chat_template": ("--chat-template", __file__),  # any file
    "tool_call_parser": ("--tool-call-parser", "hermes"),
    "reasoning_parser": ("--reasoning-parser", "qwen3"),
}


@pytest.mark.parametrize(("flag", "given"), TEXT_FLAGS.values(), ids=TEXT_FLAGS)
def test_whoever_renders_or_parses_is_told_how(device: str, flag: str, given: str) -> None:
    key = flag.removeprefix("--").replace("-", "_")
    for spec in specs(device=device, engine={key: given}).values():
        assert value(spec, flag) == given
    for spec in specs(device=device).values():
        assert flag not in spec.argv


@pytest.mark.parametrize("enabled", [True, False])
def test_tools_are_called_unasked_only_where_the_file_says_so(enabled: bool) -> None:
    engine = {"tool_call_parser": "hermes", "enable_auto_tool_choice": enabled}
    for spec in specs(engine=engine).values():
        assert spec.argv.count("--enable-auto-tool-choice") == enabled


@pytest.mark.parametrize(
    ("media_at_prefill", "told"), [(False, {"encode-0"}), (True, {"encode-0", "prefill-0"})]
)
def test_only_engines_that_take_media_are_told_how_to_treat_them(
    device: str, media_at_prefill: bool, told: set[str]
) -> None:
    given = {"max_pixels": 1000, "nested": {"do_resize": False}}
    engine = {"mm_processor_kwargs": given}
    made = specs(device=device, media_at_prefill=media_at_prefill, engine=engine)
    assert {name for name, spec in made.items() if "--mm-processor-kwargs" in spec.argv} == told
    for name in told:
        assert config(made[name], "--mm-processor-kwargs") == given


def test_without_anything_to_tell_of_media_nothing_is_told() -> None:
    for spec in specs(media_at_prefill=True, engine={"mm_processor_kwargs": {}}).values():
        assert "--mm-processor-kwargs" not in spec.argv


def test_extra_arguments_come_last_the_stages_after_the_common_ones(device: str) -> None:
    common, own = ["--seed", "1"], ["--seed", "2"]
    made = specs(device=device, engine={"extra_args": common}, decode={"extra_args": own})
    assert made["decode-0"].argv[-4:] == (*common, *own)
    assert made["prefill-0"].argv[-2:] == (*common,)
    assert "2" not in made["prefill-0"].argv[-2:]


# Environment ----------------------------------------------------------------------------------


def test_engines_talk_on_the_loopback_each_on_a_port_of_its_own() -> None:
    made = specs(encode={"replicas": 3}, prefill={"replicas": 3}, decode={"replicas": 3})
    ports = {int(spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for spec in made.values()}
    assert len(ports) == 9
    assert all(1024 <= port <= 65535 for port in ports)
    for spec in made.values():
        assert spec.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert spec.env["UCX_NET_DEVICES"] == "lo"


def test_the_kernel_cannot_give_an_engines_port_to_another_process() -> None:
    low, high = map(int, launch.PORT_RANGE.read_text().split())
    assert all(not low <= port <= high for port in launch.free_ports(50))


def test_a_port_in_use_is_not_given_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for spec in specs().values()}
        assert str(taken.getsockname()[1]) not in ports


def test_the_operators_choice_of_network_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert specs()["decode-0"].env["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_temporary_files_of_engines_go_where_they_are_swept() -> None:
    for spec in specs().values():
        assert spec.env["TMPDIR"] == spec.env["VLLM_RPC_BASE_PATH"] == str(RUN)


@pytest.mark.parametrize("inherited", [None, "/one:/two"])
def test_engines_find_our_fixes_before_whatever_is_inherited(
    monkeypatch: pytest.MonkeyPatch, inherited: str | None
) -> None:
    if inherited is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", inherited)
    first, *rest = specs()["encode-0"].env["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file()
    assert rest == (inherited.split(":") if inherited else [])


def test_connections_outlive_the_routers_patience() -> None:
    from easerve.engines.vllm.client import KEEPALIVE_S

    for spec in specs().values():
        assert float(spec.env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > KEEPALIVE_S


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_a_socket_path_that_the_kernel_would_cut_is_an_error(length: int, fits: bool) -> None:
    longest = "/prefill-0.ec.sock"
    run = Path("/" + "x" * (length - len(longest) - 1))
    if fits:
        inboxes = [spec.inbox for spec in specs(run=run).values() if spec.inbox]
        assert [len(str(inbox)) for inbox in inboxes] == [length]
    else:
        with pytest.raises(ConfigError, match=r"prefill-0\.ec\.sock: too long for a Unix socket"):
            specs(run=run)


def test_another_start_is_the_same_but_for_a_port_that_is_free() -> None:
    spec = specs(local_prefill={})["local-prefill-0"]
    again = spec.again()
    ports = [int(each.env[launch.SIDE_CHANNEL_PORT]) for each in (spec, again)]
    assert ports[0] != ports[1]
    assert dict(again.env) == {**spec.env, launch.SIDE_CHANNEL_PORT: str(ports[1])}
    assert (again.argv, again.socket, again.inbox) == (spec.argv, spec.socket, spec.inbox)
    assert (again.log, again.beside) == (spec.log, spec.beside)


def test_the_fork_server_is_told_the_model_and_where_its_socket_goes() -> None:
    command = launch.fork_server_command("LlavaForConditionalGeneration", "llava")
    assert command[-3:] == ("{fd}", "LlavaForConditionalGeneration", "llava")

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easerve.cli import serve
from easerve.config import Deployment, Partition, Policy
from easerve.engines.partition.setup import SETUP
from easerve.engines.protocol import Division, Driven
from easerve.engines.vllm import memory, models
from easerve.engines.vllm.models import CAPABILITIES, ModelInfo

from .conftest import Easerve, Ended


@pytest.fixture
def read(easerve: Easerve, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``easerve serve`` up to the deployment that it would serve."""
    seen: list[Deployment] = []

    def run(deployment: Deployment, _: Path | None = None) -> int:
        seen.append(deployment)
        return 0

    def words(*words: str | Path) -> Deployment:
        ended = easerve("serve", *words)
        assert ended.code == 0, ended.err
        return seen.pop()

    monkeypatch.setattr(serve, "run", run)
    return words


def assert_refused(ended: Ended, message: str) -> None:
    """A usage error in one line on stderr, without a traceback."""
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("easerve: ")
    assert message in ended.err
    assert "Traceback" not in ended.err


# Wrong input ----------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_named(easerve: Easerve) -> None:
    assert_refused(easerve("serve", "nosuch.yaml"), "nosuch.yaml: No such file or directory")


def test_a_model_folder_that_is_not_there_is_named(easerve: Easerve) -> None:
    assert_refused(easerve("serve", "./nosuch"), "model './nosuch': no such folder")


def test_a_folder_that_is_no_model_is_named(easerve: Easerve, tmp_path: Path) -> None:
    assert_refused(easerve("serve", tmp_path), "config.json")


def test_a_bad_file_is_named_with_its_key(easerve: Easerve, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("{model: owner/name, decode: {replica: 2}}")
    assert_refused(easerve("serve", path), f"{path}: decode.replica: unknown key; did you mean")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--topology", "1e1p"), "topology '1e1p': expected e.g. 1e1p1d"),
        (("--topology", "0e1p1d"), "topology '0e1p1d'"),
        (("--limit-mm-per-prompt", "{"), "--limit-mm-per-prompt: not JSON: '{'"),
        (("--limit-mm-per-prompt", "4"), "limits.limit_mm_per_prompt: "),
        (("--limit-mm-per-prompt", '{"image": "x"}'), "limits.limit_mm_per_prompt.image: "),
        (("--mm-processor-kwargs", "{max_pixels: 1}"), "--mm-processor-kwargs: not JSON: '{max"),
        (("--mm-processor-kwargs", ""), "--mm-processor-kwargs: not JSON: ''"),
        (("--mm-processor-kwargs", "4"), "engine.mm_processor_kwargs: "),
        (("--mm-processor-kwargs", "[1]"), "engine.mm_processor_kwargs: "),
        (("--enable-auto-tool-choice",), "enable_auto_tool_choice needs a tool_call_parser"),
        (("--remote-share", "2"), "command line: policy.remote_share: "),
        (("--remote-share", "0.5"), "policy.remote_share 0.5 needs a section local_prefill"),
        (("--port", "65536"), "command line: server.port: "),
        (("--when", "never"), "policy.when: Input should be 'none', 'greedy', 'fixed', 'fill', "),
        (("--admin-token", ""), "server.admin_token: "),
        (("--device", "tpu"), "device: Input should be 'cpu' or 'cuda'"),
        (("--gpu-memory-utilization", "2"), "encode.gpu_memory_utilization: "),
        (("--json",), "--json goes with --dry-run"),
        (("--tensor-parallel-size", "2"), "prefill.tensor_parallel_size needs device: cuda"),
    ],
)
def test_an_option_that_cannot_be_is_named(
    easerve: Easerve, words: tuple[str, ...], message: str
) -> None:
    assert_refused(easerve("serve", "owner/name", *words), message)


def test_a_chat_template_that_is_not_there_is_named(easerve: Easerve, model: Path) -> None:
    ended = easerve("serve", model, "--port", "0", "--chat-template", "nosuch.jinja")
    assert_refused(ended, "engine.chat_template: there is no file 'nosuch.jinja'")


def test_a_port_in_use_is_found_before_anything_is_started(easerve: Easerve, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = easerve("serve", model, "--port", str(port))
    assert_refused(ended, f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_host_that_is_not_ours_is_an_error(easerve: Easerve, model: Path) -> None:
    ended = easerve("serve", model, "--host", "192.0.2.1", "--port", "0")
    assert_refused(ended, "cannot listen on 192.0.2.1:0: ")


# Options --------------------------------------------------------------------------------------


def test_a_model_alone_is_served_with_the_defaults(read: Any) -> None:
    assert read("owner/name") == Deployment(model="owner/name")


def test_options_are_laid_over_the_file(read: Any, deployment: Path) -> None:
    made = read(
        *(deployment, "--topology", "2e1p3d", "--host", "::1", "--port", "0"),
        *("--served-model-name", "other", "--api-key", "secret", "--dtype", "float32"),
        *("--max-model-len", "512", "--limit-mm-per-prompt", '{"image": 3}'),
    )
    assert (made.encode.replicas, made.prefill.replicas, made.decode.replicas) == (2, 1, 3)
    assert (made.server.host, made.server.port, made.name) == ("::1", 0, "other")
    assert made.server.api_key.get_secret_value() == "secret"
    assert (made.engine.dtype, made.engine.max_model_len) == ("float32", 512)
    assert made.limits.limit_mm_per_prompt.image == 3


def test_the_rule_and_the_admins_token_are_options(read: Any, deployment: Path) -> None:
    made = read(deployment, "--when", "gap", "--admin-token", "secret")
    assert made.policy == Policy(when="gap")
    assert made.server.admin_token.get_secret_value() == "secret"
    assert made.server.api_key is None


@pytest.mark.parametrize("words", [(), ("--decision-log", "a.log")])
def test_a_decision_log_is_written_only_where_it_is_asked_for(
    easerve: Easerve, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    seen: list[Path | None] = []

    def run(_: Deployment, decision_log: Path | None) -> int:
        seen.append(decision_log)
        return 0

    monkeypatch.setattr(serve, "run", run)
    assert easerve("serve", "owner/name", *words).code == 0
    assert seen == [Path("a.log") if words else None]


def test_a_decision_log_that_cannot_be_written_is_named(
    easerve: Easerve, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "nosuch" / "log"
    ended = easerve("serve", model, "--port", "0", "--decision-log", path)
    assert_refused(ended, f"decision log {path}: No such file or directory")


TOOL_OPTIONS = (
    *("--chat-template", __file__, "--tool-call-parser", "hermes"),
    *("--enable-auto-tool-choice", "--reasoning-parser", "qwen3"),
    *("--mm-processor-kwargs", '{"max_pixels": 1000}'),
)


def test_options_of_templates_parsers_and_processors_are_taken(read: Any, deployment: Path) -> None:
    engine = read(deployment, *TOOL_OPTIONS).engine
    assert (engine.chat_template, engine.tool_call_parser) == (__file__, "hermes")
    assert (engine.enable_auto_tool_choice, engine.reasoning_parser) == (True, "qwen3")
    assert engine.mm_processor_kwargs == {"max_pixels": 1000}


@pytest.mark.parametrize("given", [{"size": None, "x": 1}, {"size": {}, "x": 1}])
def test_the_json_of_an_option_is_taken_as_it_is(read: Any, given: dict[str, Any]) -> None:
    engine = read("owner/name", "--mm-processor-kwargs", json.dumps(given)).engine
    assert engine.mm_processor_kwargs == given


def test_an_option_is_enough_where_the_file_has_the_other(
    read: Any, tmp_path: Path, deployment: Path
) -> None:
    path = tmp_path / "parser.yaml"
    path.write_text(deployment.read_text() + "engine: {tool_call_parser: hermes}")
    assert not read(path).engine.enable_auto_tool_choice
    engine = read(path, "--enable-auto-tool-choice").engine
    assert (engine.tool_call_parser, engine.enable_auto_tool_choice) == ("hermes", True)


def test_what_is_not_given_stays_as_the_file_says(read: Any, deployment: Path) -> None:
    made = read(deployment, "--port", "1")
    assert (made.name, made.prefill.replicas) == ("short", 2)


OFFLOADED = "local_prefill: {max_num_seqs: 9}\npolicy: {remote_share: 0.5}"


def test_local_prefill_and_its_share_are_options(
    read: Any, tmp_path: Path, deployment: Path
) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text(deployment.read_text() + OFFLOADED)
    assert read(deployment).local_prefill is None
    made = read(deployment, "--local-prefill", "--remote-share", "0")
    assert (made.local_prefill.max_num_seqs, made.policy.remote_share) == (256, 0)
    made = read(path, "--local-prefill", "--when", "gap")
    assert (made.local_prefill.max_num_seqs, made.policy.remote_share) == (9, 0.5)
    made = read(path, "--no-local-prefill", "--remote-share", "1")
    assert (made.local_prefill, made.policy.remote_share) == (None, 1)


def test_a_divided_device_and_its_rule_are_options(
    read: Any, tmp_path: Path, deployment: Path
) -> None:
    path = tmp_path / "divided.yaml"
    path.write_text(deployment.read_text() + DIVIDED)
    assert read(deployment).partition is None
    made = read(deployment, "--local-prefill", "--partition", "--how", "static")
    assert (made.partition, made.policy.how) == (Partition(), "static")
    made = read(path, "--how", "gate")
    assert (made.partition.patience_s, made.policy.how) == (0.5, "gate")
    made = read(path, "--no-partition")
    assert (made.partition, made.local_prefill is None) == (None, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--partition",), "partition needs a section local_prefill"),
        (("--local-prefill", "--how", "gate"), "policy.how needs a section partition"),
        (("--local-prefill", "--partition", "--how", "often"), "policy.how: Input should be 'dyn"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    easerve: Easerve, words: tuple[str, ...], message: str
) -> None:
    assert_refused(easerve("serve", "owner/name", *words), message)


def test_local_prefill_switched_off_leaves_a_share_that_cannot_be(
    easerve: Easerve, tmp_path: Path, deployment: Path
) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text(deployment.read_text() + OFFLOADED)
    assert_refused(easerve("serve", path, "--no-local-prefill"), "policy.remote_share 0.5 needs a")


@pytest.mark.parametrize(("words", "encode"), [((), 0.5), (("--local-prefill",), 0.9)])
def test_a_share_of_a_gpu_is_of_engines_that_have_one_to_themselves(
    read: Any, words: tuple[str, ...], encode: float
) -> None:
    made = read("owner/name", "--device", "cuda", "--gpu-memory-utilization", "0.5", *words)
    stages = (made.encode, made.prefill, made.decode)
    assert [stage.gpu_memory_utilization for stage in stages] == [encode, 0.5, 0.5]
    assert "gpu_memory_utilization" not in made.encode.model_fields_set or not words


def test_tensor_parallelism_is_for_the_language_model(read: Any) -> None:
    made = read("owner/name", "--device", "cuda", "--tensor-parallel-size", "2")
    stages = (made.encode, made.prefill, made.decode)
    assert [stage.tensor_parallel_size for stage in stages] == [1, 2, 2]


def test_environment_variables_are_options_which_words_overrule(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EASERVE_SERVE_PORT", "8123")
    monkeypatch.setenv("EASERVE_SERVE_API_KEY", "secret")
    made = read("owner/name")
    assert made.server.port == 8123
    assert made.server.api_key.get_secret_value() == "secret"
    assert read("owner/name", "--port", "8124").server.port == 8124


def test_a_bad_environment_variable_is_named(
    easerve: Easerve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EASERVE_SERVE_PORT", "high")
    ended = easerve("serve", "owner/name")
    assert ended.code == 2
    assert "Invalid value for '--port'" in ended.err


# Dry run --------------------------------------------------------------------------------------


def test_a_dry_run_shows_every_launch_and_the_memory_plan(
    easerve: Easerve, deployment: Path
) -> None:
    ended = easerve("serve", deployment, "--dry-run")
    assert ended.code == 0
    for name in ("encode-0", "prefill-0", "prefill-1", "decode-0"):
        assert f"# {name}\n" in ended.out
    assert ended.out.count("--served-model-name short") == 4
    assert "OMP_NUM_THREADS=1" in ended.out
    assert "Memory plan" in ended.out
    assert "?" in ended.out, "the folder has no weights"


def test_a_dry_run_as_json_is_one_object(easerve: Easerve, deployment: Path) -> None:
    ended = easerve("serve", deployment, "--dry-run", "--json")
    assert ended.code == 0
    shown = json.loads(ended.out)
    assert [engine["name"] for engine in shown["engines"]] == [
        *("encode-0", "prefill-0", "prefill-1", "decode-0"),
    ]
    first = shown["engines"][0]
    assert (first["stage"], first["devices"]) == ("encode", [])
    assert first["command"][0] == sys.executable
    assert first["env"]["OMP_NUM_THREADS"] == "1"
    assert [row["worker_id"] for row in shown["memory"]] == [e["name"] for e in shown["engines"]]
    assert shown["memory"][0]["weights"] is None


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_dry_run_shows_local_prefill_engines_and_no_secret(
    easerve: Easerve, deployment: Path, more: tuple[str, ...]
) -> None:
    words = ("--local-prefill", "--topology", "2e1p1d", "--dry-run", *more)
    ended = easerve("serve", deployment, *words)
    assert ended.code == 0, ended.err
    if not more:
        assert ended.out.index("# encode-1\n") < ended.out.index("# local-prefill-1\n")
        assert "EASERVE_EC_TOKEN='<secret>'" in ended.out
        assert "embeddings" not in ended.out, "they take nothing of a device here"
        return
    shown = json.loads(ended.out)
    beside = [(engine["name"], engine["beside"]) for engine in shown["engines"]]
    assert beside[:2] == [("encode-0", []), ("encode-1", [])]
    assert beside[2:4] == [("local-prefill-0", ["encode-0"]), ("local-prefill-1", ["encode-1"])]
    assert beside[4:] == [("prefill-0", []), ("decode-0", [])]
    assert [row["worker_id"] for row in shown["memory"]] == [name for name, _ in beside]
    assert shown["memory"][2]["beside"] == ["encode-0"]
    tokens = {engine["env"].get("EASERVE_EC_TOKEN") for engine in shown["engines"]}
    assert tokens == {"<secret>", None}


def test_a_dry_run_shows_how_a_gpu_is_divided(
    easerve: Easerve, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = ModelInfo(
        CAPABILITIES["LlavaForConditionalGeneration"],
        encoder_bytes=1 << 30,
        language_bytes=14 << 30,
        kv_bytes_per_token=1 << 17,
    )
    monkeypatch.setattr(models, "inspect", lambda _: info)
    monkeypatch.setattr(memory, "detect_gpu_bytes", lambda: 48 << 30)
    words = (model, "--device", "cuda", "--local-prefill", "--dry-run")
    ended = easerve("serve", *words)
    assert ended.code == 0, ended.err
    rows = {cells[1]: cells[2:-1] for line in ended.out.splitlines() if (cells := row(line))}
    assert rows["encode-0"] == ["0", "1.00", "0.00", "1.50", "0.50", "3.36", "?"]
    assert rows["local-prefill-0"] == ["0", "14.00", "23.34", "1.50", "1.00", "39.84", "191,201"]
    shown = commands(easerve("serve", *words, "--json"))
    assert after(shown["encode-0"], "--gpu-memory-utilization") == "0.07"
    assert after(shown["local-prefill-0"], "--gpu-memory-utilization") == "0.83"


DIVIDED = "local_prefill: {}\npartition: {driver: gate, patience_s: 0.5}\n"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_dry_run_shows_which_engines_divide_a_device(
    easerve: Easerve, deployment: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    path = tmp_path / "divided.yaml"
    path.write_text(deployment.read_text() + DIVIDED)
    ended = easerve("serve", path, "--dry-run", *more)
    assert (ended.code, ended.err) == (0, "")
    if not more:
        assert ended.out.count(f"{SETUP}=") == 2
        assert "--worker-cls easerve.engines.vllm.cpu_worker.CpuPrefillWorker" in ended.out
        return
    shown = {engine["name"]: engine["env"] for engine in json.loads(ended.out)["engines"]}
    told = {name: env[SETUP] for name, env in shown.items() if SETUP in env}
    assert list(told) == ["encode-0", "local-prefill-0"]
    setup = json.loads(told["encode-0"])
    assert (setup["cell"], setup["driver"]) == ("/run/easerve/encode-0.cell", "gate")
    assert setup["patience_s"] == 0.5
    workers = {name: after(words, "--worker-cls") for name, words in commands(ended).items()}
    assert workers["encode-0"] == "easerve.engines.vllm.cpu_worker.CpuEncodeWorker"
    assert workers["prefill-0"] is None


def test_a_driver_that_is_not_for_the_device_is_refused(
    easerve: Easerve, deployment: Path, tmp_path: Path
) -> None:
    path = tmp_path / "divided.yaml"
    path.write_text(deployment.read_text() + DIVIDED.replace("gate", "priority"))
    assert_refused(easerve("serve", path, "--dry-run"), "partition.driver priority is not for")


CORES = Driven("cpu", "cores by affinity", 4, (1, 2, 3))
GATE = Driven("gate", "cpu: one core", 1, ())


@pytest.mark.parametrize(
    ("encode", "prefill", "said"),
    [
        (CORES, CORES, "by cpu (cores by affinity): 4 units, 3 at most for encode"),
        (CORES, None, "by cpu (cores by affinity): 4 units, 3 at most for encode"),
        (GATE, GATE, "device divided by gate (cpu: one core)"),
        (CORES, GATE, "by one engine only: encode by cpu, prefill by gate"),
        (None, None, "do not say how"),
    ],
)
def test_it_is_said_by_what_a_device_is_divided(
    encode: Driven | None, prefill: Driven | None, said: str
) -> None:
    assert said in serve.describe(Division(encode, prefill, {}))


def row(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.split("│")] if line.startswith("│") else []


def commands(ended: Ended) -> dict[str, list[str]]:
    """The command of each engine that a dry run shows."""
    assert ended.code == 0, ended.err
    return {engine["name"]: engine["command"] for engine in json.loads(ended.out)["engines"]}


def after(command: list[str], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


def test_options_reach_the_commands_that_a_dry_run_shows(
    easerve: Easerve, deployment: Path
) -> None:
    shown = commands(easerve("serve", deployment, *TOOL_OPTIONS, "--dry-run", "--json"))
    assert list(shown) == ["encode-0", "prefill-0", "prefill-1", "decode-0"]
    for name, command in shown.items():
        assert after(command, "--chat-template") == __file__
        assert after(command, "--tool-call-parser") == "hermes"
        assert after(command, "--reasoning-parser") == "qwen3"
        assert "--enable-auto-tool-choice" in command
        processor = '{"max_pixels": 1000}' if name == "encode-0" else None
        assert after(command, "--mm-processor-kwargs") == processor


@pytest.mark.parametrize(("tower", "limited"), [("clip_vision_model", True), ("pixtral", False)])
def test_a_dry_run_knows_which_models_media_go_to_prefill(
    easerve: Easerve, model: Path, tower: str, limited: bool
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["vision_config"] = {"model_type": tower}
    (model / "config.json").write_text(json.dumps(config))
    processor = ("--mm-processor-kwargs", '{"x": 1}')
    shown = commands(easerve("serve", model, *processor, "--dry-run", "--json"))
    assert ("--limit-mm-per-prompt" in shown["prefill-0"]) is limited
    assert ("--mm-processor-kwargs" in shown["prefill-0"]) is not limited
    assert "--limit-mm-per-prompt" in shown["decode-0"]
    assert "--mm-processor-kwargs" not in shown["decode-0"]


@pytest.mark.parametrize(
    ("architecture", "why"), [("Qwen2VLForConditionalGeneration", "M-RoPE"), ("Other", "what can:")]
)
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_model_that_is_not_served_is_refused_with_the_reason(
    easerve: Easerve, model: Path, architecture: str, why: str, words: tuple[str, ...]
) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    ended = easerve("serve", model, *words)
    assert_refused(ended, f"{architecture} cannot be served by separate stages yet")
    assert why in ended.err


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_plan_that_cannot_hold_fails_after_it_is_shown(
    easerve: Easerve, tmp_path: Path, model: Path, more: tuple[str, ...]
) -> None:
    path = tmp_path / "d.yaml"
    share = "{devices: [[0]], gpu_memory_utilization: 0.6}"
    path.write_text(f"{{model: {model}, device: cuda, encode: {share}, decode: {share}}}")
    ended = easerve("serve", path, "--dry-run", *more)
    assert ended.code == 2
    assert "decode-0" in ended.out
    assert "GPU 0: gpu_memory_utilization encode-0 0.6 + decode-0 0.6 = 1.2" in ended.err


def test_a_model_that_does_not_fit_is_refused_before_anything_is_started(
    easerve: Easerve, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CUDA_ACTIVATION_BYTES", 80 << 30)
    path = tmp_path / "d.yaml"
    path.write_text(f"{{model: {model}, device: cuda, gpu_memory: 48GiB}}")
    assert_refused(easerve("serve", path), "encode-0: weights 0.00 GiB and activations 80.00 GiB")


def test_the_command_ends_with_the_code_of_its_error() -> None:
    command = [sys.executable, "-m", "easerve.cli.main", "serve", "nosuch.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "easerve: nosuch.yaml: No such file or directory\n"

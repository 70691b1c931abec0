import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from easerve.config import (
    ConfigError,
    Deployment,
    EngineSection,
    Partition,
    Policy,
    Section,
    build,
    explain,
    merge,
    parse_topology,
    read_file,
)
from easerve.policy.batching import RULES as WHEN
from easerve.policy.partition import RULES as HOW
from easerve.policy.share import RULES as WHERE

EXAMPLE = Path(__file__).parents[1] / "examples/tiny-llava.yaml"
OFFLOAD = EXAMPLE.with_name("tiny-llava-offload.yaml")
PARTITION = EXAMPLE.with_name("tiny-llava-partition.yaml")
CUDA = {"model": "m", "device": "cuda"}


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def load(path: Path) -> Deployment:
    return build(read_file(path), str(path))


def test_the_example_loads() -> None:
    deployment = load(EXAMPLE)
    assert deployment.name == "tiny-llava"
    assert deployment.uses_fork_server
    assert deployment.limits.max_body == 32 << 20
    assert deployment.decode.kv_cache_memory == 64 << 20


def test_the_examples_limits_and_policy_are_the_defaults_as_it_says() -> None:
    example, default = load(EXAMPLE), build({"model": "m"}, "test")
    assert (example.limits, example.policy) == (default.limits, default.policy)
    assert example.server == default.server


def test_the_offload_example_has_local_prefill_and_is_the_other_in_all_else() -> None:
    offload, example = load(OFFLOAD), load(EXAMPLE)
    assert offload.local_prefill is not None
    assert offload.policy.remote_share == 0.55
    changed = {"local_prefill": offload.local_prefill, "policy": offload.policy}
    engine = {"engine": example.engine.model_copy(update={"fork_server": None})}
    assert example.model_copy(update=changed | engine) == offload


def test_the_partition_example_divides_a_device_as_the_defaults_say() -> None:
    divided = load(PARTITION)
    assert divided.partition == Partition()
    assert (divided.policy.how, divided.policy.encode_target_s) == ("dynamic", 0.025)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("driver", ["auto", "gate", "cpu", "green-context", "mps-static"])
def test_a_driver_is_for_one_device_or_for_both(device: str, driver: str) -> None:
    content = {"model": "m", "device": device, "local_prefill": {}, "partition": {"driver": driver}}
    if driver in ("auto", "gate") or (driver == "cpu") is (device == "cpu"):
        partition = build(content, "test").partition
        assert partition is not None
        assert partition.driver == driver
    else:
        with pytest.raises(ConfigError, match=f"partition.driver {driver} is not for .*{device}$"):
            build(content, "test")


def test_a_profile_is_named_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = "{model: m, local_prefill: {}, partition: {profile: profiles/a.yaml}}"
    partition = load(write(tmp_path, text)).partition
    assert partition is not None
    assert partition.profile == "../profiles/a.yaml"


@pytest.mark.parametrize(("text", "has"), [("", False), (": ", False), (": {}", True)])
def test_local_prefill_is_there_where_the_file_names_it(
    tmp_path: Path, text: str, has: bool
) -> None:
    made = load(write(tmp_path, "model: m\n" + (f"local_prefill{text}" if text else "")))
    assert (made.local_prefill is not None) is has
    if made.local_prefill is not None:
        assert made.local_prefill.gpu_memory_utilization is None
        assert made.local_prefill.max_num_seqs == made.prefill.max_num_seqs


def test_prefill_engines_keep_a_gib_of_embeddings_and_wait_half_a_minute() -> None:
    engine = build({"model": "m"}, "test").engine
    assert (engine.embedding_cache, engine.embedding_timeout_s) == (1 << 30, 30)


def test_a_share_of_both_or_of_neither_is_taken() -> None:
    for given in ({}, {"gpu_memory_utilization": 0.4}):
        made = build(CUDA | {"encode": given, "local_prefill": given}, "test")
        assert made.local_prefill is not None
        assert made.local_prefill.gpu_memory_utilization == given.get("gpu_memory_utilization")


def test_a_model_alone_is_a_deployment() -> None:
    deployment = build({"model": "owner/name"}, "test")
    assert deployment.name == "owner/name"
    assert deployment.device == "cpu"
    assert deployment.server.host == "127.0.0.1"


def test_a_deployment_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        build({"model": "m"}, "test").model = "n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not YAML"),
        ("model: \0", "not YAML"),
        ("- model", "expected a mapping"),
        ("just words", "expected a mapping"),
        ("", "expected a mapping"),
        ("device: cpu", "model: Field required"),
        ("model: ''", "model: String should have at least 1 character"),
        ("model: 5", r"model: Input should be a valid string \(got 5\)"),
        ("{model: m, modle: n}", "modle: unknown key; did you mean 'model'?"),
        ("{model: m, encode: {replica: 2}}", "encode.replica: unknown key; did you mean 'repl"),
        ("{model: m, policy: {zzz: 2}}", "policy.zzz: unknown key; known keys: when, order, max_b"),
        ("{model: m, policy: {wehn: gap}}", "policy.wehn: unknown key; did you mean 'when'?"),
        ("{model: m, 1: 2}", "1: "),
        ("{model: m, server: {port: high}}", r"server.port: .*integer.*\(got 'high'\)"),
        ("{model: m, server: {port: 65536}}", "server.port: .*less than or equal to 65535"),
        ("{model: m, server: 8000}", "server: "),
        ("{model: m, encode: {replicas: 0}}", r"encode.replicas: .*\(got 0\)"),
        ("{model: m, decode: {kv_cache_memory: lots}}", "decode.kv_cache_memory: .*'lots'"),
        ("{model: m, prefill: {gpu_memory_utilization: 1.1}}", "prefill.gpu_memory_utilization: "),
        ("{model: m, policy: {remote_share: 1.5}}", r"policy.remote_share: .*equal to 1 .*got 1.5"),
        ("{model: m, policy: {remote_share: -0.1}}", r"policy.remote_share: .*equal to 0 .*-0.1"),
        ("{model: m, policy: {remote_share: .nan}}", r"policy.remote_share: .*\(got nan\)"),
        ("{model: m, policy: {where: random}}", r"policy.where: .*'jsq' \(got 'random'\)"),
        ("{model: m, policy: {band_kappa: 0.4}}", r"policy.band_kappa: .*equal to 0.5 \(got 0.4\)"),
        ("{model: m, policy: {band_kappa: .inf}}", r"policy.band_kappa: .*\(got inf\)"),
        ("{model: m, policy: {offload_seed: -1}}", r"policy.offload_seed: .*\(got -1\)"),
        ("{model: m, policy: {offload_seed: x}}", r"policy.offload_seed: .*integer.*\(got 'x'\)"),
        ("{model: m, policy: {share_trim: maybe}}", r"policy.share_trim: .*boolean.*'maybe'"),
        ("{model: m, policy: {adapt_period_s: 0.5}}", r"policy.adapt_period_s: .* or equal to 1"),
        ("{model: m, policy: {adapt_factor: 0.5}}", r"policy.adapt_factor: .* or equal to 1"),
        ("{model: m, policy: {spill_guard_s: 0}}", r"policy.spill_guard_s: .*greater than 0"),
        ("{model: m, policy: {when: never}}", r"policy.when: .*'gap' or 'slack' \(got 'never'\)"),
        ("{model: m, policy: {order: lifo}}", r"policy.order: .*'deadline' \(got 'lifo'\)"),
        ("{model: m, policy: {max_batch_items: 0}}", r"policy.max_batch_items: .*\(got 0\)"),
        ("{model: m, policy: {max_batch_items: 1025}}", "policy.max_batch_items: .*equal to 1024"),
        ("{model: m, policy: {timeout_s: 1.5}}", r"policy.timeout_s: .*equal to 1 \(got 1.5\)"),
        ("{model: m, policy: {gap_k: -1}}", r"policy.gap_k: .*equal to 0 \(got -1\)"),
        ("{model: m, policy: {encoder_value: x}}", r"policy.encoder_value: .*number.*\(got 'x'\)"),
        ("{model: m, policy: {spread: some}}", r"policy.spread: .*boolean.*\(got 'some'\)"),
        ("{model: m, policy: {run_ahead: 17}}", r"policy.run_ahead: .*equal to 16 \(got 17\)"),
        ("{model: m, policy: {flow: 2}}", r"policy.flow: .*boolean.*\(got 2\)"),
        ("{model: m, policy: {ttft_slo_s: 0}}", r"policy.ttft_slo_s: .*greater than 0 \(got 0\)"),
        ("{model: m, policy: {ttft_slo_s: .inf}}", r"policy.ttft_slo_s: .*\(got inf\)"),
        ("{model: m, policy: {tpot_slo_s: .nan}}", r"policy.tpot_slo_s: .*\(got nan\)"),
        ("{model: m, policy: {prefill_ahead_s: 1e300}}", r"policy.prefill_ahead_s: .*equal to 1"),
        ("{model: m, policy: {max_queue_s: }}", r"policy.max_queue_s: .*number \(got None\)"),
        ("{model: m, policy: {timeout_s: .nan}}", r"policy.timeout_s: .*\(got nan\)"),
        ("{model: m, limits: {request_timeout_s: .inf}}", "limits.request_timeout_s: .*got inf"),
        ("{model: m, encode: {max_num_seqs: 0}}", r"encode.max_num_seqs: .*\(got 0\)"),
        ("{model: m, encode: {max_num_seqs: }}", r"encode.max_num_seqs: .*\(got None\)"),
        ("{model: m, encode: {max_num_batched_tokens: 0}}", "encode.max_num_batched_tokens: "),
        ("{model: m, server: {admin_token: ''}}", "server.admin_token: .*at least 1"),
        ("{model: m, server: {admin_token: 5}}", "server.admin_token: .*string"),
        ("{model: m, device: tpu}", r"device: Input should be 'cpu' or 'cuda' \(got 'tpu'\)"),
        ("{model: m, limits: {limit_mm_per_prompt: {image: -1}}}", "limit_mm_per_prompt.image: "),
        (
            "{model: m, prefill: {tensor_parallel_size: 2}}",
            "prefill.tensor_parallel_size needs",
        ),
        ("{model: m, gpu_memory: 1GiB}", "gpu_memory needs device: cuda"),
        (
            "{model: m, engine: {enable_auto_tool_choice: true}}",
            "engine: enable_auto_tool_choice needs a tool_call_parser",
        ),
        ("{model: m, engine: {mm_processor_kwargs: 5}}", "engine.mm_processor_kwargs: .*got 5"),
        ("{model: m, engine: {chat_template: 5}}", r"engine.chat_template: .*string \(got 5\)"),
        ("{model: m, engine: {tool_parser: x}}", "engine.tool_parser: unknown key; did you mean"),
        ("{model: m, encode: {gpu_memory_utilization: 1}}", "gpu_memory_utilization needs device"),
        ("{model: m, server: {api_key: ''}}", "server.api_key: .*at least 1"),
        ("{model: m, limits: {limit_mm_per_prompt: {video: 1}}}", "limit_mm_per_prompt.video: "),
        ("{model: m, decode: {devices: [[0]]}}", "decode.devices needs device: cuda"),
        (
            "{model: m, device: cuda, engine: {fork_server: true}}",
            "engine.fork_server needs device: cpu",
        ),
        (
            "{model: m, device: cuda, decode: {replicas: 2, devices: [[0]]}}",
            "decode: devices names 1 engines, replicas 2",
        ),
        (
            "{model: m, device: cuda, decode: {tensor_parallel_size: 2, devices: [[3, 3]]}}",
            r"decode: devices \[3, 3\] must be 2 different GPUs",
        ),
        (
            "{model: m, device: cuda, decode: {devices: [[0, 1]]}}",
            r"decode: devices \[0, 1\] must be 1 different GPUs",
        ),
        ("{model: m, engine: {embedding_cache: 1 pie}}", "engine.embedding_cache: .*'1 pie'"),
        ("{model: m, engine: {embedding_timeout_s: 0}}", "engine.embedding_timeout_s: .*than 0"),
        ("{model: m, local_prefill: {replicas: 2}}", "local_prefill.replicas: unknown key; known"),
        ("{model: m, local_prefill: {max_num_seq: 2}}", "seq: unknown key; did you mean 'max_num"),
        ("{model: m, local_prefill: {max_num_seqs: 0}}", r"local_prefill.max_num_seqs: .*got 0"),
        ("{model: m, local_prefill: 2}", "local_prefill: "),
        (
            "{model: m, local_prefill: {tensor_parallel_size: 2}}",
            "local_prefill.tensor_parallel_size needs device: cuda",
        ),
        (
            "{model: m, local_prefill: {gpu_memory_utilization: 0.5}}",
            "local_prefill.gpu_memory_utilization needs device: cuda",
        ),
        (
            "{model: m, device: cuda, local_prefill: {tensor_parallel_size: 2}}",
            "local_prefill.tensor_parallel_size 2 does not divide the 1 GPUs of encode",
        ),
        (
            "{model: m, device: cuda, local_prefill: {}, encode: {replicas: 2,"
            " devices: [[0], [0]]}}",
            "encode.devices overlap: local_prefill needs",
        ),
        *(
            (f"{{model: m, device: cuda, local_prefill: {{}}, {section}}}", "give both or neither")
            for section in (
                "encode: {gpu_memory_utilization: 0.1}",
                "local_prefill: {gpu_memory_utilization: 0.1}",
            )
        ),
        *(
            (f"{{model: m, policy: {{remote_share: 0.5}}{more}}}", "remote_share 0.5 needs a secti")
            for more in ("", ", local_prefill: ", ", local_prefill: null")
        ),
        ("{model: m, partition: {}}", "partition needs a section local_prefill"),
        *(
            (f"{{model: m, policy: {{{knob}}}}}", f"policy.{knob.split(':')[0]} needs a section pa")
            for knob in ("how: gate", "encode_target_s: 0.025", "encode_units: ")
        ),
        (
            "{model: m, device: cuda, local_prefill: {}, partition: {},"
            " encode: {tensor_parallel_size: 2}}",
            "encode.tensor_parallel_size 2: partition needs 1",
        ),
        (
            "{model: m, device: cuda, local_prefill: {tensor_parallel_size: 2}, partition: {},"
            " encode: {replicas: 2}}",
            "local_prefill.tensor_parallel_size 2: partition needs 1",
        ),
        *(
            (f"{{model: m, local_prefill: {{}}, partition: {{{key}}}}}", message)
            for key, message in (
                ("drivr: cpu", "partition.drivr: unknown key; did you mean 'driver'?"),
                ("driver: smctrl", r"partition.driver: Input should be 'auto', .*\(got 'smctrl'\)"),
                ("profile: 5", r"partition.profile: .*string.*\(got 5\)"),
                ("min_prefill_units: 0", r"partition.min_prefill_units: .*\(got 0\)"),
                ("hold_s: 1.5", r"partition.hold_s: .*equal to 1 \(got 1.5\)"),
                ("patience_s: -1", r"partition.patience_s: .*equal to 0 \(got -1\)"),
            )
        ),
        ("{model: m, policy: {how: never}}", r"policy.how: .*'gate' \(got 'never'\)"),
        ("{model: m, policy: {encode_target_s: 0}}", r"policy.encode_target_s: .*\(got 0\)"),
        ("{model: m, policy: {encode_units: 0}}", r"policy.encode_units: .*\(got 0\)"),
        ("{model: m, policy: {encode_units: 1025}}", r"policy.encode_units: .*\(got 1025\)"),
        ("{model: m, encode: {cores: [[0], [1]]}}", "encode: cores names 2 engines, replicas 1"),
        ("{model: m, encode: {cores: [[]]}}", "encode: cores: an engine needs at least one"),
        ("{model: m, encode: {cores: [[-1]]}}", r"encode.cores.0.0: .*\(got -1\)"),
        ("{model: m, device: cuda, decode: {cores: [[0]]}}", "decode.cores needs device: cpu"),
    ],
)
def test_a_bad_file_is_an_error_that_names_file_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "nosuch.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"^{path}: {why}"):
            read_file(path)


def test_a_binary_file_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="not YAML"):
        read_file(path)


def test_every_fault_of_a_file_is_told_at_once() -> None:
    content = {"model": "m", "server": {"port": -1}, "encode": {"replicas": 0}}
    with pytest.raises(ConfigError) as error:
        build(content, "f.yaml")
    first, second = str(error.value).splitlines()
    assert first.startswith("f.yaml: server.port: ")
    assert second.startswith("f.yaml: encode.replicas: ")


def test_devices_that_match_are_taken() -> None:
    decode = {"replicas": 2, "tensor_parallel_size": 2, "devices": [[0, 1], [2, 3]]}
    assert build(CUDA | {"decode": decode}, "test").decode.devices == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("device", "fork_server", "uses"),
    [("cpu", None, True), ("cpu", True, True), ("cpu", False, False), ("cuda", None, False)],
)
def test_cpu_engines_are_forked_unless_told_otherwise(
    device: str, fork_server: bool | None, uses: bool
) -> None:
    content = {"model": "m", "device": device, "engine": {"fork_server": fork_server}}
    assert build(content, "test").uses_fork_server is uses


@pytest.mark.parametrize("key", ["api_key", "admin_token"])
def test_a_secret_is_not_shown(key: str) -> None:
    assert "hunter2" not in repr(build({"model": "m", "server": {key: "hunter2"}}, "test"))


def test_a_policy_is_read(tmp_path: Path) -> None:
    text = """
model: m
policy: {when: fixed, timeout_s: 0.02, order: deadline, ttft_slo_s: 2, tpot_slo_s: null}
"""
    policy = load(write(tmp_path, text)).policy
    assert (policy.when, policy.timeout_s, policy.order) == ("fixed", 0.02, "deadline")
    assert (policy.ttft_slo_s, policy.tpot_slo_s) == (2, None)
    assert policy.max_batch_items == Policy().max_batch_items


def test_every_rule_can_be_named() -> None:
    for knob, rules in (("when", WHEN), ("where", WHERE), ("how", HOW)):
        content = {"model": "m", "local_prefill": {}, "partition": {}}
        named = [build(content | {"policy": {knob: rule}}, "test").policy for rule in rules]
        assert [getattr(policy, knob) for policy in named] == list(rules)


def test_what_is_wrong_in_a_section_is_named_within_it() -> None:
    with pytest.raises(ValidationError) as error:
        Policy.model_validate({"wehn": "gap", "gap_k": "x"})
    first, second = explain(error.value, Policy)
    assert first.startswith("gap_k: ")
    assert second == "wehn: unknown key; did you mean 'when'?"


@pytest.mark.parametrize(
    ("text", "replicas"),
    [("1e1p1d", (1, 1, 1)), (" 2E1P13D ", (2, 1, 13)), ("10e2p3d", (10, 2, 3))],
)
def test_a_topology_gives_the_replicas(text: str, replicas: tuple[int, int, int]) -> None:
    stages = zip(("encode", "prefill", "decode"), replicas, strict=True)
    assert parse_topology(text) == {stage: {"replicas": count} for stage, count in stages}


@pytest.mark.parametrize(
    "text", ["", "1e1p", "0e1p1d", "1e00p1d", "1p1e1d", "1e 1p 1d", "-1e1p1d", "1e1p1d1x"]
)
def test_a_bad_topology_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="expected e") as error:
        parse_topology(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2}, {"a": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
    ],
)
def test_merge_goes_section_by_section(
    base: dict[str, Any], over: dict[str, Any], merged: dict[str, Any]
) -> None:
    before = repr(base)
    assert merge(base, over) == merged
    assert repr(base) == before


@pytest.mark.parametrize(("given", "name"), [(None, "../model"), ("short", "short")])
def test_a_models_folder_is_seen_from_the_file_and_its_name_does_not_depend_on_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, name: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "d.yaml"
    path.write_text(json.dumps({"model": "../model", "served_model_name": given}))
    for place in (tmp_path, tmp_path / "files", Path("/")):
        monkeypatch.chdir(place)
        deployment = build(read_file(path), str(path))
        assert Path(deployment.model).resolve() == tmp_path / "model"
        assert deployment.name == name


def test_a_model_that_is_no_folder_beside_the_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("model: owner/name")
    assert read_file(path) == {"model": "owner/name"}


def test_engines_are_told_nothing_of_templates_parsers_and_processors_by_default() -> None:
    engine = build({"model": "m"}, "test").engine
    assert (engine.chat_template, engine.tool_call_parser, engine.reasoning_parser) == (None,) * 3
    assert (engine.enable_auto_tool_choice, engine.mm_processor_kwargs) == (False, {})


def test_templates_parsers_and_processors_are_read(tmp_path: Path) -> None:
    text = """
model: m
engine:
  tool_call_parser: hermes
  enable_auto_tool_choice: true
  reasoning_parser: qwen3
  mm_processor_kwargs: {max_pixels: 1000, nested: {do_resize: false}}
"""
    engine = load(write(tmp_path, text)).engine
    assert (engine.tool_call_parser, engine.enable_auto_tool_choice) == ("hermes", True)
    assert engine.reasoning_parser == "qwen3"
    assert engine.mm_processor_kwargs == {"max_pixels": 1000, "nested": {"do_resize": False}}


def test_a_parser_does_not_switch_on_auto_tool_choice() -> None:
    engine = build({"model": "m", "engine": {"tool_call_parser": "hermes"}}, "test").engine
    assert not engine.enable_auto_tool_choice


@pytest.mark.parametrize("absolute", [False, True])
def test_a_chat_template_is_seen_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    (tmp_path / "files").mkdir()
    template = tmp_path / "mine.jinja"
    given = str(template) if absolute else "../mine.jinja"
    path = tmp_path / "files" / "d.yaml"
    path.write_text(json.dumps({"model": "m", "engine": {"chat_template": given, "dtype": "x"}}))
    for place in (tmp_path, tmp_path / "files", Path("/")):
        monkeypatch.chdir(place)
        engine = load(path).engine
        assert engine.chat_template is not None
        assert Path(engine.chat_template).resolve() == template
        assert engine.dtype == "x"


class _Named(Section):
    sizes: dict[str, EngineSection] | None = None
    by_number: Mapping[int, EngineSection] | None = None
    rows: tuple[EngineSection, ...] | None = None


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ({"sizes": {"a": {"replica": 1}}}, "sizes.a.replica"),
        ({"by_number": {2: {"replica": 1}}}, "by_number.2.replica"),
        ({"rows": [{}, {"replica": 1}]}, "rows.1.replica"),
    ],
)
def test_keys_within_lists_and_mappings_are_known(content: object, path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Named.model_validate(content)
    (line,) = explain(caught.value, _Named)
    assert line.startswith(f"{path}: unknown key; known keys: tensor_parallel_size")

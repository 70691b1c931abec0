"""The deployment file: YAML -> one frozen, validated tree. Each default is written once, here.

Reading it starts nothing and asks no hardware. An error names the file and the path of the key.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # no inf: the core counts nanoseconds
Share = Annotated[float, Field(gt=0, le=1)]
GPU_KEYS = frozenset({"devices", "gpu_memory_utilization", "tensor_parallel_size"})
PARTITION_KNOBS = frozenset({"how", "encode_target_s", "encode_units"})
SECRETS = (("api_key",), ("admin_token",))
FILES = ("model", "engine.chat_template", "partition.profile")
"""Keys that may name a file or folder, relative to the deployment file."""
MIB, GIB = 1 << 20, 1 << 30


class ConfigError(Exception):
    """The deployment cannot be used; the text says where and why."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


AnySection = TypeVar("AnySection", bound=Section)


class Server(Section):
    """The public HTTP endpoint. Listens on loopback unless told otherwise."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    admin_token: Annotated[SecretStr, Field(min_length=1)] | None = None
    """Opens /admin to those who send it; None: there is no /admin."""


class Engine(Section):
    """What all engines share. ``extra_args`` go to vLLM as they are."""

    dtype: str = "auto"
    max_model_len: Positive | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    """A file with a chat template, instead of the model's own."""
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None
    mm_processor_kwargs: dict[str, Any] = {}
    """How the model's processor treats media, e.g. ``{max_pixels: 1000000}``; for all requests."""
    startup_timeout_s: Seconds = 600
    embedding_cache: ByteSize = ByteSize(GIB)
    """Embeddings that a prefill engine keeps, for requests that are still to come."""
    embedding_timeout_s: Seconds = 30
    """How long a prefill waits for embeddings that are on their way, before it fails."""
    media_cache: ByteSize = ByteSize(GIB)
    """Processed media that an encoder keeps, both of its processes as much; vLLM keeps 4 GiB."""
    extra_args: tuple[str, ...] = ()
    fork_server: bool | None = None
    """Fork engines from one process that has imported vLLM (CPU only). None: on a CPU, yes."""
    cpu_threads: Positive = 1
    """OpenMP threads of each engine on a CPU; no matter on GPUs."""

    @model_validator(mode="after")
    def _tool_choice_has_a_parser(self) -> Self:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs a tool_call_parser")
        return self


class EngineSection(Section):
    """Engines of one kind."""

    tensor_parallel_size: Positive = 1
    kv_cache_memory: ByteSize | None = None
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive | None = None
    """Of encode: what one batch may hold, 8192 if None; else vLLM's own default if None."""
    extra_args: tuple[str, ...] = ()


class StageSection(EngineSection):
    """The engines of one stage.

    ``devices``: the GPUs of each replica; None: the next free ones. ``cores``: likewise on a CPU;
    None: all.
    """

    replicas: Positive = 1
    devices: tuple[tuple[int, ...], ...] | None = None
    cores: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = None
    gpu_memory_utilization: Share = 0.9

    @model_validator(mode="after")
    def _one_group_per_replica(self) -> Self:
        for key, groups in (("devices", self.devices), ("cores", self.cores)):
            if groups is not None and len(groups) != self.replicas:
                raise ValueError(f"{key} names {len(groups)} engines, replicas {self.replicas}")
        for group in self.devices or ():
            if len(set(group)) != self.tensor_parallel_size:
                raise ValueError(
                    f"devices {list(group)} must be {self.tensor_parallel_size} different GPUs "
                    "(tensor_parallel_size)"
                )
        if self.cores and () in self.cores:
            raise ValueError("cores: an engine needs at least one")
        return self


class LocalPrefill(EngineSection):
    """Prefill engines beside the encoders, on the same devices.

    On a CPU one per encoder. On GPUs the encoders' devices, in their order, are cut into groups of
    ``tensor_parallel_size``, each of which is one engine's. ``gpu_memory_utilization`` None: a GPU
    is divided between the two by what the model needs.
    """

    gpu_memory_utilization: Share | None = None


class Partition(Section):
    """How encode and local prefill divide their device; the rule is ``policy.how``.

    A unit is an SM of a GPU or a core of a CPU.
    """

    driver: Literal["auto", "green-context", "mps-static", "priority", "cpu", "gate"] = "auto"
    """auto: the best that the machine has (easerve doctor)."""
    profile: str | None = None
    """A file that ``easerve profile`` wrote; None: every batch gets half of the device."""
    min_prefill_units: Positive | None = None
    """What prefill keeps; None: a granule of the device. Rule gate asks for all."""
    hold_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Prefill takes units back so long after an encode, should another follow."""
    patience_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    """An encode waits so long for a prefill step that began before it was announced."""


class Policy(Section):
    """When, Where, and how much: the control policies. All can be changed while serving."""

    when: Literal["none", "greedy", "fixed", "fill", "gap", "slack"] = "slack"
    """The rule that closes an encode batch."""
    order: Literal["fifo", "deadline"] = "fifo"
    max_batch_items: Annotated[int, Field(ge=1, le=1024)] = 64
    """Of one encoder call; its tokens are bounded by the engine's max_num_batched_tokens."""
    timeout_s: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The window of rule fixed."""
    gap_k: Annotated[float, Field(ge=0, le=100)] = 1.0
    """How many mean gaps rules gap and slack wait for one more arrival."""
    encoder_value: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Rule slack: what a second of a free encoder is worth, in seconds of a request's waiting."""
    spread: bool = True
    """A queue that does not fill a batch for each idle encoder is shared out among them."""
    run_ahead: Annotated[int, Field(ge=0, le=16)] = 1
    """So many full batches may be sent ahead to an encoder that still runs one."""
    group_by_size: bool = False
    """Only items of equal token counts share a call."""
    ttft_slo_s: Seconds | None = None
    tpot_slo_s: Seconds | None = None
    """What is promised; None: nothing."""
    flow: bool = True
    """Encode holds back what would only wait for prefill or for a decode slot."""
    prefill_ahead_s: Seconds = 1.0
    """Work that prefill may have ahead of what is encoded."""
    max_queue_s: Seconds = 30.0
    """A request that would wait longer for Encode is refused (429)."""
    where: Literal["deficit", "deficit-tokens", "band", "bernoulli", "jsq"] = "deficit"
    """The rule that draws the side of a prefill: beside an encoder (local) or on the pool."""
    remote_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of prefills that run on the remote pool; 1 is no offload."""
    band_kappa: Annotated[float, Field(ge=0.5, le=1e6)] = 2.0
    """Rule band: how many prefills the remote pool may be ahead of its share, or behind."""
    offload_seed: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    """Rule bernoulli: another seed draws other sides."""
    share_trim: bool = False
    """The share follows the backlogs, by at most 0.02 in 10 s, from ``remote_share`` on."""
    spill_guard_s: Seconds | None = None
    """Beyond this difference of the backlogs the share is given up; None: never."""
    how: Literal["dynamic", "static", "none", "gate"] = "dynamic"
    """The rule that divides a device between encode and local prefill, if ``partition`` is on."""
    encode_target_s: Seconds = 0.025
    """Rule dynamic: a batch gets the fewest units with which its forward takes no longer."""
    encode_units: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Rule static: the encoder's units, always; None: half of them."""
    adapt: bool = False
    """Some of these knobs move slowly, near their values here (docs/adapt.md)."""
    adapt_period_s: Annotated[float, Field(ge=1, le=3600)] = 10.0
    """One knob moves by one step a period, at most."""
    adapt_hold: Annotated[int, Field(ge=1, le=100)] = 3
    """What speaks for a step must have held for so many periods."""
    adapt_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """How far ``remote_share`` may go from its value here."""
    adapt_factor: Annotated[float, Field(ge=1, le=100)] = 4.0
    """How many times as much, or as little, ``max_batch_items`` and a wait may become."""


class MediaLimits(Section):
    """Media of one request, by kind."""

    image: Annotated[int, Field(ge=0)] = 8
    video: Literal[0] = 0
    audio: Literal[0] = 0


class Limits(Section):
    """Bounds on what one client can make the server hold."""

    max_requests: Positive = 256
    max_body: ByteSize = ByteSize(32 * MIB)
    max_held: ByteSize = ByteSize(256 * MIB)
    """Request bodies held at once, in all."""
    max_decoded: ByteSize = ByteSize(GIB)
    """Decoded pictures held at once, in all."""
    max_image_pixels: Positive = 16_000_000
    limit_mm_per_prompt: MediaLimits = MediaLimits()
    max_retries: Annotated[int, Field(ge=0)] = 2
    request_timeout_s: Seconds = 600
    worker_wait_s: Seconds = 10
    preparation_workers: Positive = 2


class Deployment(Section):
    """A model and the engines that serve it."""

    model: Annotated[str, Field(min_length=1)]
    served_model_name: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory: ByteSize | None = None
    """Memory of one GPU, for the memory plan; None: ask the driver."""
    server: Server = Server()
    engine: Engine = Engine()
    encode: StageSection = StageSection()
    local_prefill: LocalPrefill | None = None
    """None: every prefill runs on the engines of ``prefill``."""
    partition: Partition | None = None
    """None: encode and local prefill share all of their device."""
    prefill: StageSection = StageSection()
    decode: StageSection = StageSection()
    policy: Policy = Policy()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _device_rules(self) -> Self:
        sections = ("encode", "local_prefill", "prefill", "decode")
        given = {
            name: section.model_fields_set
            for name in sections
            if (section := getattr(self, name)) is not None
        }
        if self.device == "cuda":
            if self.engine.fork_server:
                raise ValueError("engine.fork_server needs device: cpu (CUDA cannot fork)")
            for name in (name for name, keys in given.items() if "cores" in keys):
                raise ValueError(f"{name}.cores needs device: cpu")
            return self
        if self.gpu_memory is not None:
            raise ValueError("gpu_memory needs device: cuda")
        for name, keys in given.items():
            for key in sorted(GPU_KEYS & keys):
                raise ValueError(f"{name}.{key} needs device: cuda")
        return self

    @model_validator(mode="after")
    def _local_prefill_rules(self) -> Self:
        local, encode = self.local_prefill, self.encode
        if local is None:
            if self.policy.remote_share < 1:
                raise ValueError(
                    f"policy.remote_share {self.policy.remote_share:g} needs a section "
                    "local_prefill: without it there is nothing but the remote engines"
                )
            return self
        named = [gpu for group in encode.devices or () for gpu in group]
        if len(set(named)) < len(named):
            raise ValueError("encode.devices overlap: local_prefill needs GPUs of one encoder each")
        num_gpus = encode.replicas * encode.tensor_parallel_size
        if num_gpus % local.tensor_parallel_size:
            raise ValueError(
                f"local_prefill.tensor_parallel_size {local.tensor_parallel_size} does not divide "
                f"the {num_gpus} GPUs of encode"
            )
        computed = "gpu_memory_utilization" not in encode.model_fields_set
        if computed is not (local.gpu_memory_utilization is None):
            raise ValueError(
                "encode.gpu_memory_utilization and local_prefill.gpu_memory_utilization: give both "
                "or neither, which divides the GPU by what the model needs"
            )
        return self

    @model_validator(mode="after")
    def _partition_rules(self) -> Self:
        if self.partition is None:
            if given := sorted(PARTITION_KNOBS & self.policy.model_fields_set):
                raise ValueError(
                    f"policy.{given[0]} needs a section partition: without it encode and local "
                    "prefill share all of their device"
                )
            return self
        if self.local_prefill is None:
            raise ValueError(
                "partition needs a section local_prefill: without it there is nobody to divide "
                "a device with"
            )
        sections = {"encode": self.encode, "local_prefill": self.local_prefill}
        for name, section in sections.items():
            if section.tensor_parallel_size > 1:
                raise ValueError(
                    f"{name}.tensor_parallel_size {section.tensor_parallel_size}: partition needs "
                    "1, as all ranks would have to change their parts at the same step"
                )
        driver = self.partition.driver
        if driver not in ("auto", "gate") and (driver == "cpu") is not (self.device == "cpu"):
            raise ValueError(f"partition.driver {driver} is not for device: {self.device}")
        return self

    @property
    def name(self) -> str:
        """The model name that clients use."""
        return self.served_model_name or self.model

    @property
    def uses_fork_server(self) -> bool:
        return self.device == "cpu" and self.engine.fork_server is not False


def parse_topology(text: str) -> dict[str, dict[str, int]]:
    """``2e1p3d`` -> the replicas of each stage, as a part of a deployment.

    Local prefill engines are not counted: how many there are follows from the encoders.
    """
    match = re.fullmatch(r"([1-9]\d*)e([1-9]\d*)p([1-9]\d*)d", text.strip().lower())
    if match is None:
        raise ConfigError(f"topology {text!r}: expected e.g. 1e1p1d, at least one of each stage")
    stages = ("encode", "prefill", "decode")
    return {stage: {"replicas": int(n)} for stage, n in zip(stages, match.groups(), strict=True)}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, not checked. Raises ConfigError."""
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None


def read_section(path: Path, section: type[AnySection]) -> AnySection:
    """A file that is one section. Raises ConfigError, which names the file and the key."""
    content = read_yaml(path)
    try:
        return section.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {x}" for x in explain(error, section))) from None


def read_named(
    name: str, what: str, ours: Path, folder: Path, section: type[AnySection]
) -> AnySection:
    """The file of that name in our folder, or the YAML file of that path.

    A relative path is taken from ``folder``. Raises ConfigError.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return read_section(folder / name, section)
    path = ours / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in ours.glob("*.yaml")))
        raise ConfigError(f"{what} {name!r}: known are {known}; or give the path of a YAML file")
    return read_section(path, section)


def read_file(path: Path) -> dict[str, Any]:
    """The raw content of a deployment file. A model's folder is relative to it."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with at least the key 'model'")
    engine = content.get("engine")
    if isinstance(engine, dict) and isinstance(template := engine.get("chat_template"), str):
        content["engine"] = {**engine, "chat_template": os.path.relpath(path.parent / template)}
    partition = content.get("partition")
    if isinstance(partition, dict) and isinstance(profile := partition.get("profile"), str):
        content["partition"] = {**partition, "profile": os.path.relpath(path.parent / profile)}
    model = content.get("model")
    if model and isinstance(model, str) and (path.parent / model).is_dir():
        # It is named from the file. Clients use that name, wherever the server is started.
        content["model"] = os.path.relpath(path.parent / model)
        if content.get("served_model_name") is None:
            content["served_model_name"] = model
    return content


def build(content: Mapping[str, Any], source: str) -> Deployment:
    """Validate; ``source`` names where the content came from."""
    try:
        return Deployment.model_validate(content)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in explain(error, Deployment)]
        raise ConfigError("\n".join(lines)) from None


def explain(error: ValidationError, section: type[Section]) -> list[str]:
    """What is wrong with the content of a section, a line each, with the path of the key."""
    return [_explain(dict(issue), section) for issue in error.errors()]


def _explain(issue: dict[str, Any], section: type[Section]) -> str:
    path = ".".join(str(part) for part in issue["loc"])
    if issue["type"] == "extra_forbidden":
        known = _keys_at(issue["loc"][:-1], section)
        close = difflib.get_close_matches(str(issue["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    message = issue["msg"].removeprefix("Value error, ")
    given = issue.get("input")
    plain = isinstance(given, str | int | float | bool | None) and issue["loc"][-1:] not in SECRETS
    shown = f" (got {given!r})" if plain else ""
    return f"{path}: {message}{shown}" if path else message


def _keys_at(path: tuple[Any, ...], section: Any) -> list[str]:
    for part in path:
        within = get_args(_given(section))
        if not within:
            section = _given(section).model_fields[part].annotation
        else:  # a list of sections, or sections by name
            section = within[-1] if issubclass(get_origin(_given(section)), Mapping) else within[0]
    return list(_given(section).model_fields)


def _given(annotation: Any) -> Any:
    """Without the None that may stand for it."""
    return get_args(annotation)[0] if type(None) in get_args(annotation) else annotation

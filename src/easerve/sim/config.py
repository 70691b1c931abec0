"""Sections of a scenario that say which engines a system has and how it drives them.

Every knob that decides a result stands here, with its default and where that comes from. Seconds
of the host are assumed unless a source is named; what a model and a device take comes from
``costs`` alone. Names of vLLM's options mean what they mean there.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from easerve import config
from easerve.config import Positive, Seconds, Section, Share

HostSeconds = Annotated[float, Field(ge=0, le=1e6)]
FirstToken = Literal["prefill", "decode"]
"""Which engine's first token a client sees: TTFT ends there."""
PREFILL: FirstToken = "prefill"
DECODE: FirstToken = "decode"


class LlmEngines(Section):
    """Replicas of a language model, as vLLM's scheduler runs them."""

    replicas: Positive = 1
    tensor_parallel_size: Positive = 1
    max_num_batched_tokens: Positive = 2048
    """vLLM's default of an API server on cards below 70 GiB and on A100; 8192 on H100 and H200."""
    max_num_seqs: Positive = 256
    """vLLM's default; of decode engines, the decode slots."""
    gpu_memory_utilization: Share = 0.9
    kv_cache_tokens: Positive | None = None
    """None: what the memory leaves beside weights and activations."""
    step_overhead_s: HostSeconds | None = None
    """Host time of a step; None: that of ``costs.knobs``."""

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.tensor_parallel_size


class Encoders(Section):
    """Replicas of an encoder, a GPU each.

    ``dispatch_s`` and ``item_s``: time of a call and of each of its items before its forward. The
    first is what one call more costs the tiny model's encoder on a CPU: (154 - 44) ms over 15
    calls, against all 16 pictures in one. The second, a processor's resizing and normalising of a
    picture, is assumed.
    """

    replicas: Positive = 1
    dispatch_s: HostSeconds = 0.0073
    item_s: HostSeconds = 0.02
    max_num_batched_tokens: Positive = 8192
    """Embeddings that one call may hold."""

    @property
    def num_gpus(self) -> int:
        return self.replicas


class LocalPrefill(Section):
    """Prefill engines on the encoders' GPUs, which are cut into groups of the parallel size.

    ``crowding``: how much longer encode and prefill each take beside the other, for want of memory
    bandwidth, which no rule divides; assumed: half of what the start-up probe lets pass.
    """

    crowding: Annotated[float, Field(ge=0, le=10)] = 0.075
    tensor_parallel_size: Positive = 1
    max_num_batched_tokens: Positive = 2048
    max_num_seqs: Positive = 256
    kv_cache_tokens: Positive | None = None
    """None: what the memory leaves beside the encoder, weights and activations."""
    step_overhead_s: HostSeconds | None = None


class Partition(Section):
    """How encoders and local prefill divide their GPUs; the rule is ``policy.how``.

    Nobody holds units back or waits for a step that has begun: ``hold_s`` and ``patience_s`` of a
    deployment are 0 here.
    """

    min_prefill_units: Positive | None = None
    """SMs that prefill keeps; None: a granule of the device."""


SERVER_LIMITS = config.Limits()


class Limits(Section):
    """Those of the server's limits that a model of it knows, with the server's defaults."""

    max_requests: Positive = SERVER_LIMITS.max_requests
    max_retries: Annotated[int, Field(ge=0)] = SERVER_LIMITS.max_retries
    request_timeout_s: Seconds = SERVER_LIMITS.request_timeout_s
    worker_wait_s: Seconds = SERVER_LIMITS.worker_wait_s
    preparation_workers: Positive = SERVER_LIMITS.preparation_workers


class EaserveSystem(Section):
    """The server's own core over modelled engines.

    ``first_token_at``: our server streams decode's tokens. ``prepare_s``: each of a request's
    media in a preparation worker (assumed); rendering its prompt is not counted. A scenario that
    does not give ``policy.offload_seed`` has the load's seed there.
    """

    first_token_at: FirstToken = DECODE
    prepare_s: HostSeconds = 0.02
    encode: Encoders
    local_prefill: LocalPrefill | None = None
    partition: Partition | None = None
    prefill: LlmEngines
    decode: LlmEngines
    policy: config.Policy = config.Policy()
    limits: Limits = Limits()

    @property
    def num_gpus(self) -> int:
        """Local prefill runs on the encoders' GPUs."""
        return self.encode.num_gpus + self.prefill.num_gpus + self.decode.num_gpus

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the engines: e0, e1 …, l0 … (local prefill), p0 …, d0 …"""
        groups = self.encode.replicas // self._local_size if self.local_prefill else 0
        counts = (self.encode.replicas, groups, self.prefill.replicas, self.decode.replicas)
        pairs = zip("elpd", counts, strict=True)
        return tuple(f"{letter}{number}" for letter, count in pairs for number in range(count))

    def seeded(self, seed: int) -> Self:
        """With the seed of the load for what the policy draws, unless it has its own."""
        if "offload_seed" in self.policy.model_fields_set:
            return self
        policy = self.policy.model_copy(update={"offload_seed": seed % (1 << 53)})
        return self.model_copy(update={"policy": policy})

    @property
    def _local_size(self) -> int:
        return self.local_prefill.tensor_parallel_size if self.local_prefill else 1

    @model_validator(mode="after")
    def _local_prefill_rules(self) -> Self:
        if self.local_prefill is None:
            if self.policy.remote_share < 1:
                raise ValueError(
                    f"policy.remote_share {self.policy.remote_share:g} needs a section "
                    "local_prefill: without it there is nothing but the remote engines"
                )
            if self.partition is not None:
                raise ValueError("partition needs a section local_prefill")
        elif self.encode.replicas % self._local_size:
            raise ValueError(
                f"local_prefill.tensor_parallel_size {self._local_size} does not divide the "
                f"{self.encode.replicas} GPUs of encode"
            )
        return self


class VllmSystem(LlmEngines):
    """Whole engines: encoder and language model in each, an encode before a step that needs it.

    ``item_s``: an item's processing in the API server, before its engine sees the request. It is
    that of ``Encoders``. ``max_num_encoder_input_tokens``: embeddings of a step; None:
    ``max_num_batched_tokens``, as in vLLM. ``routing`` over the replicas: least-loaded is vLLM's
    own data-parallel balancing, round-robin a proxy in front.
    """

    replicas: Positive = 4
    tensor_parallel_size: Positive = 2
    item_s: HostSeconds = Encoders().item_s
    api_server_workers: Positive = 1
    """Items that a replica's API server processes at once; vLLM's default is one."""
    max_num_encoder_input_tokens: Positive | None = None
    routing: Literal["least-loaded", "round-robin"] = "least-loaded"


class VllmEpdSystem(Section):
    """vLLM's example proxy for encode, prefill and decode engines.

    One encoder call for each item, encoders in turn; when all are back, a prefill and then a decode
    engine. ``merge_calls``: calls that wait for an encoder share a forward, up to its token budget,
    as vLLM's scheduler takes them; false is what we have seen on a CPU, a forward for each.
    ``routing`` of prefill and decode: the proxy draws. Prefill's answer is thrown away, so the
    first token is decode's. ``prefill`` null, as the proxy has it with prefill disabled: the
    engines of ``decode`` prefill as well, and nothing is handed over.
    """

    first_token_at: FirstToken = DECODE
    encode: Encoders
    prefill: LlmEngines | None
    decode: LlmEngines
    merge_calls: bool = True
    routing: Literal["random", "round-robin"] = "random"

    @property
    def num_gpus(self) -> int:
        num_prefill = self.prefill.num_gpus if self.prefill else 0
        return self.encode.num_gpus + num_prefill + self.decode.num_gpus

    @model_validator(mode="after")
    def _first_token_is_of_an_engine(self) -> Self:
        if self.prefill is None and self.first_token_at == PREFILL:
            raise ValueError("first_token_at: prefill needs engines of prefill alone")
        return self


class DynamoSystem(Section):
    """NVIDIA Dynamo's encode, prefill and decode workers with the vLLM backend.

    A prefill worker in turn asks the encode workers for its items, one forward for each request
    and none shared (``encode_worker_handler.py``); then it prefills, and a decode worker in turn
    streams. No token comes before decode's (``multimodal_pd_worker_handler.py``); older versions
    let prefill's out: ``first_token_at: prefill``. ``hold_kv``: prefill's blocks are kept until
    decode has read them, as vLLM does.
    """

    first_token_at: FirstToken = DECODE
    hold_kv: bool = True
    encode: Encoders
    prefill: LlmEngines
    decode: LlmEngines

    @property
    def num_gpus(self) -> int:
        return self.encode.num_gpus + self.prefill.num_gpus + self.decode.num_gpus


class Batched(Section):
    """EPDServe's engines of a stage: first come, first served, ``max_batch`` requests at once.

    ``tensor_parallel_size``: 1 in its repository, where every engine has one GPU; more is what a
    card needs that does not hold the model, and engines of one size alone change roles. The batch
    sizes are those of its launch script (its command line's defaults are 2, 256 and 256).
    """

    replicas: Positive = 1
    tensor_parallel_size: Positive = 1
    max_batch: Positive = 1

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.tensor_parallel_size


class BatchedEncoders(Batched):
    """``max_cached_items``: that an encoder holds, under way or not pulled yet; ``worker.py`` gives
    the vision cache 1000 blocks for LLaVA, and a picture needs one.
    """

    max_cached_items: Positive = 1000


class BatchedEngines(Batched):
    """``max_tokens``: of a batch. The share of the memory is its command line's default; its launch
    script has 0.8, with which an 80 GB card does not hold a model of 34 billion parameters.
    """

    max_tokens: Positive = 49152
    gpu_memory_utilization: Share = 0.9
    kv_cache_tokens: Positive | None = None
    """None: what the memory leaves beside the encoder, weights and activations."""


class BatchedDecode(BatchedEngines):
    """EPDServe's decode engines."""

    max_batch: Positive = 4
    max_tokens: Positive = 81920


class RoleSwitch(Section):
    """EPDServe moves an engine to the stage with the longest queue, unless all are half as long.

    It decides every ``period_s`` and looks for decisions ``poll_s`` after the last move; both are
    its own (``resource_allocation.py``, ``orchestrator.py``).
    """

    period_s: Seconds = 5.0
    poll_s: Seconds = 2.0


class EpdServeSystem(Section):
    """EPDServe (vbdi/epdserve): pools that pull from global queues.

    ``step_overhead_s``: a step is a round trip of Ray in eager mode (25 to 30 ms, assumed); an
    encoder's step has ``dispatch_s`` instead, and ``item_s`` for each of its items, before its
    forward, both as ``Encoders``. ``irp``: the items of a request are encoded apart, on the
    encoders in turn. An engine pulls when what waits on it fills less than ``pull_below`` of its
    blocks. ``role_switch``: off, as in its repository, where a line of ``llm_async.py`` is to be
    changed for it (README.md).
    """

    first_token_at: FirstToken = PREFILL
    encode: BatchedEncoders
    prefill: BatchedEngines
    decode: BatchedDecode
    dispatch_s: HostSeconds = Encoders().dispatch_s
    item_s: HostSeconds = Encoders().item_s
    step_overhead_s: HostSeconds = 0.025
    irp: bool = True
    pull_below: Share = 0.05
    role_switch: RoleSwitch | None = None

    @property
    def num_gpus(self) -> int:
        return self.encode.num_gpus + self.prefill.num_gpus + self.decode.num_gpus


class HydraNodes(Section):
    """Nodes of one kind; one GPU each in its repository."""

    replicas: Positive = 1
    tensor_parallel_size: Positive = 1

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.tensor_parallel_size


HYDRA_KINDS = ("e", "p", "d", "ep", "ed", "pd", "epd")


class HydraInferSystem(Section):
    """HydraInfer (dongxianzhe/hydrainfer): nodes of mixed stages, batched stage by stage.

    Nodes are named by the stages that they run; requests go round in turn at every hop.
    ``max_running``: requests on a node, and ``encode_max_running`` on one that encodes alone (24
    and 1200 in its evaluation). ``image_budget`` and ``token_budget`` of a step: None: the largest,
    up to 8 and 2048, whose time alone is below ``tpot_slo_s`` - 10 ms, which is how it starts;
    ``tpot_slo_s`` is 0.4 there, and 1 on nodes without decode (``prefill_tpot_slo_s``).
    ``encode_share``: of a device, what an encoder's forward gets while a step of the language model
    runs beside it, on another stream; assumed. ``item_s`` of an item on a node's host, before it is
    scheduled, and ``dispatch_s`` as ``Encoders``. ``step_overhead_s`` None: that of
    ``costs.knobs``, as a node's loop of steps runs in its own process (``WorkerConfig.use_ray``
    is false there); EPDServe's steps are calls of Ray.
    """

    first_token_at: FirstToken = PREFILL
    e: HydraNodes | None = None
    p: HydraNodes | None = None
    d: HydraNodes | None = None
    ep: HydraNodes | None = None
    ed: HydraNodes | None = None
    pd: HydraNodes | None = None
    epd: HydraNodes | None = None
    max_running: Positive = 24
    encode_max_running: Positive = 1200
    image_budget: Positive | None = None
    token_budget: Positive | None = None
    tpot_slo_s: Seconds = 0.4
    prefill_tpot_slo_s: Seconds = 1.0
    encode_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    dispatch_s: HostSeconds = Encoders().dispatch_s
    item_s: HostSeconds = Encoders().item_s
    step_overhead_s: HostSeconds | None = None

    @property
    def nodes(self) -> Mapping[str, HydraNodes]:
        """By the stages that they run, e.g. ``ed``."""
        found = {kind: getattr(self, kind) for kind in HYDRA_KINDS}
        return {kind: nodes for kind, nodes in found.items() if nodes is not None}

    @property
    def num_gpus(self) -> int:
        return sum(nodes.num_gpus for nodes in self.nodes.values())

    @model_validator(mode="after")
    def _every_stage_has_a_node(self) -> Self:
        for letter, stage in (("e", "encode"), ("p", "prefill"), ("d", "decode")):
            if not any(letter in kind for kind in self.nodes):
                known = ", ".join(kind for kind in HYDRA_KINDS if letter in kind)
                raise ValueError(f"no node runs {stage}: give one of {known}")
        return self


SystemConfig = (
    EaserveSystem | VllmSystem | VllmEpdSystem | DynamoSystem | EpdServeSystem | HydraInferSystem
)
SECTIONS: Mapping[str, type[SystemConfig]] = {
    "easerve": EaserveSystem,
    "vllm": VllmSystem,
    "vllm-epd": VllmEpdSystem,
    "dynamo": DynamoSystem,
    "epdserve": EpdServeSystem,
    "hydrainfer": HydraInferSystem,
}
"""The section of each system, by the name that a scenario gives it under ``systems``."""

"""vLLM's hooks, each handed on to the half of the side that it belongs to.

Extra config: ``inboxes``, the folder of the prefill engines' sockets; ``name``, the engine's own;
``cache_bytes`` that a prefill engine keeps; ``timeout_s`` that it waits for an item that is coming;
``transport``: "memfd" (host memory), "cuda-ipc" or "nixl" (device to device, ``ring_bytes`` of it;
"nixl" between hosts as well);
``listen``: the tcp://host:port at which a prefill engine takes what other hosts push, if it does.
The deployment's shared secret is in the environment.
"""

import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from easerve.engines.vllm.ec.consumer import ConsumerScheduler, Loads, load
from easerve.engines.vllm.ec.inbox import Inbox
from easerve.engines.vllm.ec.messages import inbox_path
from easerve.engines.vllm.ec.outbox import Outbox
from easerve.engines.vllm.ec.producer import ProducerScheduler, ProducerWorker, Wants
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.transport import exporter_of, opens

if TYPE_CHECKING:
    import torch

TOKEN = "EASERVE_EC_TOKEN"  # noqa: S105 (the name of a variable)
DEFAULT_CACHE_BYTES = 1 << 30
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_RING_BYTES = 256 << 20


class Step(ECConnectorMetadata):
    """What the scheduler half tells the worker half."""

    def __init__(self, content: Wants | Loads) -> None:
        self.content = content


class PushConnector(ECConnectorBase):
    """The ``ec_connector`` of EAServe's engines. An engine is one side: producer or consumer."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        inboxes, token = Path(extra["inboxes"]), os.environ.get(TOKEN, "")
        if not token:
            raise ValueError(f"{TOKEN} is not set")
        if self.is_producer == self.is_consumer:
            raise ValueError("ec_role has to be ec_producer or ec_consumer")
        self._inboxes: list[Inbox] = []
        self._producer: ProducerWorker | None = None
        if role == ECConnectorRole.WORKER:
            # Every rank has the whole embeddings; one pushes them.
            if self.is_producer and vllm_config.parallel_config.rank == 0:
                ring_bytes = int(extra.get("ring_bytes", DEFAULT_RING_BYTES))
                exporter = exporter_of(extra.get("transport", "memfd"), ring_bytes, _device())
                self._producer = ProducerWorker(Outbox(inboxes, token, exporter))
        elif self.is_producer:
            self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
            self._sending = ProducerScheduler()
        else:
            timeout_s = float(extra.get("timeout_s", DEFAULT_TIMEOUT_S))
            cache_bytes = int(extra.get("cache_bytes", DEFAULT_CACHE_BYTES))
            store = Store(cache_bytes, _max_bundles(), timeout_s)
            # What this process read on a device, workers in other processes do not have.
            parallel = vllm_config.parallel_config
            alone = parallel.world_size == 1 and parallel.distributed_executor_backend != "mp"
            kinds = opens(extra.get("transport", "memfd") if alone else "memfd", _device())
            arrived = threading.Event()
            for place in (inbox_path(inboxes, extra["name"]), extra.get("listen")):
                if place:
                    inbox = Inbox(place, token, store, kinds, cache_bytes, arrived)
                    self._inboxes.append(inbox)
            self._receiving = ConsumerScheduler(store, arrived, timeout_s)

    def shutdown(self) -> None:
        while self._inboxes:
            self._inboxes.pop().close()
        if self._producer is not None:
            self._producer.close()

    # Scheduler half ---------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        if self.is_producer:
            self._sending.note(request)
            return True
        return self._receiving.is_ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        return self._receiving.take_unavailable() if self.is_consumer else set()

    def has_cache_item(self, identifier: str) -> bool:
        return self.is_consumer and self._receiving.has_item(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        key = request.mm_features[index].identifier
        if self.is_producer:
            self._sending.allocate(key)
        else:
            self._receiving.load(key)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        if self.is_producer:
            return Step(self._sending.end_step(scheduler_output.free_encoder_mm_hashes))
        return Step(self._receiving.end_step(scheduler_output.total_num_scheduled_tokens))

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self.is_producer:
            metadata = collect_ec_item_metadata(request.mm_features, self._resolver)
            return False, self._sending.finish(request, metadata)
        return False, self._receiving.finish(request)

    # Worker half ------------------------------------------------------------------------------

    def _content(self) -> Wants | Loads:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step.content

    def start_save_caches(
        self, encoder_cache: "dict[str, torch.Tensor] | None" = None, **_: Any
    ) -> None:
        content = self._content()
        if self._producer is not None and isinstance(content, Wants):
            self._producer.begin_step(content, encoder_cache or {})

    def save_caches(self, encoder_cache: "dict[str, torch.Tensor]", mm_hash: str, **_: Any) -> None:
        if self._producer is not None:
            self._producer.save(mm_hash, encoder_cache[mm_hash])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """vLLM calls this last in a step."""
        if self._producer is not None:
            self._producer.end_step(finished_req_ids)
        return None, None

    def start_load_caches(self, encoder_cache: "dict[str, torch.Tensor]", **_: Any) -> None:
        content = self._content()
        if isinstance(content, Loads):
            load(content, encoder_cache, _device())


def _device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _max_bundles() -> int:
    """Each takes a descriptor, two when it is mapped; half of them are for others."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

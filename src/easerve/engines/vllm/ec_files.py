"""Embeddings from Encode to Prefill as files in shared memory, in folders that the router names.

vLLM's example connector keeps one file per item for ever, and an item that is not there kills
the engine that asks for it. Here the router owns the folders, and removes them; a missing item
fails the one request that needs it.

``ec_transfer_params`` (both sides): ``{"folders": [path, ...]}``, one per item in prompt order.
A file is ``<folder>/<item hash>.safetensors`` with one tensor ``embedding`` of shape
``[num_tokens, hidden_size]``. It is moved into place when complete.

Producer: the scheduler half notes who wants which item, the worker half writes it after the
encoder ran, or at once when the encoder cache still has it. Consumer: the scheduler half reads
the file when the request is about to be scheduled and hands the tensor to the workers with the
step, so that nobody depends on the file after that.
"""

import os
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import safetensors.torch
import torch
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
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

logger = init_logger("vllm.easerve.ec_files")


@dataclass
class Step(ECConnectorMetadata):
    """What one engine step has to publish (producer) or to load (consumer)."""

    folders: dict[str, list[str]] = field(default_factory=dict)
    """Item hash to the folders it is wanted in."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Item hash to its embedding."""


def folders_of(request: Request) -> list[str]:
    """The folder of each item of a request, in prompt order; empty for a plain request."""
    folders = (request.ec_transfer_params or {}).get("folders") or []
    return list(folders) if len(folders) == len(request.mm_features) else []


class FileConnector(ECConnectorBase):
    """The ``ec_connector`` of EAServe's engines on one host."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
        self._step = Step()
        self._planned: set[str] = set()  # requests whose folders are in a step already
        self._wanted: dict[str, list[str]] = {}  # worker half: item -> folders
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}  # request -> item -> embedding
        self._load_s: dict[str, float] = {}  # request -> seconds spent reading
        self._unavailable: set[str] = set()

    # Scheduler half ---------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """True when the request can be scheduled; a request that never can is given up."""
        folders = folders_of(request)
        if self.is_producer:
            if request.request_id not in self._planned:
                self._planned.add(request.request_id)
                for feature, folder in zip(request.mm_features, folders, strict=False):
                    self._step.folders.setdefault(feature.identifier, []).append(folder)
            return True
        loaded = self._loaded.setdefault(request.request_id, {})
        for index, feature in enumerate(request.mm_features):
            position, item = feature.mm_position, feature.identifier
            if position.offset + position.length <= num_computed_tokens or item in loaded:
                continue
            begin = time.perf_counter()
            tensor = self._read(folders[index], item) if folders else None
            spent = time.perf_counter() - begin
            self._load_s[request.request_id] = self._load_s.get(request.request_id, 0.0) + spent
            if tensor is None or len(tensor) != request.get_num_encoder_embeds(index):
                self._unavailable.add(request.request_id)
                return False
            loaded[item] = tensor
        return True

    def _read(self, folder: str, item: str) -> torch.Tensor | None:
        try:
            return safetensors.torch.load_file(f"{folder}/{item}.safetensors")["embedding"]
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            logger.warning("no embedding of item %s in %s: %s", item, folder, error)
            return None

    def take_unavailable_requests(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def has_cache_item(self, identifier: str) -> bool:
        return self.is_consumer and any(identifier in items for items in self._loaded.values())

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        item = request.mm_features[index].identifier
        tensor = self._loaded.get(request.request_id, {}).get(item)
        if self.is_consumer and tensor is not None:
            self._step.tensors[item] = tensor

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        step, self._step = self._step, Step()
        return step

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The reply's ``ec_transfer_params``: item metadata (producer) or ``load_s`` (consumer)."""
        self._planned.discard(request.request_id)
        self._loaded.pop(request.request_id, None)
        if self.is_producer:
            return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None
        load_s = self._load_s.pop(request.request_id, None)
        return False, None if load_s is None else {"load_s": load_s}

    # Worker half ------------------------------------------------------------------------------

    def _get_step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def start_save_caches(
        self, encoder_cache: dict[str, torch.Tensor] | None = None, **_: Any
    ) -> None:
        for item, folders in self._get_step().folders.items():
            if encoder_cache and item in encoder_cache:  # not encoded again, so never saved again
                _write(encoder_cache[item], item, folders)
            else:
                self._wanted.setdefault(item, []).extend(folders)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        if self.is_producer:
            _write(encoder_cache[mm_hash], mm_hash, self._wanted.pop(mm_hash, []))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        from vllm.platforms import current_platform

        for item, tensor in self._get_step().tensors.items():
            if item not in encoder_cache:
                encoder_cache[item] = tensor.to(current_platform.device_type)


def _write(embedding: torch.Tensor, item: str, folders: list[str]) -> None:
    """Publish an item; a folder that is gone belongs to a batch that is gone."""
    content = embedding.detach().cpu().contiguous()
    for folder in folders:
        part = f"{folder}/{item}.{os.getpid()}.part"
        try:
            with open(part, "wb") as file:  # noqa: PTH123 (as quick as can be, for each item)
                file.write(_header(content.shape, content.dtype))
                file.write(memoryview(content.view(torch.uint8).numpy()))
            os.rename(part, f"{folder}/{item}.safetensors")  # noqa: PTH104
        except OSError as error:
            logger.warning("embedding of item %s not published: %s", item, error)


@lru_cache
def _header(shape: torch.Size, dtype: torch.dtype) -> bytes:
    """Of a file with one tensor ``embedding``, as the library writes it."""
    content: bytes = safetensors.torch.save({"embedding": torch.zeros(shape, dtype=dtype)})
    return content[: 8 + int.from_bytes(content[:8], "little")]

"""What the memory plan of ``easerve serve`` says of engines of a deployment file, on this machine.

The plan is asked with small deployments, an engine of each stage; on a CPU, whose memory all
engines share, with all of them as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from easerve import config
from easerve.config import ConfigError, Deployment
from easerve.engines.vllm import memory, models
from easerve.engines.vllm.models import ModelInfo
from easerve.search.overlay import laid
from easerve.search.space import REMOTE_ONLY
from easerve.types import Stage

STAGES = (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)


def text_config(model: str) -> Mapping[str, Any]:
    """What config.json says of the language model; empty where there is none here."""
    content = models.config_of(model)
    text: Mapping[str, Any] = content.get("text_config") or content
    return text


def indivisible(heads: int, kv_heads: int, tp: int) -> str | None:
    """vLLM's rule: whole heads on each device, which those of the KV cache may share."""
    if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
        return None
    return f"it does not divide {heads} heads, {kv_heads} of the KV cache"


def too_small(kv_tokens: int | None, num_tokens: int) -> str | None:
    if kv_tokens is None or kv_tokens >= num_tokens:
        return None
    return f"its KV cache of {kv_tokens} tokens does not hold a request of {num_tokens}"


@dataclass(frozen=True, slots=True)
class Planned:
    """Asks the plan that ``easerve serve`` checks. ``content``: of the deployment file.

    ``text``: of the model's config.json, what it says of the language model. ``by_model``: the
    model says how long the longest request is.
    """

    content: dict[str, Any]
    info: ModelInfo
    text: Mapping[str, Any]
    max_tokens: int
    by_model: bool

    def refuses(self, stage: Stage, tp: int, beside: bool) -> str | None:
        if stage is not Stage.ENCODE and (why := self._indivisible(tp)):
            return why
        try:
            rows = memory.plan(self._one_of_each(stage, tp, beside), self.info)
            asked = [row for row in rows if _is_asked(row, stage, beside)]
            memory.check(asked)
        except ConfigError as error:
            return str(error)
        if stage is Stage.ENCODE:
            return None
        return too_small(asked[-1].kv_tokens, self._longest)

    def refuses_all(self, encoders: int, prefills: int, decodes: int, offload: bool) -> str | None:
        """Of a CPU: by the memory of its host."""
        counts = zip(STAGES, (encoders, prefills, decodes), strict=True)
        changes: dict[str, Any] = {f"{stage}.replicas": count for stage, count in counts}
        changes |= {f"{stage}.cores": None for stage in STAGES}
        changes |= {"local_prefill": {}} if offload else REMOTE_ONLY
        try:
            memory.check(memory.plan(_built(self.content, changes), self.info))
        except ConfigError as error:
            return str(error)
        return None

    def _one_of_each(self, stage: Stage, tp: int, beside: bool) -> Deployment:
        """An engine of each stage, or as many encoders as local prefill needs; all that is not
        asked for is as small as can be.
        """
        changes: dict[str, Any] = {f"{each}.replicas": 1 for each in STAGES}
        on_gpus = self.content.get("device") == "cuda"
        if on_gpus:
            changes |= {f"{each}.devices": None for each in STAGES}
            changes |= {f"{each}.tensor_parallel_size": 1 for each in STAGES}
            changes[f"{stage}.tensor_parallel_size"] = tp
        else:
            changes |= {f"{each}.cores": None for each in STAGES}
        changes |= {"encode.replicas": tp} | offload(tp, on_gpus) if beside else REMOTE_ONLY
        return _built(self.content, changes)

    def _indivisible(self, tp: int) -> str | None:
        heads = self.text.get("num_attention_heads")
        kv_heads = self.text.get("num_key_value_heads") or heads
        return indivisible(heads, kv_heads, tp) if heads and kv_heads else None

    @property
    def _longest(self) -> int:
        own = self.text.get("max_position_embeddings") if self.by_model else None
        return max(self.max_tokens, int(own or 0))


def _is_asked(row: memory.Row, stage: Stage, beside: bool) -> bool:
    is_encoder = row.worker_id.startswith(f"{Stage.ENCODE}-")
    return bool(row.beside) or is_encoder if beside else row.worker_id.startswith(f"{stage}-")


def offload(tp: int, on_gpus: bool) -> dict[str, Any]:
    """The changes that local prefill takes. A device is divided where each engine has one: all
    ranks would have to change their parts at the same step.
    """
    if not on_gpus:
        return {"local_prefill": {}}
    partition: dict[str, Any] | None = {} if tp == 1 else None
    return {"local_prefill": {"tensor_parallel_size": tp}, "partition": partition}


def _built(content: Mapping[str, Any], changes: Mapping[str, Any]) -> Deployment:
    return config.build(laid(content, changes), "this allocation")

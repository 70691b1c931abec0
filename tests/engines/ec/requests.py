"""Requests as vLLM's scheduler has them, as far as the connector looks at them."""

from types import SimpleNamespace
from typing import Any


def request(
    name: str, *keys: str, num_embeddings: int = 2, status: str = "RUNNING", **params: Any
) -> Any:
    """One whose items follow each other, four tokens each, with these ``ec_transfer_params``."""
    features = [
        SimpleNamespace(identifier=key, mm_position=SimpleNamespace(offset=4 * index, length=4))
        for index, key in enumerate(keys)
    ]
    return SimpleNamespace(
        request_id=name,
        mm_features=features,
        ec_transfer_params=params or None,
        status=SimpleNamespace(name=status),
        get_num_encoder_embeds=lambda _: num_embeddings,
    )


def ended(one: Any, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    one.status = SimpleNamespace(name=status)
    return one

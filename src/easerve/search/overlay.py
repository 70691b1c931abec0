"""Changes laid on the content of a deployment file, so that what they leave goes together."""

from collections.abc import Mapping
from typing import Any

from easerve.config import PARTITION_KNOBS
from easerve.sim import overlay


def laid(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """By the path of the key, with dots."""
    return coherent(overlay.laid(content, changes))


def coherent(content: Mapping[str, Any]) -> dict[str, Any]:
    """Without the policy's knobs of a partition where there is none: the file would be refused."""
    policy = content.get("policy")
    if content.get("partition") is not None or not isinstance(policy, Mapping):
        return dict(content)
    kept = {key: each for key, each in policy.items() if key not in PARTITION_KNOBS}
    return {**content, "policy": kept}

"""How many tokens the KV cache of an engine holds, by what else is in its devices' memory."""

from easerve.config import ConfigError
from easerve.costs.hardware import Hardware
from easerve.costs.models import Language

ACTIVATION_BYTES = 3 << 29  # 1.5 GiB of each device: assumed; vLLM measures it when it starts


def kv_tokens(
    model: Language,
    hardware: Hardware,
    tp: int,
    *,
    utilization: float = 0.9,
    other_bytes: float = 0,
    activation_bytes: float = ACTIVATION_BYTES,
) -> int:
    """Tokens, each with its keys and values of all layers, in the memory of ``tp`` devices.

    ``utilization``: of each device's memory, what the engine may have. ``other_bytes``: of it, on
    each device, for what is neither the language model nor its activations: an encoder. Layers
    with a window are counted as if they kept all tokens. Raises ConfigError if the model does not
    fit.
    """
    budget = utilization * hardware.memory.si
    free = budget - model.weight_bytes / tp - other_bytes - activation_bytes
    tokens = int(free * tp / model.kv_bytes_per_token)
    if tokens < 1:
        needed = (budget - free) / 1e9
        raise ConfigError(
            f"tensor_parallel_size {tp}: an engine needs {needed:.1f} GB of each device and more "
            f"for its KV cache, and has {budget / 1e9:.1f} GB of {hardware.title}"
        )
    return tokens

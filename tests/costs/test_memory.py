"""How many tokens fit beside the weights."""

import pytest

from easerve.config import ConfigError
from easerve.costs import hardware, models
from easerve.costs.memory import kv_tokens

LLAVA, QWEN, ULTRAVOX = map(models.read, ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b"))
ADA, A100 = hardware.read("rtx6000-ada"), hardware.read("a100-80")


@pytest.mark.parametrize(
    ("model", "device", "tp", "expected"),
    [
        (LLAVA, ADA, 2, 80_600),
        (LLAVA, ADA, 4, 441_000),
        (LLAVA, A100, 1, 25_000),
        (LLAVA, A100, 2, 330_000),
        (QWEN, ADA, 2, 88_000),
        (QWEN, ADA, 4, 426_000),
        (QWEN, A100, 1, 36_000),
        (QWEN, A100, 2, 322_000),
        (ULTRAVOX, ADA, 2, 68_000),
        (ULTRAVOX, ADA, 4, 242_000),
        (ULTRAVOX, A100, 1, 41_000),
        (ULTRAVOX, A100, 2, 189_000),
    ],
)
def test_against_arithmetic_by_hand(
    model: models.ModelSpec, device: hardware.Hardware, tp: int, expected: int
) -> None:
    """90 % of the memory, less the weights and 1.5 GiB of each device for activations."""
    assert kv_tokens(model.language, device, tp) == pytest.approx(expected, rel=0.1)


def test_what_else_is_there_takes_its_part() -> None:
    alone = kv_tokens(LLAVA.language, ADA, 2)
    beside = kv_tokens(LLAVA.language, ADA, 2, other_bytes=LLAVA.encoder.weight_bytes)
    less = 2 * LLAVA.encoder.weight_bytes / LLAVA.language.kv_bytes_per_token
    assert alone - beside == pytest.approx(less, abs=1)
    assert kv_tokens(LLAVA.language, ADA, 2, utilization=0.95) > alone
    assert kv_tokens(LLAVA.language, ADA, 2, activation_bytes=0) > alone


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 1: an engine needs 70.4 GB .* 45"):
        kv_tokens(LLAVA.language, ADA, 1)

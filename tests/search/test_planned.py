from typing import Any

import pytest

from easerve.config import ConfigError, build
from easerve.engines.vllm import memory
from easerve.engines.vllm.memory import plan
from easerve.search.overlay import laid
from easerve.search.planned import Planned, indivisible, offload, too_small
from easerve.types import Stage
from tests.search.machines import INFO

HEADS = {"num_attention_heads": 56, "num_key_value_heads": 8, "max_position_embeddings": 4096}


def planned(text: dict[str, Any] | None = None, **content: Any) -> Planned:
    given = {"model": "acme/m", "device": "cuda", "gpu_memory": 48 << 30, **content}
    return Planned(given, INFO, text or {}, 1, True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "fits"),
    [(56, 8, 8, True), (56, 8, 16, False), (32, 2, 8, True), (12, 3, 2, False), (12, 3, 6, True)],
)
def test_devices_have_whole_heads(heads: int, kv_heads: int, tp: int, fits: bool) -> None:
    assert (indivisible(heads, kv_heads, tp) is None) is fits


def test_a_kv_cache_of_which_nothing_is_known_is_taken_to_suffice() -> None:
    assert too_small(None, 99) is None
    assert too_small(99, 99) is None
    assert too_small(98, 99) == "its KV cache of 98 tokens does not hold a request of 99"


def test_heads_are_those_of_the_models_folder() -> None:
    made = planned(HEADS)
    assert made.refuses(Stage.DECODE, 16, False) == "it does not divide 56 heads, 8 of the KV cache"
    assert made.refuses(Stage.DECODE, 4, False) is None
    assert made.refuses(Stage.ENCODE, 1, False) is None
    assert planned({"num_attention_heads": 6}).refuses(Stage.DECODE, 4, False) is not None


def test_without_a_limit_vllm_wants_room_for_the_longest_request_of_the_model() -> None:
    why = planned({**HEADS, "max_position_embeddings": 1 << 20}).refuses(Stage.DECODE, 4, False)
    assert why is not None
    assert why.endswith("does not hold a request of 1048576")


def test_what_the_plan_says_is_what_a_whole_deployment_is_told() -> None:
    why = planned().refuses(Stage.DECODE, 1, False)
    content = {"model": "acme/m", "device": "cuda", "gpu_memory": 48 << 30}
    two = {"prefill": {"tensor_parallel_size": 2}}
    with pytest.raises(ConfigError) as error:
        memory.check(plan(build({**content, **two}, "test"), INFO))
    assert why == str(error.value)


def test_keys_that_local_prefill_does_not_go_with_are_told() -> None:
    why = planned(encode={"gpu_memory_utilization": 0.1}).refuses(Stage.PREFILL, 2, True)
    assert why is not None
    assert "give both or neither" in why


def test_a_device_is_divided_where_each_engine_has_one() -> None:
    assert offload(1, True) == {"local_prefill": {"tensor_parallel_size": 1}, "partition": {}}
    assert offload(2, True) == {"local_prefill": {"tensor_parallel_size": 2}, "partition": None}
    assert offload(1, False) == {"local_prefill": {}}


def test_knobs_of_a_partition_go_with_it() -> None:
    content = {
        "local_prefill": {},
        "partition": {"driver": "gate"},
        "policy": {"how": "gate", "when": "gap"},
    }
    assert laid(content, {"partition": {}}) == content
    assert laid(content, {"partition": None})["policy"] == {"when": "gap"}
    assert laid({}, {"partition": None}) == {"partition": None}
    build({"model": "acme/m", **laid(content, {"partition": None})}, "test")


def test_a_file_with_all_sections_can_be_asked_for_each_stage() -> None:
    made = planned(
        encode={"replicas": 2, "devices": [[0], [1]]},
        local_prefill={"tensor_parallel_size": 2},
        prefill={"tensor_parallel_size": 2, "devices": [[2, 3]]},
        decode={"tensor_parallel_size": 2, "replicas": 2},
        policy={"remote_share": 0.5},
    )
    for stage in (Stage.ENCODE, Stage.PREFILL, Stage.DECODE):
        assert made.refuses(stage, 1 if stage is Stage.ENCODE else 2, False) is None
    assert made.refuses(Stage.PREFILL, 4, True) is None

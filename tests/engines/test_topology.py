from typing import Any

import pytest

from easerve.config import build
from easerve.engines.vllm.topology import Member, members
from easerve.types import Stage


def made(**content: Any) -> dict[str, Member]:
    deployment = build({"model": "m", **content}, "test")
    return {member.worker_id: member for member in members(deployment)}


def devices(**content: Any) -> dict[str, tuple[int, ...]]:
    return {name: member.devices for name, member in made(device="cuda", **content).items()}


def local(**content: Any) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Devices and neighbours of the local prefill engines."""
    found = made(device="cuda", **content)
    return {name: (each.devices, each.beside) for name, each in found.items() if each.beside}


def test_engines_are_numbered_within_their_stage_and_in_the_order_of_the_stages() -> None:
    found = made(encode={"replicas": 2}, local_prefill={}, decode={"replicas": 2})
    assert list(found) == [
        *("encode-0", "encode-1", "local-prefill-0", "local-prefill-1"),
        *("prefill-0", "decode-0", "decode-1"),
    ]
    assert [each.kind for each in found.values()] == [
        *("encode", "encode", "local prefill", "local prefill", "prefill", "decode", "decode"),
    ]
    assert found["local-prefill-0"].stage is found["prefill-0"].stage is Stage.PREFILL


def test_each_engine_has_its_own_section() -> None:
    found = made(local_prefill={"max_num_seqs": 3}, prefill={"max_num_seqs": 5})
    slots = {name: member.section.max_num_seqs for name, member in found.items()}
    assert slots == {"encode-0": 256, "local-prefill-0": 3, "prefill-0": 5, "decode-0": 256}


def test_free_gpus_are_the_lowest_that_nobody_named() -> None:
    found = devices(
        encode={"replicas": 2},
        prefill={"tensor_parallel_size": 2, "devices": [[3, 1]]},
        decode={"tensor_parallel_size": 2},
    )
    expected = {"encode-0": (0,), "encode-1": (2,), "prefill-0": (3, 1), "decode-0": (4, 5)}
    assert found == expected


def test_local_prefill_takes_no_gpu_of_its_own() -> None:
    stages: dict[str, Any] = {"encode": {"replicas": 2}, "decode": {"tensor_parallel_size": 2}}
    without = devices(**stages)
    assert devices(local_prefill={}, **stages) == without | {
        "local-prefill-0": without["encode-0"],
        "local-prefill-1": without["encode-1"],
    }


def test_on_a_cpu_there_is_a_local_engine_for_each_encoder_and_on_its_cores() -> None:
    cores = {"replicas": 2, "cores": [[0, 1], [2]]}
    found = made(encode=cores, local_prefill={}, prefill={"cores": [[3]]})
    seen = {name: (each.cores, each.beside, each.devices) for name, each in found.items()}
    assert seen == {
        "encode-0": ((0, 1), (), ()),
        "encode-1": ((2,), (), ()),
        "local-prefill-0": ((0, 1), ("encode-0",), ()),
        "local-prefill-1": ((2,), ("encode-1",), ()),
        "prefill-0": ((3,), (), ()),
        "decode-0": ((), (), ()),
    }


def test_two_encoders_share_a_local_engine_that_needs_two_gpus() -> None:
    """As a 34B model on 48 GB GPUs."""
    found = local(encode={"replicas": 4}, local_prefill={"tensor_parallel_size": 2})
    assert found == {
        "local-prefill-0": ((0, 1), ("encode-0", "encode-1")),
        "local-prefill-1": ((2, 3), ("encode-2", "encode-3")),
    }


def test_an_encoder_on_two_gpus_has_a_local_engine_on_each() -> None:
    encode = {"tensor_parallel_size": 2, "devices": [[5, 2]]}
    assert local(encode=encode, local_prefill={}) == {
        "local-prefill-0": ((5,), ("encode-0",)),
        "local-prefill-1": ((2,), ("encode-0",)),
    }


@pytest.mark.parametrize(
    ("size", "beside"),
    [
        (3, [("encode-0", "encode-1"), ("encode-1", "encode-2")]),
        (6, [("encode-0", "encode-1", "encode-2")]),
    ],
)
def test_gpus_are_cut_into_groups_in_the_encoders_order(
    size: int, beside: list[tuple[str, ...]]
) -> None:
    encode = {"replicas": 3, "tensor_parallel_size": 2, "devices": [[4, 5], [2, 3], [0, 1]]}
    found = local(encode=encode, local_prefill={"tensor_parallel_size": size})
    assert [each for _, each in found.values()] == beside
    assert [gpu for group, _ in found.values() for gpu in group] == [4, 5, 2, 3, 0, 1]

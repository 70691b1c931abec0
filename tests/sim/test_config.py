import pytest
from pydantic import ValidationError

from easerve import config
from easerve.sim.config import SECTIONS, EaserveSystem, HydraInferSystem, Limits, LlmEngines

DISAGGREGATED = {"encode": {"replicas": 4}, "prefill": {}, "decode": {"replicas": 2}}


@pytest.mark.parametrize(
    ("system", "content", "num_gpus"),
    [
        ("easerve", DISAGGREGATED, 7),
        ("easerve", DISAGGREGATED | {"local_prefill": {"tensor_parallel_size": 2}}, 7),
        ("easerve", DISAGGREGATED | {"prefill": {"replicas": 2, "tensor_parallel_size": 3}}, 12),
        ("vllm", {}, 8),
        ("vllm-epd", DISAGGREGATED, 7),
        ("vllm-epd", DISAGGREGATED | {"prefill": None}, 6),
        ("dynamo", DISAGGREGATED, 7),
        ("epdserve", DISAGGREGATED, 7),
        ("hydrainfer", {"ed": {"replicas": 2, "tensor_parallel_size": 2}, "p": {}}, 5),
    ],
)
def test_a_system_knows_its_gpus(system: str, content: dict[str, object], num_gpus: int) -> None:
    assert SECTIONS[system].model_validate(content).num_gpus == num_gpus


def test_workers_have_names() -> None:
    content = DISAGGREGATED | {"local_prefill": {"tensor_parallel_size": 2}}
    workers = EaserveSystem.model_validate(content).workers
    assert workers == ("e0", "e1", "e2", "e3", "l0", "l1", "p0", "d0", "d1")


def test_limits_are_the_servers() -> None:
    server = config.Limits()
    for name, value in Limits().model_dump().items():
        assert value == getattr(server, name)


def test_engines_are_as_vllms() -> None:
    assert LlmEngines().max_num_seqs == config.StageSection().max_num_seqs
    utilization = config.StageSection().gpu_memory_utilization
    assert LlmEngines().gpu_memory_utilization == utilization


def test_nodes_are_named_by_their_stages() -> None:
    system = HydraInferSystem.model_validate({"epd": {"replicas": 3}, "d": {}})
    assert {kind: nodes.replicas for kind, nodes in system.nodes.items()} == {"epd": 3, "d": 1}
    with pytest.raises(ValidationError, match="no node runs encode: give one of e, ep, ed, epd"):
        HydraInferSystem.model_validate({"pd": {}})

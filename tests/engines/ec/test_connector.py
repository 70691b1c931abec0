"""The connector between its halves and stand-ins for the few things of vLLM that it uses."""

import enum
import importlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .requests import ended, request

torch = pytest.importorskip("torch")
NAME = "prefill-0"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    def __init__(self, vllm_config: Any, role: Role) -> None:
        self._role = role
        self.is_producer = "producer" in vllm_config.ec_transfer_config.ec_role
        self.is_consumer = "consumer" in vllm_config.ec_transfer_config.ec_role
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


def metadata_of(features: list[Any], _: object) -> dict[str, Any]:
    return {feature.identifier: {"metadata": {}} for feature in features}


VLLM: dict[str, dict[str, Any]] = {
    "vllm.config": {"VllmConfig": object},
    "vllm.distributed.ec_transfer.ec_connector.base": {
        "ECConnectorBase": Base,
        "ECConnectorMetadata": object,
        "ECConnectorRole": Role,
    },
    "vllm.distributed.ec_transfer.ec_connector.utils": {
        "PlaceholderMetadataResolver": lambda _: None,
        "collect_ec_item_metadata": metadata_of,
    },
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    "vllm.v1.core.sched.output": {"SchedulerOutput": object},
    "vllm.v1.request": {"Request": object},
}
CONNECTOR = "easerve.engines.vllm.ec.connector"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, content in VLLM.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        while name := name.rpartition(".")[0]:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
    monkeypatch.setenv("EASERVE_EC_TOKEN", "secret")
    yield importlib.import_module(CONNECTOR)
    del sys.modules[CONNECTOR]


Make = Callable[..., Any]


@pytest.fixture
def make(module: ModuleType, tmp_path: Path) -> Iterator[Make]:
    made = []

    def make(role: str, half: Role, rank: int = 0, **more: Any) -> Any:
        extra = {"inboxes": str(tmp_path), "name": NAME, "timeout_s": 5, **more}
        config = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(ec_role=role, ec_connector_extra_config=extra),
            parallel_config=SimpleNamespace(
                rank=rank, world_size=1, distributed_executor_backend=None
            ),
            model_config=None,
        )
        made.append(module.PushConnector(config, half))
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()


def scheduled(num_tokens: int = 1, freed: list[str] | None = None) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens, free_encoder_mm_hashes=freed or []
    )


class Encoder:
    def __init__(self, make: Make, rank: int = 0) -> None:
        self.scheduler = make("ec_producer", Role.SCHEDULER)
        self.worker = make("ec_producer", Role.WORKER, rank)
        self.cache = dict[str, Any]()

    def step(self, one: Any, *indices: int, freed: list[str] | None = None) -> None:
        """As a model runner goes through it when these items of a request are encoded."""
        assert self.scheduler.ensure_cache_available(one, 0)
        for index in indices:
            self.scheduler.update_state_after_alloc(one, index)
        self.worker.metadata = self.scheduler.build_connector_meta(scheduled(1, freed))
        self.worker.start_save_caches(encoder_cache=self.cache)
        for index in indices:
            key = one.mm_features[index].identifier
            self.cache[key] = torch.full((2, 3), float(index + 1))
            self.worker.save_caches(self.cache, key)
        assert self.worker.get_finished(set()) == (None, None)


def until_available(prefill: Any, one: Any) -> None:
    end = time.monotonic() + 5
    while not prefill.ensure_cache_available(one, 0):
        assert time.monotonic() < end
        prefill.build_connector_meta(scheduled(0))


def test_an_embedding_goes_from_the_encoders_cache_to_the_prefill_engines(make: Make) -> None:
    prefill, prefill_worker = make("ec_consumer", Role.SCHEDULER), make("ec_consumer", Role.WORKER)
    encoder = Encoder(make)
    asked = request("p", "a", "b", coming=[0, 1])
    assert not prefill.ensure_cache_available(asked, 0)
    assert not prefill.has_cache_item("a")
    wanted = request("e", "a", "b", destinations=[[NAME], [NAME]])
    encoder.step(wanted, 0, 1)
    until_available(prefill, asked)
    assert prefill.has_cache_item("a")
    for index in (0, 1):
        prefill.update_state_after_alloc(asked, index)
    step = prefill.build_connector_meta(scheduled())
    for metadata in (step, pickle.loads(pickle.dumps(step))):  # to a worker in another process
        prefill_worker.metadata, cache = metadata, dict[str, Any]()
        prefill_worker.start_load_caches(cache)
        assert torch.equal(cache["a"], encoder.cache["a"])
        assert torch.equal(cache["b"], encoder.cache["b"])
    assert prefill_worker.get_finished(set()) == (None, None)
    delayed, told = prefill.request_finished(ended(asked))
    assert not delayed
    assert told["bundles"][0][:2] == [2, 64 + 24]
    assert told["wait_s"] > 0
    assert encoder.scheduler.request_finished(ended(wanted)) == (
        False,
        {"items": {"a": {"metadata": {}}, "b": {"metadata": {}}}},
    )


def test_the_encoder_says_what_it_dropped(make: Make) -> None:
    encoder = Encoder(make)
    wanted = request("e", "a", destinations=[[NAME]])
    encoder.step(wanted, 0, freed=["a", "b"])
    _, told = encoder.scheduler.request_finished(ended(wanted))
    assert told["evicted"] == ["b"]


def test_a_request_whose_item_does_not_come_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easerve.engines.vllm.ec.consumer.GRACE_S", 0.0)
    prefill = make("ec_consumer", Role.SCHEDULER)
    assert not prefill.ensure_cache_available(request("p", "a", coming=[]), 0)
    assert prefill.take_unavailable_requests() == {"p"}


def test_an_encoder_holds_nothing_back_and_takes_nothing_in(make: Make) -> None:
    encoder = Encoder(make)
    assert encoder.scheduler.take_unavailable_requests() == set()
    assert not encoder.scheduler.has_cache_item("a")
    encoder.worker.metadata = encoder.scheduler.build_connector_meta(scheduled())
    encoder.worker.start_load_caches(cache := dict[str, Any]())
    assert not cache


def test_one_rank_of_an_encoder_pushes(make: Make) -> None:
    prefill, encoder = make("ec_consumer", Role.SCHEDULER), Encoder(make, rank=1)
    encoder.step(request("e", "a", destinations=[[NAME]]), 0)
    assert not prefill.ensure_cache_available(request("p", "a", coming=[0, 1]), 0)
    time.sleep(0.05)
    assert not prefill.has_cache_item("a")


def test_the_socket_goes_with_the_engine(make: Make, tmp_path: Path) -> None:
    prefill = make("ec_consumer", Role.SCHEDULER)
    assert (tmp_path / f"{NAME}.ec.sock").is_socket()
    prefill.shutdown()
    assert not (tmp_path / f"{NAME}.ec.sock").exists()


def test_a_prefill_engine_may_listen_to_other_hosts_as_well(
    make: Make, module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []

    class Listens:
        def __init__(self, place: Path | str, *_: object) -> None:
            made.append(str(place))

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(module, "Inbox", Listens)
    make("ec_consumer", Role.SCHEDULER, listen="tcp://0.0.0.0:7000").shutdown()
    assert made == [str(tmp_path / f"{NAME}.ec.sock"), "tcp://0.0.0.0:7000", "closed", "closed"]


def test_no_engine_starts_without_the_secret(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EASERVE_EC_TOKEN")
    with pytest.raises(ValueError, match="EASERVE_EC_TOKEN is not set"):
        make("ec_producer", Role.SCHEDULER)


def test_an_engine_is_one_side(make: Make) -> None:
    with pytest.raises(ValueError, match="ec_producer or ec_consumer"):
        make("ec_producer and ec_consumer", Role.SCHEDULER)

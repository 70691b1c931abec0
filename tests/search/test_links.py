import sys
from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.config import ConfigError
from easerve.search.links import Nvml, islands
from tests.search.machines import Links


def test_gpus_behind_switches_are_one_island() -> None:
    assert islands(Links(8, combinations(range(8), 2)), range(8)) == (tuple(range(8)),)


def test_without_nvlink_there_is_none() -> None:
    assert islands(Links(8), range(8)) == ()


def test_bridges_make_pairs_and_a_gpu_without_one_is_in_none() -> None:
    assert islands(Links(5, [(0, 1), (2, 3)]), range(5)) == ((0, 1), (2, 3))
    assert islands(Links(5, [(0, 1), (2, 3)]), [0, 2, 3]) == ((2, 3),)


def test_a_mesh_in_which_not_all_are_neighbours_is_two_islands() -> None:
    quads = [*combinations(range(4), 2), *combinations(range(4, 8), 2)]
    across = [(gpu, gpu + 4) for gpu in range(4)]
    assert islands(Links(8, [*quads, *across]), range(8)) == ((0, 1, 2, 3), (4, 5, 6, 7))


@given(
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] < pair[1]))
)
def test_nvlink_joins_each_of_an_island_with_each(links: set[tuple[int, int]]) -> None:
    driver = Links(7, links)
    found = islands(driver, range(7))
    assert all(driver.are_linked(*pair) for island in found for pair in combinations(island, 2))
    joined = [gpu for island in found for gpu in island]
    assert len(joined) == len(set(joined))
    assert all(len(island) > 1 for island in found)


class NvmlError(Exception):
    pass


def library(statuses: dict[tuple[int, int], int]) -> SimpleNamespace:
    def status(one: int, other: int, index: int) -> int:
        assert index == 2
        if (one, other) not in statuses:
            raise NvmlError("not supported")
        return statuses[one, other]

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetP2PStatus=status,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVMLError=NvmlError,
    )


def test_the_driver_is_asked_for_gpus_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library({(0, 1): 0, (0, 2): 5}))
    driver = Nvml()
    assert driver.num_gpus() == 3
    assert driver.are_linked(0, 1)
    assert not driver.are_linked(0, 2)
    assert not driver.are_linked(1, 2)  # it does not know what that is


def test_a_machine_without_a_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="NVIDIA driver cannot be asked"):
        Nvml()

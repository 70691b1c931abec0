"""Which GPUs of this machine NVLink joins."""

from collections.abc import Sequence
from typing import Protocol

from easerve.config import ConfigError


class Driver(Protocol):
    """What a machine's GPUs say of themselves."""

    def num_gpus(self) -> int: ...

    def are_linked(self, one: int, other: int) -> bool:
        """Whether NVLink joins two GPUs, directly or by a switch."""
        ...


class Nvml:
    """Raises ConfigError where there is no driver to ask."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no package, or no driver: each has its own kinds
            raise ConfigError(f"the NVIDIA driver cannot be asked for its GPUs: {error}") from None
        self._nvml = pynvml

    def num_gpus(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def are_linked(self, one: int, other: int) -> bool:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(each) for each in (one, other)]
        try:
            status = nvml.nvmlDeviceGetP2PStatus(*handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except nvml.NVMLError:  # a card that has never heard of it
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)


def islands(driver: Driver, gpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups in which NVLink joins each with each; a GPU without a link is in none.

    A GPU goes to the first group that it has all links to: eight V100, linked as a mesh, are two
    groups of four.
    """
    found: list[list[int]] = []
    for gpu in gpus:
        for island in found:
            if all(driver.are_linked(gpu, other) for other in island):
                island.append(gpu)
                break
        else:
            found.append([gpu])
    return tuple(tuple(island) for island in found if len(island) > 1)

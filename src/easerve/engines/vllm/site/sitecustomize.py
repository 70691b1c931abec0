"""Fixes that an engine process needs before vLLM is imported.

Python imports ``sitecustomize`` at start-up; the launcher puts this folder on the engines'
PYTHONPATH and on nobody else's, so every process of an engine (API server, engine core,
model inspection) gets the same fixes and the router gets none:

* it dies with its parent, so that no ``kill -9`` leaves an engine behind;
* it stays on the cores that its engine was given (``EASERVE_CORES``, e.g. ``0,1``);
* a CUDA build of torchvision beside a CPU build of torch (what the public package index alone
  gives) has its operators declared, as its compiled part cannot load; CUDA builds of torchaudio
  and torchcodec are hidden. Builds that match are left alone;
* NIXL's progress thread sleeps between polls instead of burning a core per engine.

Nothing heavy is imported here: hooks wait for the import that they mend.
"""

import contextlib
import ctypes
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
PARENT_PID = "EASERVE_PARENT_PID"  # set by each process for those that it starts
NIXL_PROGRESS_DELAY_US = int(os.environ.get("EASERVE_NIXL_PROGRESS_DELAY_US", "100"))

# What torchvision's Python half looks up while it is imported. Nothing here ever calls them, so
# the schema is a stand-in.
TORCHVISION_OPERATORS = (
    "nms qnms box_iou_rotated roi_align qroi_align _roi_align_backward roi_pool "
    "_roi_pool_backward ps_roi_align _ps_roi_align_backward ps_roi_pool _ps_roi_pool_backward "
    "deform_conv2d _deform_conv2d_backward"
).split()
_declared: list[object] = []  # a torch Library undoes its definitions when it is collected


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux); end if it has ended before that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_PID)
    if parent is not None and has_ended(parent):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT_PID] = str(os.getpid())


def has_ended(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 (pathlib is slow to import)
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def declare_torchvision_operators(spec: ModuleSpec) -> None:
    """Declare torchvision's operators unless its compiled part loads beside this torch."""
    import torch

    for folder in spec.submodule_search_locations or ():
        try:
            torch.ops.load_library(f"{folder}/_C.so")
            return
        except (OSError, RuntimeError):
            pass
    library = torch.library.Library("torchvision", "DEF")
    for name in TORCHVISION_OPERATORS:
        library.define(f"{name}(Tensor input) -> Tensor")
    _declared.append(library)


def hide_mismatched_companions() -> None:
    """Make torchaudio and torchcodec look absent where only their CUDA builds are installed."""
    try:
        if not version("torch").endswith("+cpu"):
            return
    except PackageNotFoundError:
        return
    for name in ("torchaudio", "torchcodec"):
        with contextlib.suppress(PackageNotFoundError):
            if not version(name).endswith("+cpu"):
                sys.modules[name] = None  # type: ignore[assignment]


def tame_nixl(api: ModuleType) -> None:
    """Give NIXL's agents a progress delay; its Python API fixes the delay at 0 (a busy loop).

    The thread itself must stay: a peer's read over TCP is answered by it.
    """
    bindings = api.nixlBind
    config: Any = bindings.nixlAgentConfig
    delay = config.pthrDelay

    class AgentConfig(config):  # type: ignore[misc]
        @property
        def pthrDelay(self) -> int:
            return int(delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _microseconds: int) -> None:
            delay.__set__(self, NIXL_PROGRESS_DELAY_US)

    class Bindings:
        nixlAgentConfig = AgentConfig

        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

    api.nixlBind = Bindings()  # type: ignore[attr-defined]


BEFORE: dict[str, Callable[[ModuleSpec], None]] = {"torchvision": declare_torchvision_operators}
AFTER: dict[str, Callable[[ModuleType], None]] = {
    f"nixl_{build}._api": tame_nixl for build in ("cu12", "cu13", "rocm")
}


class ImportHooks:
    """Runs a hook before or after the first import of a few modules; finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        before, after = BEFORE.pop(name, None), AFTER.pop(name, None)
        if before is None and after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        if before is not None:
            before(spec)
        if after is not None:
            run, load = after, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if cores := os.environ.get("EASERVE_CORES"):
    os.sched_setaffinity(0, map(int, cores.split(",")))
sys.meta_path.insert(0, ImportHooks())
hide_mismatched_companions()
# The resource tracker has to outlive its parent: it removes what the parent left in /dev/shm.
if not any("resource_tracker" in argument for argument in sys.orig_argv):
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)

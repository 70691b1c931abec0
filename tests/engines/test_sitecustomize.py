"""The fixes, in processes of their own. ``run`` sees our folder and a made one, nothing installed:
``-S`` leaves out site-packages, so that no real torch is found.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from easerve.engines.vllm.launch import SITE

from ..processes import is_alive, wait_until


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{folder}", **more}


def run(folder: Path, code: str, **env: str) -> str:
    """Run code in a process that has the fixes; what it prints."""
    process = subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize\n{code}"],
        env=environment(folder, **env),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    return process.stdout.strip()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(folder: Path, name: str, version: str) -> None:
    """What a package's metadata look like where it is installed."""
    info = folder / f"{name}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_it_is_what_python_finds_at_start_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
fixes = sys.modules["sitecustomize"]
print(fixes.__file__, *(name for name in ("torch", "vllm", "nixl") if sys.modules.get(name)))
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True)
    assert found.stdout.decode().split() == [str(SITE / "sitecustomize.py")]


@pytest.mark.parametrize("given", [None, "one", "all"])
def test_a_process_stays_on_the_cores_of_its_engine(tmp_path: Path, given: str | None) -> None:
    cores = sorted(os.sched_getaffinity(0))
    expected = cores[-1:] if given == "one" else cores
    env = {} if given is None else {"EASERVE_CORES": ",".join(map(str, expected))}
    code = "import os; print(*sorted(os.sched_getaffinity(0)))"
    assert run(tmp_path, code, **env).split() == [str(core) for core in expected]


# Dying with the parent ------------------------------------------------------------------------

SLEEP = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {code!r}, *sys.argv[1:]])
time.sleep(60)
"""
FORKS = f"""
import os
os.fork()
{SLEEP}
"""


@pytest.mark.parametrize(
    ("code", "num_pids"), [(SLEEP, 1), (FORKS, 2)], ids=["child", "child-and-forked-grandchild"]
)
def test_processes_end_with_a_parent_that_is_killed(
    tmp_path: Path, code: str, num_pids: int
) -> None:
    """The parent itself has no fixes, as the supervisor has none."""
    start = "import os; os.environ['PYTHONPATH'] = os.environ['FIXES']\n"
    with subprocess.Popen(
        [sys.executable, "-c", start + PARENT.format(code=code)],
        env={**os.environ, "FIXES": str(SITE)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(num_pids)]
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_process_whose_parent_ended_before_it_began_ends_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as parent:
        pass
    ended = subprocess.run(
        [sys.executable, "-c", "print('survives')"],
        env=environment(tmp_path, EASERVE_PARENT_PID=str(parent.pid)),
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_a_process_may_be_started_through_another_program(tmp_path: Path) -> None:
    code = """
import subprocess, sys
subprocess.run(["sh", "-c", '"$0" -c "print(1)"; true', sys.executable], check=True)
"""
    assert run(tmp_path, code) == "1"


def test_the_resource_tracker_outlives_its_parent(tmp_path: Path) -> None:
    """It removes what the parent left in shared memory."""
    start = "import os; os.environ['PYTHONPATH'] = os.environ['FIXES']\n"
    with subprocess.Popen(
        [sys.executable, "-c", start + PARENT.format(code=SLEEP), "resource_tracker"],
        env={**os.environ, "FIXES": str(SITE)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            with pytest.raises(AssertionError):
                wait_until(lambda: not is_alive(pid), patience_s=0.3)
        finally:
            os.kill(pid, signal.SIGKILL)


# NIXL -----------------------------------------------------------------------------------------

NIXL_BINDINGS = """
class nixlAgentConfig:
    def __init__(self):
        self._delay = 1
        self.threads = 4
    pthrDelay = property(lambda self: self._delay, lambda self, us: setattr(self, "_delay", us))

class nixlAgent:
    pass
"""
NIXL_API = """
from nixl_{build} import _bindings as nixlBind

def config():
    made = nixlBind.nixlAgentConfig()
    made.pthrDelay = 0
    return made
"""


def install_nixl(folder: Path, build: str) -> None:
    package = folder / f"nixl_{build}"
    write(package / "__init__.py", "")
    write(package / "_bindings.py", NIXL_BINDINGS)
    write(package / "_api.py", NIXL_API.format(build=build))


@pytest.mark.parametrize("build", ["cu12", "cu13", "rocm"])
def test_nixls_progress_thread_sleeps_between_polls(tmp_path: Path, build: str) -> None:
    install_nixl(tmp_path, build)
    code = f"from nixl_{build} import _api; print(_api.config().pthrDelay, _api.config().threads)"
    assert run(tmp_path, code) == "100 4"


def test_the_delay_of_nixl_can_be_set(tmp_path: Path) -> None:
    install_nixl(tmp_path, "cu13")
    code = "from nixl_cu13 import _api; print(_api.config().pthrDelay)"
    assert run(tmp_path, code, EASERVE_NIXL_PROGRESS_DELAY_US="250") == "250"


def test_the_rest_of_nixl_is_as_it_was(tmp_path: Path) -> None:
    install_nixl(tmp_path, "cu13")
    code = """
from nixl_cu13 import _api, _bindings
print(_api.nixlBind.nixlAgent is _bindings.nixlAgent, hasattr(_api.nixlBind, "nosuch"))
print(isinstance(_api.config(), _bindings.nixlAgentConfig), _bindings.nixlAgentConfig().pthrDelay)
"""
    assert run(tmp_path, code).split() == ["True", "False", "True", "1"]


# torchaudio and torchcodec --------------------------------------------------------------------

COMPANIONS = ("torchaudio", "torchcodec")
IMPORT_COMPANIONS = """
for name in ("torchaudio", "torchcodec"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        print(name, "hidden")
    else:
        print(name, "there")
"""


@pytest.mark.parametrize(
    ("torch", "companion", "there"),
    [
        ("2.13.0+cpu", "2.11.1", False),
        ("2.13.0+cpu", "2.11.1+cu130", False),
        ("2.13.0+cpu", "2.11.1+cpu", True),
        ("2.13.0", "2.11.1", True),
        ("2.13.0+cu130", "2.11.1", True),
        (None, "2.11.1", True),
    ],
)
def test_only_builds_that_do_not_match_a_cpu_torch_are_hidden(
    tmp_path: Path, torch: str | None, companion: str, there: bool
) -> None:
    if torch is not None:
        install(tmp_path, "torch", torch)
    for name in COMPANIONS:
        install(tmp_path, name, companion)
        write(tmp_path / f"{name}.py", "")
    state = "there" if there else "hidden"
    expected = [f"{name} {state}" for name in COMPANIONS]
    assert run(tmp_path, IMPORT_COMPANIONS).splitlines() == expected


# torchvision ----------------------------------------------------------------------------------

TORCH = """
class ops:
    @staticmethod
    def load_library(path):
        print("load", path.rpartition("/")[2])
        {load}

class library:
    class Library:
        def __init__(self, name, kind):
            print(name, kind)
        def define(self, schema):
            print("define", schema)
        def __del__(self):
            print("undefined")
"""
TORCHVISION = 'import torch; print("torchvision runs")'


def install_torchvision(folder: Path, load: str) -> None:
    write(folder / "torch.py", TORCH.format(load=load))
    write(folder / "torchvision/__init__.py", TORCHVISION)


def test_operators_are_declared_where_the_compiled_part_does_not_load(tmp_path: Path) -> None:
    install_torchvision(tmp_path, 'raise OSError("undefined symbol")')
    code = "import gc, os, torchvision; gc.collect(); print('end', flush=True); os._exit(0)"
    load, library, *defined, ran, end = run(tmp_path, code).splitlines()
    assert (load, library) == ("load _C.so", "torchvision DEF")
    names = {line.removeprefix("define ").partition("(")[0] for line in defined}
    assert {"nms", "roi_align", "_roi_align_backward", "deform_conv2d"} <= names
    assert (ran, end) == ("torchvision runs", "end"), "declared first, and never taken back"


def test_a_torchvision_that_matches_is_left_alone(tmp_path: Path) -> None:
    install_torchvision(tmp_path, "pass")
    assert run(tmp_path, "import torchvision").splitlines() == ["load _C.so", "torchvision runs"]


def test_it_is_done_once(tmp_path: Path) -> None:
    install_torchvision(tmp_path, "pass")
    code = "import sys, torchvision; del sys.modules['torchvision']; import torchvision"
    seen = run(tmp_path, code).splitlines()
    assert seen == ["load _C.so", "torchvision runs", "torchvision runs"]


def test_without_torch_everything_else_is_as_ever(tmp_path: Path) -> None:
    code = """
import importlib.util, json
print(importlib.util.find_spec("torchvision"), importlib.util.find_spec("nixl_cu13"))
try:
    import torchvision
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(tmp_path, code).split() == ["None", "None", "torchvision"]

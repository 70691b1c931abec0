"""The executor of CPU engines, in a process whose engine moves it to one core as it starts."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, os, sys, threading
from types import ModuleType

for name in ("vllm", "vllm.v1", "vllm.v1.executor", "vllm.v1.executor.uniproc_executor"):
    sys.modules[name] = ModuleType(name)


class UniProcExecutor:
    def initialize_from_config(self, config, more=None):
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
        threading.Thread(target=held.wait, daemon=True).start()  # it inherits that
        return config, more


sys.modules[name].UniProcExecutor = UniProcExecutor
from easerve.engines.vllm.executor import SingleProcessExecutor

held = threading.Event()
returned = SingleProcessExecutor().initialize_from_config("config", more=1)
cores = {str(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir("/proc/self/task")}
print(json.dumps([returned, sorted(cores)]))
held.set()
"""


def test_every_thread_gets_the_cores_of_the_engine_back() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=30
    )
    returned, cores = json.loads(ended.stdout)
    assert returned == ["config", 1]
    assert cores == [str(sorted(os.sched_getaffinity(0)))]

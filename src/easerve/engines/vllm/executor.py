"""The executor of CPU engines: the worker lives inside the engine-core process.

vLLM's CPU platform turns the built-in ``uni`` executor into a multi-process one; a class of our
own is left alone. One process less per engine, and one import of vLLM less at start.
"""

import os
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from easerve.engines.partition.cpu import move_threads


class SingleProcessExecutor(UniProcExecutor):
    """vLLM's single-process executor under a name that the CPU platform does not rewrite."""

    def initialize_from_config(self, *args: Any, **options: Any) -> Any:
        """Undo what NIXL's connector does: it moves whoever makes it to the last core.

        In vLLM's own CPU engines that is a worker whose model runs in threads that are bound
        elsewhere; here, every engine of the host would compute on that core.
        """
        cores = os.sched_getaffinity(0)
        result = super().initialize_from_config(*args, **options)
        move_threads(cores)
        return result

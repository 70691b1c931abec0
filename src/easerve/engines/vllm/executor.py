"""The executor of CPU engines: the worker lives inside the engine-core process.

vLLM's CPU platform turns the built-in ``uni`` executor into a multi-process one; a class of our
own is left alone. One process less per engine, and one import of vLLM less at start.
"""

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class SingleProcessExecutor(UniProcExecutor):
    """vLLM's single-process executor under a name that the CPU platform does not rewrite."""

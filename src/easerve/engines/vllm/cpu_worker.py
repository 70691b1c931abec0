"""The workers of encoders and local prefill engines that divide the cores of a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from easerve.engines.partition.attach import Tools
from easerve.engines.vllm.worker import DividedWorker, EncodeWorker, PrefillWorker


class _CpuTools(DividedWorker):
    def tools(self) -> Tools:
        import torch

        # vLLM's CPU worker puts a stub in the place of torch.set_num_threads.
        return Tools(set_num_threads=torch._C.set_num_threads)


class CpuEncodeWorker(_CpuTools, EncodeWorker, CPUWorker):
    pass


class CpuPrefillWorker(_CpuTools, PrefillWorker, CPUWorker):
    pass

"""The workers of encoders and local prefill engines that divide the SMs of a GPU.

The part is a stream, which stays current from ``execute_model`` to ``sample_tokens`` and beyond.
vLLM's V2 model runner looks its stream up once and hands it to what copies the output, so the
cached one is replaced at every switch; the V1 runner asks for the current stream at every step.
Local prefill runs eagerly: a CUDA graph stays on the SMs that it was captured on.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from easerve.engines.partition.attach import Tools
from easerve.engines.partition.sides import PrefillSide
from easerve.engines.vllm.worker import DividedWorker, EncodeWorker, PrefillWorker

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

MAIN_STREAM = "main_stream"  # a cached property of v1/worker/gpu/model_runner.py


class _CudaTools(DividedWorker):
    def tools(self) -> Tools:
        return Tools(on_switch=self._switched)

    def _switched(self, stream: Any) -> None:
        if hasattr(type(self.model_runner), MAIN_STREAM):
            vars(self.model_runner)[MAIN_STREAM] = stream


class CudaEncodeWorker(_CudaTools, EncodeWorker, Worker):
    def finish(self) -> None:
        """Often it has, as a push waits for its embeddings."""
        torch.cuda.current_stream().synchronize()

    def warm_up(self) -> None:
        """A cuBLAS workspace for the stream; vLLM has no dummy batch for an encoder alone."""
        square = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=self.device)
        torch.mm(square, square)
        torch.cuda.current_stream().synchronize()


class _Pending(AsyncModelRunnerOutput):
    """Says when the step has ended."""

    def __init__(self, output: AsyncModelRunnerOutput, side: PrefillSide) -> None:
        self._output, self._side, self._step = output, side, side.step

    def get_output(self) -> "ModelRunnerOutput":
        output = self._output.get_output()
        self._side.end(self._step)
        return output


class CudaPrefillWorker(_CudaTools, PrefillWorker, Worker):
    def warm_up(self) -> None:
        self.execute_dummy_batch()
        torch.cuda.current_stream().synchronize()

    def pending(self, output: Any, side: PrefillSide) -> Any:
        return _Pending(output, side)

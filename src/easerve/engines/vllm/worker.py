"""What our workers do around vLLM's steps, named to vLLM by ``--worker-cls``.

An encoder takes its part of the device before each forward; a local prefill engine leaves what is
demanded before each step that computes something. vLLM calls ``execute_model`` and, where that gave
nothing, ``sample_tokens`` on the same thread; with asynchronous scheduling it gives an output that
is still to come, and the step has ended when that is asked for.
"""

from typing import Any

from easerve.engines.partition.attach import Tools, attach_encode, attach_prefill
from easerve.engines.partition.setup import Setup, read_setup
from easerve.engines.partition.sides import EncodeSide, PrefillSide


class DividedWorker:
    """Over a vLLM worker. ``tools`` are the device's."""

    vllm_config: Any
    model_runner: Any

    def tools(self) -> Tools:
        raise NotImplementedError

    def attach(self, setup: Setup) -> None:
        raise NotImplementedError

    def warm_up(self) -> None:
        """Work on the part of the moment, so that the first real work there finds all it needs."""

    def compile_or_warm_up_model(self) -> Any:
        """vLLM calls this last before it serves."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if setup := read_setup():
            num_ranks = self.vllm_config.parallel_config.world_size
            if num_ranks > 1:
                raise ValueError(
                    f"a divided device needs an engine of one rank, not {num_ranks}: take "
                    "pipeline and tensor parallelism out of extra_args, or the section partition"
                )
            self.attach(setup)
        return times


class EncodeWorker(DividedWorker):
    side: EncodeSide | None = None

    def attach(self, setup: Setup) -> None:
        self.side = attach_encode(setup, self.tools())
        self.side.warm_up(self.warm_up)

    def execute_model(self, scheduler_output: Any) -> Any:
        run = super().execute_model  # type: ignore[misc]
        if self.side is None or not scheduler_output.scheduled_encoder_inputs:
            return run(scheduler_output)
        self.side.begin()
        try:
            return run(scheduler_output)
        finally:
            try:
                self.finish()
            finally:
                self.side.end()

    def finish(self) -> None:
        """Wait until what was submitted has run."""


class PrefillWorker(DividedWorker):
    side: PrefillSide | None = None

    def attach(self, setup: Setup) -> None:
        self.side = attach_prefill(setup, self.tools())
        self.side.warm_up(self.warm_up)

    def execute_model(self, scheduler_output: Any) -> Any:
        run = super().execute_model  # type: ignore[misc]
        if self.side is None or not scheduler_output.total_num_scheduled_tokens:
            return run(scheduler_output)  # the step before may run yet
        self.side.begin()
        return self._after(run(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._after(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def _after(self, output: Any) -> Any:
        """None: sample_tokens follows."""
        if self.side is None or output is None:
            return output
        if hasattr(output, "get_output"):
            return self.pending(output, self.side)
        self.side.end(self.side.step)
        return output

    def pending(self, output: Any, side: PrefillSide) -> Any:
        """An output that is still to come, of the side's last step; only GPUs have them."""
        raise NotImplementedError

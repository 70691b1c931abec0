"""Prometheus metrics of the router. The engines' own are theirs."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from easerve.policy.core import Core
from easerve.types import Stage

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)


class Metrics:
    """Everything is named ``easerve_<stage>_<thing>_<unit>``; one registry per server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"easerve_{name}_seconds", text, buckets=SECONDS, registry=self.registry
            )

        self.stages = {
            "prepare": seconds("prepare_call", "Checking media and rendering the prompt"),
            "encode": seconds("encode_call", "One call to an encoder"),
            "prefill": seconds("prefill_call", "One call to a prefill engine"),
            "decode": seconds("decode_call", "One call to a decode engine"),
        }
        self.ttft = seconds("request_ttft", "From receipt to the first token at the client")
        self.tpot = seconds("request_tpot", "Time per output token after the first")
        self.requests = Counter(
            "easerve_requests", "Requests that ended", ["outcome"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "easerve_prompt_tokens", "Tokens of prompts prefilled", registry=self.registry
        )
        self.output_tokens = Counter(
            "easerve_output_tokens", "Tokens sent to clients", registry=self.registry
        )
        self._open = Gauge("easerve_requests_open", "Admitted, not ended", registry=self.registry)
        self._queue = Gauge(
            "easerve_queue_length", "Work that waits", ["stage"], registry=self.registry
        )
        self._workers = Gauge("easerve_workers", "Engines", ["stage"], registry=self.registry)
        self._backlog = Gauge(
            "easerve_backlog_tokens", "Tokens at an engine", ["worker"], registry=self.registry
        )

    def render(self, core: Core) -> bytes:
        """The text form, with the gauges read from the core now."""
        self._open.set(core.num_open)
        for stage, length in core.queue_lengths().items():
            self._queue.labels(stage.value).set(length)
        counts = dict.fromkeys(Stage, 0)
        self._backlog.clear()
        for worker in core.pool:
            counts[worker.stage] += 1
            self._backlog.labels(worker.worker_id).set(worker.backlog_tokens)
        for stage, count in counts.items():
            self._workers.labels(stage.value).set(count)
        return generate_latest(self.registry)

"""Runs of load over HTTP against a service in this process, by a client in one of its own."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from easerve.bench.client import Planned, run_in_process
from easerve.bench.cpu import cpu_seconds
from easerve.cli.bench.recorder import EncodeRun, Recorder
from easerve.cli.deploy import Service
from easerve.config import Policy
from easerve.goodput import Record, Summary, summarise
from easerve.serve.admin import knobs_of
from easerve.workload import mix


@dataclass(frozen=True, slots=True)
class LoadRun:
    """``cpu_s``: of the server, the engines and the client, for a request."""

    summary: Summary
    encode: EncodeRun
    cpu_s: float

    def row(self) -> dict[str, Any]:
        """What a table shows of it."""
        return {
            "cpu_s": self.cpu_s,
            "items_per_s": sum(len(b.items) for b in self.encode.batches) / self.encode.duration_s,
            "batch_mean": self.encode.batch_mean,
            "encode_wait_s": asdict(self.encode.wait),
            "ttft_s": asdict(self.summary.ttft_s),
            "tpot_s": asdict(self.summary.tpot_s),
            "busy_share": self.encode.busy_share,
            "throughput_per_s": self.summary.throughput_per_s,
            "not_completed": self.summary.num_requests - self.summary.completed,
        }


class Bench:
    """A running service under load. Runs never show an encoder a picture twice."""

    def __init__(self, service: Service, recorder: Recorder, mix: mix.Mix, seed: int) -> None:
        self._service, self._recorder, self._mix, self._seed = service, recorder, mix, seed
        self._num_drawn = 0

    @property
    def num_encoders(self) -> int:
        return self._service.deployment.encode.replicas

    def requests(self, num: int) -> list[dict[str, Any]]:
        """New ones, each with its own pictures. All are as long as they may be."""
        drawn = [
            mix.request(self._mix, self._seed, self._num_drawn + index) for index in range(num)
        ]
        self._num_drawn += num
        return [
            {
                "messages": each.messages,
                "max_tokens": each.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for each in drawn
        ]

    async def run(
        self,
        policy: Policy,
        bodies: Sequence[dict[str, Any]],
        times_s: Sequence[float] | None = None,
        concurrency: int | None = None,
    ) -> LoadRun:
        """At ``times_s``, or in a closed loop of ``concurrency``."""
        service = self._service
        service.driver.turn(knobs_of(policy))
        planned = [
            Planned(at_s, body)
            for at_s, body in zip(times_s or [0.0] * len(bodies), bodies, strict=True)
        ]
        key = service.deployment.server.api_key
        self._recorder.reset(time.monotonic_ns())
        before_s = self._cpu_s()
        samples = await run_in_process(
            service.address,
            service.deployment.name,
            planned,
            key.get_secret_value() if key else None,
            concurrency=concurrency,
        )
        cpu_s = self._cpu_s() - before_s
        encode = self._recorder.run(time.monotonic_ns(), self.num_encoders)
        records = [sample.record for sample in samples]
        summary = summarise(records, _duration_s(records), {})
        return LoadRun(summary, encode, cpu_s / len(bodies))

    def _cpu_s(self) -> float:
        """Of everything so far. The client is a process of ours that has ended."""
        return sum(cpu_seconds([os.getpid(), *self._service.cluster.pids.values()]).values())


def _duration_s(records: Sequence[Record]) -> float:
    begin_s = min(record.sent_s for record in records)
    return max(record.end_s or record.sent_s for record in records) - begin_s

"""Prometheus metrics of the router. The engines' own are theirs."""

import collections
import contextlib
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from easerve.engines.protocol import Bundle, Division
from easerve.policy.adapt import ADAPTED
from easerve.policy.core import Core
from easerve.policy.events import Retuned, StartEncode, StartPrefill
from easerve.policy.partition import ALL, HALF
from easerve.types import NS_PER_S, Side, Stage, WorkerId

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
BYTES = tuple(4.0**power for power in range(5, 16))  # 1 KiB to 1 GiB
ITEMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


NAMES = {ALL: "all", HALF: "half"}
# Of engines.partition.cell.State.
DIVISION_COUNTS = {
    "forwards": "Encoder forwards",
    "late": "Forwards that began while a prefill step held units that they were to have",
    "steps": "Local prefill steps",
    "narrow": "Local prefill steps beside an encode",
    "forced": "Local prefill steps that would have paused for too long",
    "paused_s": "Seconds that local prefill paused",
    "encode_switches": "Changes of the encoder's part",
    "encode_switch_s": "Seconds that they took",
    "prefill_switches": "Changes of local prefill's part",
    "prefill_switch_s": "Seconds that they took",
}


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
        self._batch_items = Histogram(
            "easerve_encode_batch_items",
            "Items in one call to an encoder",
            buckets=ITEMS,
            registry=self.registry,
        )
        self._encode_wait = seconds("encode_wait", "From the encode queue into a batch, an item")
        self._batches = Counter(
            "easerve_encode_batches",
            "Calls to encoders, by why the batch was closed",
            ["reason"],
            registry=self.registry,
        )
        self._held = Counter(
            "easerve_encode_held_seconds",
            "Time that batches were held back for lack of credit",
            ["stage"],
            registry=self.registry,
        )
        self._busy = Counter(
            "easerve_encode_busy_seconds",
            "Time that an encoder worked; its rate is the busy share",
            ["worker"],
            registry=self.registry,
        )
        self._busy_since: dict[WorkerId, tuple[int, int]] = {}
        self._items = Counter(
            "easerve_embedding_items",
            "Embeddings given to requests, by where they came from: prefill had them, an encoder "
            "had them, they were encoded, or shared with a request that they were encoded for",
            ["source"],
            registry=self.registry,
        )
        self._missing = Counter(
            "easerve_embedding_missing",
            "Embeddings that were not where they should have been",
            ["worker"],
            registry=self.registry,
        )
        self._evicted = Counter(
            "easerve_embedding_evicted",
            "Embeddings that engines keep no longer",
            ["worker"],
            registry=self.registry,
        )
        self._bundle_items = Histogram(
            "easerve_embedding_bundle_items",
            "Embeddings that one encoder step pushed to one prefill engine",
            buckets=ITEMS,
            registry=self.registry,
        )
        self._bundle_bytes = Histogram(
            "easerve_embedding_bundle_bytes",
            "Size of such a bundle",
            buckets=BYTES,
            registry=self.registry,
        )
        self._push = seconds("embedding_push", "From the push to usable at prefill, a bundle")
        self._placed = Counter(
            "easerve_prefill_placed",
            "Requests whose prefill was placed, by side and why",
            ["side", "reason"],
            registry=self.registry,
        )
        self._share = Gauge(
            "easerve_offload_share_ratio", "Remote share in force", registry=self.registry
        )
        self._realised = Gauge(
            "easerve_offload_realised_share_ratio",
            "Remote share of all prefills placed so far",
            registry=self.registry,
        )
        self._deficit = Gauge(
            "easerve_offload_deficit",
            "What the remote side is behind its share: requests, or tokens by the rule",
            registry=self.registry,
        )
        self._side_backlog = Gauge(
            "easerve_prefill_backlog_seconds",
            "Work of the least loaded prefill engine of a side",
            ["side"],
            registry=self.registry,
        )
        self._num_placed = collections.Counter[Side]()
        self._demands = Counter(
            "easerve_partition_demands",
            "Encoder calls by the units of the device that they were to get, and why",
            ["units", "reason"],
            registry=self.registry,
        )
        self._division = Gauge(
            "easerve_partition_info",
            "1: by what encode and local prefill divide the encoder's device",
            ["worker", "side", "driver"],
            registry=self.registry,
        )
        self._demanded = Gauge(
            "easerve_partition_demanded_units",
            "Units that prefill is to leave to the encoder now",
            ["worker"],
            registry=self.registry,
        )
        self._division_counts = {
            name: Counter(
                f"easerve_partition_{name.removesuffix('_s') + '_seconds' * name.endswith('_s')}",
                text,
                ["worker"],
                registry=self.registry,
            )
            for name, text in DIVISION_COUNTS.items()
        }
        self._division_seen: dict[tuple[WorkerId, str], float] = {}
        self._drivers: dict[tuple[WorkerId, str], str] = {}
        self._rate = Gauge(
            "easerve_encode_arrivals_per_second",
            "Estimated arrival rate of requests with media",
            registry=self.registry,
        )
        self._cv = Gauge(
            "easerve_encode_arrivals_cv_ratio",
            "Coefficient of variation of their gaps",
            registry=self.registry,
        )
        self._queue_s = Gauge(
            "easerve_encode_queue_seconds",
            "Time until what waits for Encode has passed it",
            registry=self.registry,
        )
        self._knobs = Gauge(
            "easerve_adapt_knob",
            "The value in force of a knob that adapt may change",
            ["knob"],
            registry=self.registry,
        )
        self._retuned = Counter(
            "easerve_adapt_changes",
            "Changes of knobs by the server itself",
            ["knob", "direction"],
            registry=self.registry,
        )
        self._backlog = Gauge(
            "easerve_backlog_tokens", "Tokens at an engine", ["worker"], registry=self.registry
        )

    def batch_closed(self, batch: StartEncode, waits_s: Iterable[float]) -> None:
        """A call to an encoder begins; its items have waited so long."""
        num_waiters = sum(len(entry.waiters) for entry in batch.items)
        if not batch.forward:
            self._items.labels("encoder").inc(num_waiters)
            return
        self._items.labels("encoded").inc(len(batch.items))
        self._items.labels("shared").inc(num_waiters - len(batch.items))
        self._batch_items.observe(len(batch.items))
        self._batches.labels(batch.decision.reason).inc()
        if batch.decision.held_by:
            self._held.labels(batch.decision.held_by).inc(batch.decision.held_s)
        if batch.demand.units:
            units = NAMES.get(batch.demand.units, str(batch.demand.units))
            self._demands.labels(units, batch.demand.reason).inc()
        for wait_s in waits_s:
            self._encode_wait.observe(wait_s)

    def prefill_placed(self, action: StartPrefill) -> None:
        """A prefill begins; of a request only the first counts."""
        if action.leg or action.attempt:
            return
        placement = action.placement
        self._placed.labels(placement.side.value, placement.reason).inc()
        self._num_placed[placement.side] += 1
        self._items.labels("prefill").inc(action.num_held)

    def retuned(self, action: Retuned) -> None:
        """The core has changed a knob."""
        direction = "up" if action.after > action.before else "down"
        self._retuned.labels(action.knob, direction).inc()

    def pushed(self, bundles: Iterable[Bundle]) -> None:
        """Bundles have come to a prefill engine."""
        for bundle in bundles:
            self._bundle_items.observe(bundle.num_items)
            self._bundle_bytes.observe(bundle.num_bytes)
            self._push.observe(bundle.usable_s)

    def evicted(self, worker_id: WorkerId, num_items: int) -> None:
        self._evicted.labels(worker_id).inc(num_items)

    def missing(self, worker_id: WorkerId, num_items: int) -> None:
        self._missing.labels(worker_id).inc(num_items)

    def divided(self, worker_id: WorkerId, division: Division) -> None:
        """How an encoder's device is divided now, and what the two engines have counted."""
        for side, driven in (("encode", division.encode), ("prefill", division.prefill)):
            if driven is None:
                continue
            before = self._drivers.get((worker_id, side), driven.driver)
            if before != driven.driver:
                self._division.remove(worker_id, side, before)
            self._drivers[worker_id, side] = driven.driver
            self._division.labels(worker_id, side, driven.driver).set(1)
        self._demanded.labels(worker_id).set(division.counts["demanded"])
        for name, counter in self._division_counts.items():
            now, seen = division.counts[name], self._division_seen.get((worker_id, name), 0)
            counter.labels(worker_id).inc(now - seen if now >= seen else now)
            self._division_seen[worker_id, name] = now

    def undivided(self, worker_id: WorkerId) -> None:
        """An encoder has gone; its counts stay, as counts do."""
        for side in ("encode", "prefill"):
            if (driver := self._drivers.pop((worker_id, side), None)) is not None:
                self._division.remove(worker_id, side, driver)
        with contextlib.suppress(KeyError):
            self._demanded.remove(worker_id)

    def encoder_busy(self, worker_id: WorkerId, change: int, now_ns: int) -> None:
        """A call to an encoder begins (1) or ends (-1). Calls at one time count once."""
        num_calls, since_ns = self._busy_since.get(worker_id, (0, now_ns))
        if num_calls:
            self._busy.labels(worker_id).inc((now_ns - since_ns) / NS_PER_S)
        self._busy_since[worker_id] = num_calls + change, now_ns

    def render(self, core: Core, now_ns: int) -> bytes:
        """The text form, with the gauges read from the core now."""
        for worker_id in self._busy_since:
            self.encoder_busy(worker_id, 0, now_ns)  # up to now
        self._rate.set(core.arrivals.rate_per_s(now_ns))
        self._cv.set(core.arrivals.cv)
        self._queue_s.set(core.queue_s())
        self._open.set(core.num_open)
        for name in ADAPTED:
            self._knobs.labels(name).set(getattr(core.knobs, name))
        self._share.set(core.offload.share)
        self._deficit.set(core.offload.deficit)
        self._realised.set(self._num_placed[Side.REMOTE] / max(1, self._num_placed.total()))
        self._side_backlog.clear()
        for side, backlog_s in core.backlogs_s(now_ns).items():
            self._side_backlog.labels(side.value).set(backlog_s)
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

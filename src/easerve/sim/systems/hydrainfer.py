"""HydraInfer (dongxianzhe/hydrainfer): nodes that run one or more stages, batched stage by stage.

A node's step is a forward of its encoder over up to ``image_budget`` items and, at the same time on
another stream, a step of its language model: decodes first, then prompts up to ``token_budget``
(``scheduler.py``); the next step begins when both have ended. A request is admitted to a node
while few enough are there or wait to be pulled from it. Encoded and prefilled requests move to
nodes in turn, the receiver pulls when it admits them, ahead of what waits there and beyond the
limit, which keeps two nodes from waiting for each other. A node that chooses itself moves nothing
(``epdnode.py``).

In the repository a hand-over is an instruction that waits for the sender's next step; here it takes
no time.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from easerve.costs.base import Media
from easerve.sim import sequences
from easerve.sim.clock import Effect
from easerve.sim.config import HydraInferSystem
from easerve.sim.encoder import Call
from easerve.sim.llm import TooLongError
from easerve.sim.systems.handover import Requests, Turns
from easerve.sim.systems.hydra_node import Job, Node, longest_blocks, make_nodes
from easerve.sim.world import World
from easerve.types import Stage


class HydraInfer:
    def __init__(self, config: HydraInferSystem, world: World) -> None:
        self._config, self._world = config, world
        self._requests = Requests(world)
        self._at_prefill = config.first_token_at == Stage.PREFILL.value
        self.nodes = list(make_nodes(config, world))
        kinds = {node.name: node.name.rstrip("0123456789") for node in self.nodes}
        at = {
            letter: [node for node in self.nodes if letter in kinds[node.name]] for letter in "epd"
        }
        self._first_encode, self._first_prefill = Turns(at["e"]), Turns(at["p"])
        self._to_prefill = {node.name: Turns(self._prefillers(node, at["p"])) for node in at["e"]}
        self._to_decode = {node.name: Turns(self._decoders(node, at["d"])) for node in at["p"]}
        self._costs = world.costs_of(config.nodes[kinds[at["p"][0].name]].tensor_parallel_size)

    def _prefillers(self, node: Node, prefillers: Sequence[Node]) -> Sequence[Node]:
        """A node of all stages that has no room for a pull beside its own request keeps it."""
        is_small = node in prefillers and node.is_decoder and node.max_running < 2
        return [node] if is_small else prefillers

    def _decoders(self, node: Node, decoders: Sequence[Node]) -> Sequence[Node]:
        """A node whose KV cache has no room for two requests keeps its own."""
        assert node.llm is not None, "it prefills"
        longest = longest_blocks(self._world)
        is_small = node in decoders and node.llm.limits.num_blocks < 2 * longest
        return [node] if is_small else decoders

    def start(self) -> Iterator[Effect]:
        return self._requests.start(self._arrived)

    def deadline_ns(self) -> int | None:
        return None

    def settle(self, now_ns: int) -> Iterator[Effect]:
        """Every node that is between two steps begins the next, if it has something to do."""
        for node in self.nodes:
            if not node.is_busy:
                for job in node.admit():
                    yield from self._begin(node, job, now_ns)
                yield from self._encode(node, now_ns)
                if node.llm is not None:
                    yield from node.gate.step(node.llm, now_ns)

    def _arrived(self, name: str, now_ns: int) -> Iterable[Effect]:
        items = self._requests[name].items
        if not items:
            return self.enqueue(self._first_prefill.take(), Job(name, Stage.PREFILL), now_ns)
        node = self._first_encode.take()
        begin_ns, end_ns = node.host.take(self._config.item_s * len(items), now_ns)
        assert node.encoder is not None, "it encodes"
        self._world.run.note(node.encoder.name, "preprocess", begin_ns, end_ns)
        return [(end_ns, partial(self.enqueue, node, Job(name, Stage.ENCODE)))]

    def enqueue(self, node: Node, job: Job, now_ns: int) -> Iterable[Effect]:
        """What has to be pulled goes first, the last before those that came earlier."""
        if job.source is None:
            node.waiting.append(job)
        else:
            node.waiting.appendleft(job)
        return ()

    def _begin(self, node: Node, job: Job, now_ns: int) -> Iterable[Effect]:
        match job.stage:
            case Stage.ENCODE:
                node.encodes.append(job.name)
                return ()
            case Stage.PREFILL if job.source is not None:
                return self._pull(node, job.source, job.name, now_ns)
            case Stage.PREFILL:
                return self._prefill(node, job.name, now_ns)
            case Stage.DECODE:
                assert job.source is not None, "its KV cache is somewhere"
                return self._decode(node, job.source, job.name, now_ns)

    def _migrate(self, node: Node, target: Node, name: str, stage: Stage, now_ns: int) -> None:
        """The request leaves a node, which holds its cache until the other has pulled it."""
        node.num_running -= 1
        node.num_migrating += 1
        self.enqueue(target, Job(name, stage, node), now_ns)

    # Encode -----------------------------------------------------------------------------------

    def _encode(self, node: Node, now_ns: int) -> Iterable[Effect]:
        """One request at least, and more up to the budget."""
        names, items = list[str](), list[Media]()
        while node.encodes:
            more = self._requests[node.encodes[0]].items
            if names and len(items) + len(more) > node.image_budget:
                break
            names.append(node.encodes.popleft())
            items += more
        if not names:
            return ()
        assert node.encoder is not None, "it encodes"
        node.is_encoding = True
        return node.encoder.submit(Call(items, partial(self._encoded, node, names)), now_ns)

    def _encoded(self, node: Node, names: Sequence[str], now_ns: int) -> Iterator[Effect]:
        node.is_encoding = False
        for name in names:
            target = self._to_prefill[node.name].take()
            if target is node:
                yield from self._prefill(node, name, now_ns)
            else:
                self._migrate(node, target, name, Stage.PREFILL, now_ns)

    # Prefill ----------------------------------------------------------------------------------

    def _pull(self, node: Node, source: Node, name: str, now_ns: int) -> Iterator[Effect]:
        """Embeddings, one request after another."""
        assert node.llm is not None, "it prefills"
        tokens = sum(item.num_tokens for item in self._requests[name].items)
        seconds = self._costs.embedding_transfer(tokens)
        begin_ns, end_ns = node.link.take(seconds, now_ns)
        self._world.run.note(node.llm.name, "transfer", begin_ns, end_ns, tokens=tokens)
        yield end_ns, partial(self._pulled, node, source, name)

    def _pulled(self, node: Node, source: Node, name: str, now_ns: int) -> Iterable[Effect]:
        source.num_migrating -= 1
        return self._prefill(node, name, now_ns)

    def _prefill(self, node: Node, name: str, now_ns: int) -> Iterable[Effect]:
        """And decode, if the node is the next that does."""
        request, target = self._requests[name], self._to_decode[node.name].take()
        is_whole = target is node or (self._at_prefill and request.num_tokens <= 1)
        sequence = sequences.Sequence(
            name,
            request.num_prompt_tokens,
            request.num_tokens if is_whole else 1,
            partial(self._ended, node, name)
            if is_whole
            else partial(self._prefilled, node, target, name),
            partial(self._requests.first, name)
            if is_whole or self._at_prefill
            else sequences.nothing,
        )
        return self._submit(node, name, sequence, now_ns)

    def _prefilled(self, node: Node, target: Node, name: str, now_ns: int) -> Iterable[Effect]:
        self._migrate(node, target, name, Stage.DECODE, now_ns)
        return ()

    def _submit(
        self, node: Node, name: str, sequence: sequences.Sequence, now_ns: int
    ) -> Iterable[Effect]:
        assert node.llm is not None, "it has a language model"
        try:
            return node.llm.submit(sequence, now_ns)
        except TooLongError:
            node.num_running -= 1
            self._requests.end(name, "failed", now_ns)
            return [(now_ns, sequence.pulled)]  # and all nodes see what has become free

    # Decode -----------------------------------------------------------------------------------

    def _decode(self, node: Node, source: Node, name: str, now_ns: int) -> Iterable[Effect]:
        request = self._requests[name]
        sequence = sequences.Sequence(
            name,
            request.num_prompt_tokens,
            request.num_tokens,
            partial(self._ended, node, name),
            partial(self._requests.first, name),
            pull_s=self._costs.kv_transfer(request.num_prompt_tokens),
            pulled=partial(self._freed, source, name),
            num_made=int(self._at_prefill),
        )
        return self._submit(node, name, sequence, now_ns)

    def _freed(self, source: Node, name: str, now_ns: int) -> Iterable[Effect]:
        assert source.llm is not None, "it has prefilled"
        source.num_migrating -= 1
        return source.llm.release(name, now_ns)

    def _ended(self, node: Node, name: str, now_ns: int) -> Iterable[Effect]:
        assert node.llm is not None, "it decodes"
        node.num_running -= 1
        self._requests.completed(name, now_ns)
        return node.llm.release(name, now_ns)


def build(config: HydraInferSystem, world: World) -> HydraInfer:
    return HydraInfer(config, world)

"""Batches of pictures and conversations, drawn as they are needed.

A picture's questions stand one after the other behind its patches. Each sees the patches and
itself only, at the positions that it would have alone, so one pass trains them all.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from easerve.workload import shapes
from easerve.workload.shapes import Question, Scene

from .model import IMAGE, NO_PICTURE, NUM_PATCHES, PAD, PATCH, SPREAD, SYSTEM_TEXTS, WHITE

NOT_ASKED = -100
# What a patch knows about the thing in it: its kind, its colour, its place from each side.
FACTS = (len(shapes.KINDS) + 1, len(shapes.COLOURS) + 1, 3, 3, 3, 3)
MIN_COVER = 0.012  # of a patch; below that nothing is in it
WEIGHTS = {"count": 2.0, "position": 2.0}  # of the loss; others have 1
MORE = ("describe", "count", "position")  # kinds asked twice about a picture


@dataclass(frozen=True, slots=True)
class Batch:
    """``rows`` pictures; T text tokens, S of them before the pictures; P patches or none.

    ``scenes`` is empty when there are no pictures.
    """

    scenes: list[Scene]
    system: torch.Tensor  # [rows, S] token ids
    tokens: torch.Tensor  # [rows, T - S] token ids
    targets: torch.Tensor  # [rows, T - S]: the token, or NOT_ASKED
    weights: torch.Tensor  # [rows, T - S] of the loss
    positions: torch.Tensor  # [1, T + P]
    mask: torch.Tensor  # [1, 1, T + P, T + P]: who sees whom
    spans: list[int]  # lengths of the questions, in order


class Turn(NamedTuple):
    """A question and its answer, as long as each other."""

    tokens: list[int]
    targets: list[int]  # the token, or NOT_ASKED
    weights: list[float]  # of the loss

    def padded(self, length: int) -> "Turn":
        more = length - len(self.tokens)
        return Turn(
            self.tokens + [PAD] * more,
            self.targets + [NOT_ASKED] * more,
            self.weights + [0.0] * more,
        )


def joined(turns: Iterable[Turn]) -> Turn:
    return Turn(*(list(chain.from_iterable(column)) for column in zip(*turns, strict=True)))


@dataclass(slots=True)
class Conversations:
    """Tokens of turns, made by the chat template."""

    words: Any  # the tokenizer
    _turns: dict[Question, Turn] = field(default_factory=dict)

    def render(self, messages: list[dict[str, Any]], generate: bool = False) -> list[int]:
        text = self.words.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        return list(self.words(text).input_ids)

    def turn(self, question: Question) -> Turn:
        if question not in self._turns:
            user = {"role": "user", "content": question.text}
            tokens = self.render([user, {"role": "assistant", "content": question.answer}])
            prompt = self.render([user], generate=True)
            assert tokens[: len(prompt)] == prompt
            targets = [NOT_ASKED] * len(prompt) + tokens[len(prompt) :]
            weight = WEIGHTS.get(question.kind, 1.0)
            self._turns[question] = Turn(tokens, targets, [weight] * len(tokens))
        return self._turns[question]

    def check(self) -> None:
        """What training packs together is what the template makes of a conversation."""
        question = Question("position", "What is on the left?", "a red circle")
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        answer = {"role": "assistant", "content": question.answer}
        system = {"role": "system", "content": SYSTEM_TEXTS[0]}
        again = {"role": "user", "content": question.text}
        whole = self.render([system, {"role": "user", "content": content}, answer, again, answer])
        turn = self.turn(question).tokens
        assert whole == [*self.render([system]), IMAGE, *turn, *turn]


def pixels(scenes: Sequence[Scene]) -> torch.Tensor:
    """[rows, 3, height, width], as the processor makes them."""
    size = shapes.SIZE
    raw = bytearray(b"".join(scene.picture.tobytes() for scene in scenes))
    values = torch.frombuffer(raw, dtype=torch.uint8).view(-1, size, size, 3)
    return ((values.permute(0, 3, 1, 2) / 255 - WHITE) / SPREAD).contiguous()


def patch_facts(scenes: Sequence[Scene]) -> torch.Tensor:
    """[rows, patch, sum of FACTS]: for each fact the share of each of its values.

    A patch that two things share has a part of both; an empty one has no place from any side.
    """
    raw = bytearray(b"".join(scene.numbered().tobytes() for scene in scenes))
    numbers = torch.frombuffer(raw, dtype=torch.uint8).view(-1, shapes.SIZE, shapes.SIZE)
    covers = functional.one_hot(numbers.long(), 4).float().permute(0, 3, 1, 2)
    covers = functional.avg_pool2d(covers, PATCH).flatten(2).transpose(1, 2)[..., 1:]
    total = covers.sum(-1, keepdim=True)
    empty = total < MIN_COVER
    shares = torch.where(empty, 0.0, covers / total.clamp(min=MIN_COVER))
    known = torch.zeros(len(scenes), 4, sum(FACTS))
    colours = list(shapes.COLOURS)
    for row, scene in enumerate(scenes):
        count, from_top = len(scene.things), scene.from_top
        known[row, 0, [0, FACTS[0]]] = 1
        for left, thing in enumerate(scene.things):
            top = from_top.index(thing)
            values = (
                shapes.KINDS.index(thing.kind) + 1,
                colours.index(thing.colour) + 1,
                left,
                count - 1 - left,
                top,
                count - 1 - top,
            )
            starts = (sum(FACTS[:number]) for number in range(len(FACTS)))
            known[row, left + 1, [start + v for start, v in zip(starts, values, strict=True)]] = 1
    return torch.cat([empty.float(), shares], -1) @ known


def pack(
    turns: Conversations,
    scenes: list[Scene],
    asked: Sequence[Sequence[Question]],
    *,
    system: str | None = None,
    one_conversation: bool = False,
) -> Batch:
    """A row per entry of ``asked``; every row has as many questions."""
    rows = [[turns.turn(question) for question in questions] for questions in asked]
    if one_conversation:
        rows = [[joined(row)] for row in rows]
    spans = [max(len(turn.tokens) for turn in column) for column in zip(*rows, strict=True)]
    packed = [
        joined(turn.padded(length) for turn, length in zip(row, spans, strict=True)) for row in rows
    ]
    tokens, targets, weights = (torch.tensor(values) for values in zip(*packed, strict=True))
    before = turns.render([{"role": "system", "content": system}]) if system else []
    start = len(before) + (NUM_PATCHES if scenes else 0)
    total = start + sum(spans)
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    positions, end = list(range(start)), start
    for length in spans:
        mask[end : end + length, start:end] = False
        positions += range(start, start + length)
        end += length
    return Batch(
        scenes=scenes,
        system=torch.tensor([before] * len(asked), dtype=torch.long),
        tokens=tokens,
        targets=targets,
        weights=weights,
        positions=torch.tensor([positions]),
        mask=mask[None, None],
        spans=spans,
    )


def training_batch(turns: Conversations, rows: int, rng: random.Random) -> Batch:
    """Mostly a picture's questions apart; some conversations, some without a picture."""
    scenes = [shapes.draw(rng) for _ in range(rows)]
    system = rng.choice(SYSTEM_TEXTS) if rng.random() < 0.1 else None
    form = rng.random()
    if form < 0.04:
        asked = [
            [question._replace(answer=NO_PICTURE) for question in shapes.questions(scene, rng)]
            for scene in scenes
        ]
        return pack(turns, [], asked, system=system)
    if form < 0.19:
        asked = [rng.sample(questions, len(questions)) for questions in _asked(scenes, rng, ())]
        return pack(turns, scenes, asked, system=system, one_conversation=True)
    return pack(turns, scenes, _asked(scenes, rng, ("describe", "position")), system=system)


def _asked(scenes: list[Scene], rng: random.Random, more: tuple[str, ...]) -> list[list[Question]]:
    return [
        [*shapes.questions(scene, rng), *(shapes.ask(kind, scene, rng) for kind in more)]
        for scene in scenes
    ]

"""Train the tiny model: ``make model``, or ``python -m scripts.tiny_llava.train [folder]``.

First the tower alone learns what each patch shows, then everything learns to answer.
"""

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional

from easerve.workload import shapes
from easerve.workload.shapes import Question
from scripts import checkpoint

from . import data, model

TRAINING_SEED, VALIDATION_SEED = 271_828, 314_159
TOWER_STEPS, TOWER_ROWS = 600, 64
STEPS, ROWS = 2400, 16
VALIDATE_EVERY = 400
THREADS = 2
ADAM_RATE, MUON_RATE = 2e-3, 0.014
TOWER_SHARE = 0.3  # of the rates, once the tower is trained
WEIGHT_DECAY = 0.02
FACT_WEIGHTS = (1.0, 0.5, 0.3, 0.3, 0.3, 0.3)
FACTS_SHARE = 0.3  # of the loss, beside the answers'
console = Console(highlight=False, width=140)


class Clock:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        console.print(f"{time.monotonic() - self.start:6.0f} s  {text}", soft_wrap=True)


class Trainer:
    """The model, a head that reads facts off patches, and the optimizers of both."""

    def __init__(self) -> None:
        torch.manual_seed(TRAINING_SEED)
        self.rng = random.Random(TRAINING_SEED)  # noqa: S311 (pictures, not secrets)
        self.words = model.tokenizer(self.rng)
        self.parts = model.processor(self.words)
        self.turns = data.Conversations(self.words)
        self.llava = model.build()
        self.tower = self.llava.model.vision_tower
        self.projector = self.llava.model.multi_modal_projector
        self.language = self.llava.model.language_model
        self.facts = torch.nn.Linear(model.WIDTH, sum(data.FACTS))
        self.clock = Clock()

    def check(self) -> None:
        """Training text and pixels are what the processor makes for inference."""
        self.turns.check()
        scenes = [shapes.draw(random.Random(VALIDATION_SEED))]  # noqa: S311
        seen = self.parts.image_processor(scenes[0].picture, return_tensors="pt").pixel_values
        torch.testing.assert_close(data.pixels(scenes), seen, atol=1e-5, rtol=0)

    def features(self, scenes: list[shapes.Scene]) -> torch.Tensor:
        """[rows, patch, width]: what LLaVA takes from the tower, without its unused last layer."""
        hidden = self.tower.pre_layrnorm(self.tower.embeddings(data.pixels(scenes)))
        for layer in self.tower.encoder.layers[: model.TOWER_LAYERS]:
            hidden = layer(hidden, None)
        return hidden[:, 1:]

    def facts_loss(self, features: torch.Tensor, scenes: list[shapes.Scene]) -> torch.Tensor:
        """Cross entropy of the facts of each patch."""
        wanted = data.patch_facts(scenes).split(data.FACTS, -1)
        given = self.facts(features).split(data.FACTS, -1)
        losses = [
            -(read.log_softmax(-1) * right).sum(-1).mean() * weight
            for read, right, weight in zip(given, wanted, FACT_WEIGHTS, strict=True)
        ]
        return torch.stack(losses).sum()

    def logits(self, batch: data.Batch, features: torch.Tensor | None) -> torch.Tensor:
        """[tokens asked for, vocabulary], in the order of the targets."""
        embed = self.language.embed_tokens
        before = [] if features is None else [self.projector(features)]
        embeddings = torch.cat([embed(batch.system), *before, embed(batch.tokens)], 1)
        hidden = self.language(
            inputs_embeds=embeddings,
            attention_mask=batch.mask.expand(len(embeddings), -1, -1, -1),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        hidden = hidden[:, -batch.tokens.shape[1] :][:, :-1]
        logits: torch.Tensor = self.llava.lm_head(hidden[self.asked(batch)])
        return logits

    @staticmethod
    def asked(batch: data.Batch) -> torch.Tensor:
        """[rows, T - 1]: where the next token is one of an answer."""
        return batch.targets[:, 1:] != data.NOT_ASKED

    def train_tower(self, steps: int) -> None:
        optimizers = Optimizers([(self.tower, 1.0), (self.facts, 1.0)])
        for step in range(steps):
            scenes = [shapes.draw(self.rng) for _ in range(TOWER_ROWS)]
            loss = self.facts_loss(self.features(scenes), scenes)
            optimizers.step(loss, rate(step / steps, step, 0.5))
            if (step + 1) % 100 == 0:
                self.clock.say(f"tower {step + 1}/{steps}: facts right {self.tower_report()}")

    def tower_report(self) -> str:
        """The share that is right of each fact, for patches where it is certain."""
        rng = random.Random(VALIDATION_SEED)  # noqa: S311
        scenes = [shapes.draw(rng) for _ in range(200)]
        with torch.no_grad():
            given = self.facts(self.features(scenes)).split(data.FACTS, -1)
        shown = []
        for read, right in zip(given, data.patch_facts(scenes).split(data.FACTS, -1), strict=True):
            certain = right.max(-1).values > 0.99
            same = read.argmax(-1) == right.argmax(-1)
            shown.append(f"{same[certain].float().mean():.3f}")
        return " ".join(shown)

    def train(self, steps: int) -> None:
        optimizers = Optimizers(
            [
                (self.tower, TOWER_SHARE),
                (self.facts, TOWER_SHARE),
                (self.projector, 1.0),
                (self.language, 1.0),
            ]
        )
        for step in range(steps):
            batch = data.training_batch(self.turns, ROWS, self.rng)
            features = self.features(batch.scenes) if batch.scenes else None
            asked = self.asked(batch)
            losses = functional.cross_entropy(
                self.logits(batch, features), batch.targets[:, 1:][asked], reduction="none"
            )
            weights = batch.weights[:, 1:][asked]
            loss = answers = (losses * weights).sum() / weights.sum()
            if features is not None:
                loss = loss + FACTS_SHARE * self.facts_loss(features, batch.scenes)
            optimizers.step(loss, rate(step / steps, step, 0.6))
            if (step + 1) % 100 == 0:
                self.clock.say(f"answers {step + 1}/{steps}: loss {answers.item():.4f}")
            if (step + 1) % VALIDATE_EVERY == 0:
                self.clock.say(self.validate(200))

    def validate(self, pictures: int) -> str:
        """Right answers of each kind, in percent, and the questions most often missed.

        An answer that is right token by token is what greedy decoding gives.
        """
        rng = random.Random(VALIDATION_SEED)  # noqa: S311
        right: Counter[str] = Counter()
        missed: Counter[str] = Counter()
        for _ in range(pictures // 100):
            scenes = [shapes.draw(rng) for _ in range(100)]
            asked = [shapes.questions(scene, rng) for scene in scenes]
            for row, good in zip(asked, self.right_answers(scenes, asked), strict=True):
                right.update(q.kind for q, true in zip(row, good, strict=True) if true)
                missed.update(q.text for q, true in zip(row, good, strict=True) if not true)
        shares = {kind: 100 * right[kind] / pictures for kind in shapes.QUESTION_KINDS}
        parts = [f"{kind} {share:.1f}" for kind, share in shares.items()]
        overall = sum(shares.values()) / len(shares)
        return f"validation {overall:.2f} %: {', '.join(parts)}; missed {missed.most_common(6)}"

    def right_answers(
        self, scenes: list[shapes.Scene], asked: list[list[Question]]
    ) -> list[list[bool]]:
        batch = data.pack(self.turns, scenes, asked)
        with torch.no_grad():
            given = self.logits(batch, self.features(scenes)).argmax(-1)
        answers = torch.full_like(batch.targets, data.NOT_ASKED)
        answers[:, 1:][self.asked(batch)] = given
        columns = (answers == batch.targets).split(batch.spans, 1)
        return torch.stack([column.all(1) for column in columns], 1).tolist()  # type: ignore[no-any-return]


class Optimizers:
    """Muon for matrices, Adam for the rest; each module with its share of the rates."""

    def __init__(self, modules: list[tuple[Any, float]]) -> None:
        self.values = [value for module, _ in modules for value in module.parameters()]
        muon, adam = [], []
        for module, share in modules:
            matrices: list[torch.Tensor] = []
            others: list[torch.Tensor] = []
            for name, value in module.named_parameters():
                is_matrix = value.dim() == 2 and "embed" not in name
                (matrices if is_matrix else others).append(value)
            muon.append({"params": matrices, "share": share})
            adam.append({"params": others, "share": share})
        self.optimizers = [
            (torch.optim.Muon(muon, weight_decay=WEIGHT_DECAY), MUON_RATE),
            (torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0, fused=True), ADAM_RATE),
        ]

    def step(self, loss: torch.Tensor, factor: float) -> None:
        for optimizer, highest in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = highest * factor * group["share"]
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.values, 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()


def rate(done: float, step: int, last: float) -> float:
    """Of the highest rate: a short rise, level, then falling to almost 0 over the last part."""
    return min(1.0, (step + 1) / 50) * min(1.0, max(0.01, (1 - done) / last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/tiny-llava"))
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.set_flush_denormal(True)
    trainer = Trainer()
    trainer.check()
    count = sum(value.numel() for value in trainer.llava.parameters())
    trainer.clock.say(f"{count} parameters, {len(trainer.words)} tokens")
    trainer.train_tower(options.tower_steps)
    trainer.train(options.steps)
    checkpoint.save(trainer.llava, trainer.parts, options.folder)
    trainer.clock.say(f"written to {options.folder}; {trainer.validate(1000)}")


if __name__ == "__main__":
    main()

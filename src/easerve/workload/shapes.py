"""Pictures of one to three coloured shapes, and questions with known answers.

The scenes that ``models/tiny-llava`` was trained on: 60x60 pixels, a light background, upright
shapes that do not touch.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIZE = 60
MIN_RADIUS, MAX_RADIUS, MAX_RADIUS_OF_THREE = 8.0, 13.0, 11.0
OVERSAMPLING = 4
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 180),
}
KINDS = ("circle", "square", "triangle")
NUMBERS = ("zero", "one", "two", "three")


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape at ``x, y`` (pixels from the left and the top) of ``radius`` pixels."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    def __str__(self) -> str:
        return f"a {self.colour} {self.kind}"


@dataclass(frozen=True, slots=True)
class Scene:
    """``things`` are in order from left to right."""

    things: tuple[Thing, ...]
    picture: Image.Image


def draw(rng: random.Random) -> Scene:
    """A new scene."""
    count = rng.choices((1, 2, 3), (0.25, 0.4, 0.35))[0]
    biggest = MAX_RADIUS_OF_THREE if count == 3 else MAX_RADIUS
    things: list[Thing] = []
    while len(things) < count:
        radius = rng.uniform(MIN_RADIUS, biggest)
        x, y = (rng.uniform(radius + 1, SIZE - radius - 1) for _ in range(2))
        kind, colour = rng.choice(KINDS), rng.choice(list(COLOURS))
        thing = Thing(kind, colour, x, y, radius)
        if all(_apart(thing, other) for other in things):
            things.append(thing)
        elif rng.random() < 0.01:  # no room left: start again
            things.clear()
    return Scene(tuple(sorted(things, key=lambda thing: thing.x)), _paint(things, rng))


def _apart(one: Thing, other: Thing) -> bool:
    distance = math.hypot(one.x - other.x, one.y - other.y)
    side_by_side = abs(one.x - other.x) >= 5  # left and right are never in doubt
    return side_by_side and distance >= (one.radius + other.radius) * 1.12


def _paint(things: list[Thing], rng: random.Random) -> Image.Image:
    scale = OVERSAMPLING
    light = rng.randint(225, 255)
    background = tuple(min(255, light + rng.randint(-5, 5)) for _ in range(3))
    image = Image.new("RGB", (SIZE * scale, SIZE * scale), background)
    canvas = ImageDraw.Draw(image)
    for thing in things:
        fill = tuple(max(0, min(255, v + rng.randint(-14, 14))) for v in COLOURS[thing.colour])
        x, y, r = thing.x * scale, thing.y * scale, thing.radius * scale
        if thing.kind == "circle":
            canvas.ellipse((x - r, y - r, x + r, y + r), fill)
        elif thing.kind == "square":
            half = 0.88 * r
            canvas.rectangle((x - half, y - half, x + half, y + half), fill)
        else:
            canvas.polygon([(x, y - r), (x - r, y + 0.85 * r), (x + r, y + 0.85 * r)], fill)
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def questions(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """Questions about a scene, each with its one right answer."""
    things = scene.things
    names = [str(thing) for thing in things]
    every = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    kind = rng.choice(KINDS)
    some = rng.choice(things)
    asked = [
        ("What is in the picture?", every),
        ("How many shapes are there?", NUMBERS[len(things)]),
        (f"How many {kind}s are there?", NUMBERS[sum(t.kind == kind for t in things)]),
        ("What is on the left?", names[0]),
        ("What is on the right?", names[-1]),
        (f"Is there {some}?", "yes"),
        (f"Is there a {kind}?", "yes" if any(t.kind == kind for t in things) else "no"),
    ]
    if sum(thing.kind == some.kind for thing in things) == 1:
        asked.append((f"What colour is the {some.kind}?", some.colour))
    if sum(thing.colour == some.colour for thing in things) == 1:
        asked.append((f"What shape is {some.colour}?", some.kind))
    return asked

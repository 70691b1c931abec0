"""Pictures of one to three coloured shapes, and questions with known answers.

The scenes that ``models/tiny-llava`` was trained on: 60x60 pixels, a light background, upright
shapes that do not touch. No two are level or in line, so left and right, top and bottom are
never in doubt.
"""

import base64
import io
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image, ImageDraw

SIZE = 60
MIN_RADIUS, MAX_RADIUS, MAX_RADIUS_OF_THREE = 8.0, 13.0, 11.0
MIN_OFFSET = 6.0  # pixels between two shapes' centres, across and down alike
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
QUESTION_KINDS = ("describe", "count", "colour", "shape", "position", "yesno")


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

    @property
    def from_top(self) -> tuple[Thing, ...]:
        """The things in order from top to bottom."""
        return tuple(sorted(self.things, key=lambda thing: thing.y))

    def numbered(self) -> Image.Image:
        """The number of the thing, counted from 1, that covers each pixel; 0 is background."""
        image = Image.new("L", (SIZE, SIZE))
        canvas = ImageDraw.Draw(image)
        for number, thing in enumerate(self.things, 1):
            _fill(canvas, thing, number, 1)
        return image


class Question(NamedTuple):
    """``kind`` is one of ``QUESTION_KINDS``; ``answer`` is the one right answer."""

    kind: str
    text: str
    answer: str


def data_url(picture: Image.Image) -> str:
    """The picture as clients send it: a PNG in a URL."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


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
    across, down = abs(one.x - other.x), abs(one.y - other.y)
    distance = math.hypot(across, down)
    return min(across, down) >= MIN_OFFSET and distance >= (one.radius + other.radius) * 1.12


def _paint(things: list[Thing], rng: random.Random) -> Image.Image:
    light = rng.randint(225, 255)
    background = tuple(min(255, light + rng.randint(-5, 5)) for _ in range(3))
    image = Image.new("RGB", (SIZE * OVERSAMPLING, SIZE * OVERSAMPLING), background)
    canvas = ImageDraw.Draw(image)
    for thing in things:
        fill = tuple(max(0, min(255, v + rng.randint(-14, 14))) for v in COLOURS[thing.colour])
        _fill(canvas, thing, fill, OVERSAMPLING)
    return image.reduce(OVERSAMPLING)


def _fill(
    canvas: ImageDraw.ImageDraw, thing: Thing, fill: int | tuple[int, ...], scale: int
) -> None:
    x, y, r = thing.x * scale, thing.y * scale, thing.radius * scale
    if thing.kind == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill)
    elif thing.kind == "square":
        half = 0.88 * r
        canvas.rectangle((x - half, y - half, x + half, y + half), fill)
    else:
        canvas.polygon([(x, y - r), (x - r, y + 0.85 * r), (x + r, y + 0.85 * r)], fill)


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """One question of every kind about a scene."""
    return [ask(kind, scene, rng) for kind in QUESTION_KINDS]


def ask(kind: str, scene: Scene, rng: random.Random) -> Question:
    """A question of a kind in ``QUESTION_KINDS``, in one of its phrasings."""
    asked = {
        "describe": _describe,
        "count": _count,
        "colour": _colour,
        "shape": _shape,
        "position": _position,
        "yesno": _yes_or_no,
    }[kind]
    return Question(kind, *asked(scene, rng))


def _describe(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Everything, from left to right unless asked otherwise."""
    if rng.random() < 0.3:
        return "What is in the picture from top to bottom?", _listed(scene.from_top)
    text = rng.choice(
        (
            "What is in the picture?",
            "What is in the picture from left to right?",
            "Describe the picture.",
            "What do you see?",
        )
    )
    return text, _listed(scene.things)


def _listed(things: Iterable[Thing]) -> str:
    *names, last = map(str, things)
    return f"{', '.join(names)} and {last}" if names else last


def _count(scene: Scene, rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        text = rng.choice(("How many shapes are there?", "How many shapes are in the picture?"))
        return text, NUMBERS[len(scene.things)]
    kind = rng.choice(KINDS)
    number = sum(thing.kind == kind for thing in scene.things)
    return f"How many {kind}s are there?", NUMBERS[number]


def _colour(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """The colour of the only thing of its kind, now and then of a kind that is not there."""
    colours = {kind: [t.colour for t in scene.things if t.kind == kind] for kind in KINDS}
    kind = _unique_or_absent(colours, rng)
    word = rng.choice(("colour", "colour", "color"))
    answer = colours[kind][0] if colours[kind] else f"there is no {kind}"
    return f"What {word} is the {kind}?", answer


def _shape(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """The kind of the only thing of its colour, now and then of a colour that is not there."""
    kinds = {colour: [t.kind for t in scene.things if t.colour == colour] for colour in COLOURS}
    colour = _unique_or_absent(kinds, rng)
    answer = kinds[colour][0] if kinds[colour] else f"there is nothing {colour}"
    return f"What shape is {colour}?", answer


def _unique_or_absent(found: dict[str, list[str]], rng: random.Random) -> str:
    """A key with one value, or (one time in eight, or when there is none) a key without values.

    Three things cannot give three keys two values each: there always is one of the two.
    """
    unique = [key for key, values in found.items() if len(values) == 1]
    absent = [key for key, values in found.items() if not values]
    return rng.choice(absent if absent and (not unique or rng.random() < 0.125) else unique)


def _position(scene: Scene, rng: random.Random) -> tuple[str, str]:
    place, thing = rng.choice(
        (
            ("on the left", scene.things[0]),
            ("on the right", scene.things[-1]),
            ("at the top", scene.from_top[0]),
            ("at the bottom", scene.from_top[-1]),
        )
    )
    return f"What is {place}?", str(thing)


def _yes_or_no(scene: Scene, rng: random.Random) -> tuple[str, str]:
    form = rng.random()
    kind, colour = rng.choice(KINDS), rng.choice(list(COLOURS))
    if form < 0.2:
        return f"Is there a {kind}?", _yes(any(kind == thing.kind for thing in scene.things))
    if form < 0.4:
        seen = any(colour == thing.colour for thing in scene.things)
        return f"Is there anything {colour}?", _yes(seen)
    names = [str(thing) for thing in scene.things]
    name = rng.choice(names) if form < 0.7 else f"a {colour} {kind}"
    return f"Is there {name}?", _yes(name in names)


def _yes(true: bool) -> str:
    return "yes" if true else "no"

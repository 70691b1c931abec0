import itertools
import math
import random
from collections.abc import Iterator

import pytest

from easerve.workload.shapes import (
    COLOURS,
    KINDS,
    MIN_RADIUS,
    SIZE,
    Scene,
    Thing,
    draw,
    questions,
)

SEEDS = range(60)
NOISE = 14 + 6  # of a shape's colour, and of resampling


def scenes() -> Iterator[Scene]:
    return (draw(random.Random(seed)) for seed in SEEDS)


def test_the_same_seed_gives_the_same_picture_and_questions() -> None:
    for seed in SEEDS[:10]:
        one, other = random.Random(seed), random.Random(seed)
        first, second = draw(one), draw(other)
        assert first.things == second.things
        assert first.picture.tobytes() == second.picture.tobytes()
        assert questions(first, one) == questions(second, other)


def test_seeds_give_different_pictures() -> None:
    assert len({scene.picture.tobytes() for scene in scenes()}) == len(SEEDS)


def test_one_to_three_shapes_of_every_kind_and_colour_are_drawn() -> None:
    things = [scene.things for scene in scenes()]
    assert {len(each) for each in things} == {1, 2, 3}
    assert {thing.kind for each in things for thing in each} == set(KINDS)
    assert {thing.colour for each in things for thing in each} == set(COLOURS)


def test_shapes_are_inside_and_apart_and_in_order_from_the_left() -> None:
    for scene in scenes():
        for thing in scene.things:
            assert thing.radius >= MIN_RADIUS
            for centre in (thing.x, thing.y):
                assert thing.radius < centre < SIZE - thing.radius
        for left, right in itertools.pairwise(scene.things):
            assert left.x < right.x
        for one, other in itertools.combinations(scene.things, 2):
            assert math.dist((one.x, one.y), (other.x, other.y)) > one.radius + other.radius


def test_the_pixel_at_a_shapes_centre_has_its_colour() -> None:
    for scene in scenes():
        assert scene.picture.size == (SIZE, SIZE)
        for thing in scene.things:
            pixel = scene.picture.getpixel((int(thing.x), int(thing.y)))
            assert isinstance(pixel, tuple)
            wanted = COLOURS[thing.colour]
            assert all(abs(a - b) <= NOISE for a, b in zip(pixel, wanted, strict=True))


def test_the_background_is_light() -> None:
    for scene in scenes():
        corner = scene.picture.getpixel((0, 0))
        assert isinstance(corner, tuple)
        assert min(corner) >= 220


def right_answers(things: tuple[Thing, ...], question: str) -> list[str]:
    """The answers that are right, worked out from the question's words."""
    words = question.rstrip("?").split()
    seen = [(thing.colour, thing.kind) for thing in things]
    match words:
        case ["What", "is", "in", "the", "picture"]:
            named = [f"a {colour} {kind}" for colour, kind in seen]
            last = named.pop()
            return [f"{', '.join(named)} and {last}" if named else last]
        case ["How", "many", "shapes", *_]:
            return [["zero", "one", "two", "three"][len(seen)]]
        case ["How", "many", kinds, "are", "there"]:
            count = [kind + "s" for _, kind in seen].count(kinds)
            return [["zero", "one", "two", "three"][count]]
        case ["What", "is", "on", "the", side]:
            pick = min if side == "left" else max
            thing = pick(things, key=lambda thing: thing.x)
            return [f"a {thing.colour} {thing.kind}"]
        case ["Is", "there", "a", colour, kind]:
            return ["yes" if (colour, kind) in seen else "no"]
        case ["Is", "there", "a", kind]:
            return ["yes" if any(kind == other for _, other in seen) else "no"]
        case ["What", "colour", "is", "the", kind]:
            return [colour for colour, other in seen if other == kind]
        case ["What", "shape", "is", colour]:
            return [kind for other, kind in seen if other == colour]
    raise AssertionError(f"an unknown question: {question}")


def test_every_question_has_one_answer_and_it_is_right() -> None:
    asked = set()
    for seed, scene in zip(SEEDS, scenes(), strict=True):
        for question, answer in questions(scene, random.Random(seed)):
            assert right_answers(scene.things, question) == [answer], question
            asked.add((question.split()[0], answer))
    assert {("Is", "yes"), ("Is", "no"), ("How", "zero"), ("How", "three")} <= asked


@pytest.mark.parametrize(("kind", "colour"), [("circle", "red"), ("triangle", "blue")])
def test_a_thing_reads_as_in_an_answer(kind: str, colour: str) -> None:
    assert str(Thing(kind, colour, 30, 30, 10)) == f"a {colour} {kind}"

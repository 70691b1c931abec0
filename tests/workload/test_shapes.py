import base64
import io
import itertools
import math
import random
from collections.abc import Iterator

import pytest
from PIL import Image

from easerve.workload.shapes import (
    COLOURS,
    KINDS,
    MIN_OFFSET,
    MIN_RADIUS,
    QUESTION_KINDS,
    SIZE,
    Scene,
    Thing,
    ask,
    data_url,
    draw,
    questions,
)

SEEDS = range(60)
NOISE = 14  # of a shape's colour


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
            assert left.x + MIN_OFFSET <= right.x
        for above, below in itertools.pairwise(scene.from_top):
            assert above.y + MIN_OFFSET <= below.y
        for one, other in itertools.combinations(scene.things, 2):
            assert math.dist((one.x, one.y), (other.x, other.y)) > one.radius + other.radius


def test_the_pixel_at_a_shapes_centre_has_its_colour_and_number() -> None:
    for scene in scenes():
        assert scene.picture.size == (SIZE, SIZE)
        numbers = scene.numbered()
        for number, thing in enumerate(scene.things, 1):
            centre = (int(thing.x), int(thing.y))
            pixel = scene.picture.getpixel(centre)
            assert isinstance(pixel, tuple)
            wanted = COLOURS[thing.colour]
            assert all(abs(a - b) <= NOISE for a, b in zip(pixel, wanted, strict=True))
            assert numbers.getpixel(centre) == number


def test_the_background_is_light_and_has_number_0() -> None:
    for scene in scenes():
        corner = scene.picture.getpixel((0, 0))
        assert isinstance(corner, tuple)
        assert min(corner) >= 220
        assert scene.numbered().getpixel((0, 0)) == 0


def listed(things: list[Thing]) -> str:
    named = [f"a {thing.colour} {thing.kind}" for thing in things]
    last = named.pop()
    return f"{', '.join(named)} and {last}" if named else last


def right_answers(things: tuple[Thing, ...], question: str) -> list[str]:
    """The answers that are right, worked out from the question's words."""
    from_left = sorted(things, key=lambda thing: thing.x)
    from_top = sorted(things, key=lambda thing: thing.y)
    seen = [(thing.colour, thing.kind) for thing in things]
    numbers = ["zero", "one", "two", "three"]
    match question.rstrip("?.").split():
        case ["What", "is", "in", "the", "picture", "from", "top", "to", "bottom"]:
            return [listed(from_top)]
        case (
            ["What", "is", "in", "the", "picture"]
            | ["What", "is", "in", "the", "picture", "from", "left", "to", "right"]
            | ["Describe", "the", "picture"]
            | ["What", "do", "you", "see"]
        ):
            return [listed(from_left)]
        case ["How", "many", "shapes", "are", "there"] | ["How", "many", "shapes", *_, "picture"]:
            return [numbers[len(seen)]]
        case ["How", "many", kinds, "are", "there"]:
            return [numbers[[kind + "s" for _, kind in seen].count(kinds)]]
        case ["What", "is", "on" | "at", "the", side]:
            sides = {
                "left": from_left[0],
                "right": from_left[-1],
                "top": from_top[0],
                "bottom": from_top[-1],
            }
            return [listed([sides[side]])]
        case ["Is", "there", "a", colour, kind]:
            return ["yes" if (colour, kind) in seen else "no"]
        case ["Is", "there", "anything", colour]:
            return ["yes" if any(colour == other for other, _ in seen) else "no"]
        case ["Is", "there", "a", kind]:
            return ["yes" if any(kind == other for _, other in seen) else "no"]
        case ["What", "colour" | "color", "is", "the", kind]:
            found = [colour for colour, other in seen if other == kind]
            return found or [f"there is no {kind}"]
        case ["What", "shape", "is", colour]:
            found = [kind for other, kind in seen if other == colour]
            return found or [f"there is nothing {colour}"]
    raise AssertionError(f"an unknown question: {question}")


def test_every_question_has_one_answer_and_it_is_right() -> None:
    phrasings, answers = set(), set()
    for seed, scene in zip(SEEDS, scenes(), strict=True):
        rng = random.Random(seed)
        for kind in [*QUESTION_KINDS] * 5:
            question = ask(kind, scene, rng)
            assert question.kind == kind
            assert right_answers(scene.things, question.text) == [question.answer], question
            words = set(question.text.rstrip("?.").split())
            phrasings.add((kind, *sorted(words - {*COLOURS, *KINDS, *(k + "s" for k in KINDS)})))
            answers.add((kind, question.answer.partition(" ")[0]))
    # Every phrasing came up: 5 of describe, 3 of count, 2 of colour, 1 of shape, 4 of position,
    # and 2 of yesno (with a kind, or "anything").
    assert len(phrasings) == 5 + 3 + 2 + 1 + 4 + 2
    for answer in ("zero", "one", "two", "three"):
        assert ("count", answer) in answers
    assert {("yesno", "yes"), ("yesno", "no"), ("colour", "there"), ("shape", "there")} <= answers


def test_a_scene_gets_one_question_of_every_kind() -> None:
    for seed, scene in zip(SEEDS, scenes(), strict=True):
        asked = questions(scene, random.Random(seed))
        assert tuple(question.kind for question in asked) == QUESTION_KINDS


@pytest.mark.parametrize(("kind", "colour"), [("circle", "red"), ("triangle", "blue")])
def test_a_thing_reads_as_in_an_answer(kind: str, colour: str) -> None:
    assert str(Thing(kind, colour, 30, 30, 10)) == f"a {colour} {kind}"


def test_a_picture_goes_into_a_url_and_comes_out_of_it() -> None:
    picture = draw(random.Random(1)).picture
    head, _, content = data_url(picture).partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(content))).tobytes() == picture.tobytes()

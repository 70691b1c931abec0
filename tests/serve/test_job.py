"""The pace of decode: what an engine needs for its tokens, whoever reads them how fast."""

import pytest

from easerve.engines.protocol import Delta, Prompt
from easerve.serve.job import Job, Pace
from easerve.types import NS_PER_S, MediaItem, Modality, RequestId

BEGIN = 7 * NS_PER_S


def pace(*pieces: tuple[float, float, Delta]) -> Pace:
    """Of pieces that come so long after the begin or after the last pause, each with its pause."""
    now_ns, made = BEGIN, Pace(BEGIN)
    for work_s, pause_s, delta in pieces:
        now_ns += int(work_s * NS_PER_S)
        made.piece(delta, now_ns)
        now_ns += int(pause_s * NS_PER_S)
        made.resume(now_ns)
    return made


def tokens(number: int) -> Delta:
    return Delta("a", tuple(range(number)))


def test_before_the_first_piece_there_is_no_pace() -> None:
    assert (Pace(BEGIN).decode_s, Pace(BEGIN).tpot_s) == (0, 0)


def test_the_first_piece_is_not_counted_to_the_time_per_token() -> None:
    made = pace((3, 0, tokens(1)), (1, 0, tokens(1)), (2, 0, tokens(1)))
    assert (made.decode_s, made.tpot_s) == (6, 1.5)


def test_tokens_count_not_pieces() -> None:
    made = pace((3, 0, tokens(5)), (4, 0, tokens(8)))
    assert (made.decode_s, made.tpot_s) == (7, 0.5)


@pytest.mark.parametrize("number", [1, 4])
def test_an_answer_of_one_piece_is_counted_from_the_begin(number: int) -> None:
    made = pace((2, 0, tokens(number)))
    assert (made.decode_s, made.tpot_s) == (2, 2 / number)


def test_an_answer_without_a_token_is_no_division_by_zero() -> None:
    assert pace((2, 0, Delta(""))).tpot_s == 2


@pytest.mark.parametrize("where", range(3))
def test_waiting_for_the_client_is_not_the_engines_time(where: int) -> None:
    """Not after the last piece either."""
    pauses = [0.0] * 3
    pauses[where] = 100
    made = pace(*((1, pause, tokens(1)) for pause in pauses))
    assert (made.decode_s, made.tpot_s) == (3, 1)


def test_where_an_engine_counts_its_tokens_that_count_holds() -> None:
    """The first chunk of a chat is its role, and counts none."""
    counts = [0, 1, 2, 2]
    made = pace(*((1, 0, Delta("", (), usage={"completion_tokens": n})) for n in counts))
    assert (made.decode_s, made.tpot_s) == (4, 1.5)


def test_pieces_of_one_instant_have_no_time_per_token() -> None:
    made = pace((1, 0, tokens(1)), (0, 0, tokens(1)))
    assert (made.decode_s, made.tpot_s) == (1, 0)


def test_a_pause_that_is_not_over_is_nobodys_time() -> None:
    made = Pace(BEGIN)
    made.piece(tokens(1), BEGIN + NS_PER_S)
    made.resume(BEGIN + 5 * NS_PER_S)
    assert made.decode_s == made.tpot_s == 1


def test_an_item_that_comes_twice_is_found_at_its_first_place() -> None:
    job = Job(RequestId("r"), {}, [], 1)
    items = tuple(MediaItem(key, Modality.IMAGE, 4) for key in ("a", "b", "a", "b"))
    job.prompt = Prompt([1], {"max_tokens": 1}, items=items)
    assert [job.index(key) for key in ("a", "b")] == [0, 1]

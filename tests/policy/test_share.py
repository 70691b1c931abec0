"""The rules, one request at a time, and the trim. ``k`` requests so far, ``s`` the share."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, groupby, pairwise
from math import ceil, floor
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.policy.share import (
    DRAW,
    DRIFT,
    EARLIER,
    LOCAL,
    ONE,
    REMOTE,
    RULES,
    SHARE,
    SHORTER,
    TRIM_NS,
    TRIM_STEP,
    Trim,
    View,
    counted,
)
from easerve.types import NS_PER_S, RequestId, Side

from .scenario import DEFAULTS

AWKWARD = [0.55, 0.3, 1 / 3, 2 / 3, 0.1, 0.5, 0.99, 1e-9, 1 - 1e-9, 0.0, 1.0]
SHARES = (st.sampled_from(AWKWARD) | st.floats(0, 1)).map(lambda share: round(share * ONE))
TOKENS = st.lists(st.integers(1, 5000), min_size=1, max_size=200)
SECONDS = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-1, 10)
WAITS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=200)
HALF = Fraction(1, 2)


class Stream:
    """Requests one by one, and the deficit after each."""

    def __init__(self, where: str, share: int, **knobs: Any) -> None:
        self.rule = RULES[where](replace(DEFAULTS, where=where, **knobs))
        self.share, self.deficit = share, 0
        self.sides: list[Side] = []
        self.reasons: list[str] = []

    def draw(self, tokens: int = 1, local_s: float = 0.0, remote_s: float = 0.0) -> Side:
        weight = tokens if self.rule.by_tokens else 1
        request_id = RequestId(f"r{len(self.sides)}")
        wait_s = {LOCAL: local_s, REMOTE: remote_s}
        view = View(request_id, self.share, self.deficit, weight, wait_s)
        side, reason = self.rule.choose(view)
        self.deficit = counted(self.deficit, self.share, weight, side)
        self.sides.append(side)
        self.reasons.append(reason)
        return side

    def run(self, num: int) -> "Stream":
        for _ in range(num):
            self.draw()
        return self

    @property
    def num_remote(self) -> int:
        return self.sides.count(REMOTE)


def remotes(sides: Sequence[Side]) -> list[int]:
    """``R_k`` for all ``k`` from 1."""
    return list(accumulate(int(side is REMOTE) for side in sides))


# Deficit ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(SHARES, st.integers(1, 300))
def test_the_share_is_never_off_by_more_than_half_a_request(share: int, num: int) -> None:
    stream, s = Stream("deficit", share).run(num), Fraction(share, ONE)
    for k, remote in enumerate(remotes(stream.sides), 1):
        assert abs(remote - k * s) <= HALF
        assert remote == floor(k * s + HALF), "the nearest number there is"
    assert stream.deficit == num * share - stream.num_remote * ONE


@settings(deadline=None, max_examples=25)
@given(SHARES, st.integers(1, 300))
def test_in_any_window_the_share_is_off_by_less_than_a_request(share: int, num: int) -> None:
    stream, s = Stream("deficit", share).run(num), Fraction(share, ONE)
    off = [Fraction(0), *(remote - k * s for k, remote in enumerate(remotes(stream.sides), 1))]
    assert max(off) - min(off) < 1


@settings(deadline=None, max_examples=25)
@given(SHARES.filter(lambda share: 0 < share < ONE), st.integers(1, 300))
def test_runs_are_as_short_as_the_share_allows(share: int, num: int) -> None:
    s = Fraction(share, ONE)
    most = {REMOTE: ceil(s / (1 - s)), LOCAL: ceil((1 - s) / s)}
    for side, run in groupby(Stream("deficit", share).run(num).sides):
        assert len(list(run)) <= most[side]


@pytest.mark.parametrize("share", [0.55, 1 / 3])
def test_nothing_drifts_over_many_requests(share: float) -> None:
    exact = round(share * ONE)
    stream = Stream("deficit", exact).run(100_000)
    expected = [(2 * k * exact + ONE) // (2 * ONE) for k in range(1, 100_001)]
    assert remotes(stream.sides) == expected


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(SHARES, st.integers(0, 20)), max_size=20))
def test_the_bound_holds_for_a_share_that_changes(parts: list[tuple[int, int]]) -> None:
    stream, promised = Stream("deficit", 0), Fraction(0)
    for share, num in parts:
        stream.share = share
        for _ in range(num):
            stream.draw()
            promised += Fraction(share, ONE)
            assert abs(stream.num_remote - promised) <= HALF


def test_draws_alternate_at_a_half_and_say_why() -> None:
    stream = Stream("deficit", ONE // 2).run(4)
    assert stream.sides == [REMOTE, LOCAL, REMOTE, LOCAL]
    assert stream.reasons == [SHARE] * 4


# Deficit by tokens --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(SHARES, TOKENS)
def test_the_share_of_tokens_is_off_by_half_the_longest_prompt_at_most(
    share: int, tokens: list[int]
) -> None:
    stream, s = Stream("deficit-tokens", share), Fraction(share, ONE)
    total = remote = longest = 0
    for num in tokens:
        side = stream.draw(num)
        total, remote, longest = total + num, remote + num * (side is REMOTE), max(longest, num)
        assert abs(remote - s * total) <= Fraction(longest, 2)
    assert stream.deficit == total * share - remote * ONE


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(SHARES, st.integers(1, 5000)), max_size=100))
def test_the_bound_in_tokens_holds_for_a_share_that_changes(parts: list[tuple[int, int]]) -> None:
    stream, promised, remote, longest = Stream("deficit-tokens", 0), Fraction(0), 0, 0
    for stream.share, num in parts:
        remote += num * (stream.draw(num) is REMOTE)
        promised, longest = promised + num * Fraction(stream.share, ONE), max(longest, num)
        assert abs(remote - promised) <= Fraction(longest, 2)


@pytest.mark.parametrize("where", ["deficit", "deficit-tokens", "band"])
@pytest.mark.parametrize(("share", "side"), [(0, LOCAL), (ONE, REMOTE)])
def test_a_share_of_nothing_or_all_is_absolute_whatever_came_before(
    where: str, share: int, side: Side
) -> None:
    for deficit in (-400 * ONE, 0, 400 * ONE):
        stream = Stream(where, share, band_kappa=500)
        stream.deficit = deficit
        for local_s, remote_s in ((0.0, 0.0), (9.0, 0.0), (0.0, 9.0)):
            assert stream.draw(100, local_s, remote_s) is side
        assert stream.deficit == deficit


# Band ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(SHARES, st.floats(0.5, 5), WAITS)
def test_in_the_band_the_earlier_finish_is_taken_where_the_bound_allows(
    share: int, kappa: float, waits: list[tuple[float, float]]
) -> None:
    stream, s = Stream("band", share, band_kappa=kappa), Fraction(share, ONE)
    for k, (local_s, remote_s) in enumerate(waits, 1):
        before = stream.deficit
        side = stream.draw(1, local_s, remote_s)
        assert abs(stream.num_remote - k * s) <= Fraction(floor(kappa * ONE), ONE)
        reason = stream.reasons[-1]
        if local_s == remote_s or share in (0, ONE):
            assert reason == SHARE
        elif reason == EARLIER:
            assert side is (LOCAL if local_s < remote_s else REMOTE)
        else:
            assert reason == DRIFT
            assert side is (REMOTE if local_s < remote_s else LOCAL)
            other = before + share - ONE * (side is LOCAL)
            assert abs(Fraction(other, ONE)) > Fraction(floor(kappa * ONE), ONE)


@settings(deadline=None, max_examples=25)
@given(SHARES.filter(lambda share: 0 < share < ONE))
def test_a_band_of_half_a_request_leaves_nothing_to_choose(share: int) -> None:
    band, deficit = Stream("band", share, band_kappa=0.5), Stream("deficit", share)
    for k in range(50):
        before = band.deficit
        assert before == deficit.deficit or {before, deficit.deficit} == {ONE // 2, -ONE // 2}
        band.draw(1, float(k % 3), 1.0)
        deficit.draw()


def test_a_band_gives_way_to_one_side_until_its_bound() -> None:
    stream = Stream("band", ONE // 2, band_kappa=2)
    sides = [stream.draw(1, 0.0, 1.0) for _ in range(8)]
    assert sides == [LOCAL] * 4 + [REMOTE, LOCAL, REMOTE, LOCAL]
    assert stream.reasons == [EARLIER] * 4 + [DRIFT, EARLIER, DRIFT, EARLIER]


def test_in_an_idle_band_the_count_decides() -> None:
    band, deficit = Stream("band", 550_000_000), Stream("deficit", 550_000_000)
    assert band.run(100).sides == deficit.run(100).sides


# Bernoulli, Jsq -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.55, 1.0])
def test_a_hash_draws_the_share_on_average(share: float) -> None:
    stream = Stream("bernoulli", round(share * ONE)).run(10_000)
    sigma = (share * (1 - share) / 10_000) ** 0.5
    assert mean(side is REMOTE for side in stream.sides) == pytest.approx(share, abs=4 * sigma)
    assert set(stream.reasons) == {DRAW}
    assert stream.deficit == 10_000 * stream.share - stream.num_remote * ONE


def test_a_hash_draws_each_request_for_itself() -> None:
    sides = Stream("bernoulli", ONE // 2).run(10_000).sides
    changes = mean(a is not b for a, b in pairwise(sides))
    assert changes == pytest.approx(0.5, abs=0.02)
    assert max(len(list(run)) for _, run in groupby(sides)) > 8


def test_a_request_that_is_drawn_remote_stays_so_at_a_larger_share() -> None:
    small, large = (Stream("bernoulli", share * ONE // 10).run(1000).sides for share in (3, 6))
    assert all(b is REMOTE for a, b in zip(small, large, strict=True) if a is REMOTE)


def test_another_seed_draws_other_sides() -> None:
    runs = [Stream("bernoulli", ONE // 2, offload_seed=seed).run(1000).sides for seed in (0, 1, 0)]
    assert runs[0] == runs[2]
    same = mean(a is b for a, b in zip(runs[0], runs[1], strict=True))
    assert same == pytest.approx(0.5, abs=0.07)


DRAW_ELSEWHERE = """
from tests.policy.test_share import Stream
print("".join(side[0] for side in Stream("bernoulli", 550_000_000, offload_seed=7).run(200).sides))
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
@pytest.mark.long
def test_a_hash_draws_the_same_in_another_process(hash_seed: str) -> None:
    root = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", DRAW_ELSEWHERE],
        cwd=root,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join([root, *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    here = Stream("bernoulli", 550_000_000, offload_seed=7).run(200).sides
    assert ran.stdout.strip() == "".join(side[0] for side in here)


@settings(deadline=None, max_examples=25)
@given(SHARES, WAITS)
def test_the_shorter_queue_is_joined_whatever_the_share(
    share: int, waits: list[tuple[float, float]]
) -> None:
    stream = Stream("jsq", share)
    for local_s, remote_s in waits:
        assert stream.draw(1, local_s, remote_s) is (LOCAL if local_s < remote_s else REMOTE)
    assert set(stream.reasons) == {SHORTER}
    assert stream.deficit == len(waits) * share - stream.num_remote * ONE


# Trim ---------------------------------------------------------------------------------------------

MINUTE = [(second * NS_PER_S) for second in range(61)]


def trimmed(share: float, *backlogs: tuple[float, float]) -> float:
    """The share after a minute of these backlogs (local, remote), one after the other."""
    trim = Trim(round(share * ONE))
    for index, now_ns in enumerate(MINUTE):
        trim.observe(*backlogs[index % len(backlogs)], now_ns)
    return trim.share / ONE


@pytest.mark.parametrize("scale_s", [0.01, 1.0, 100.0])
def test_a_share_moves_to_the_side_with_the_shorter_backlog_however_fast_the_engines(
    scale_s: float,
) -> None:
    assert trimmed(0.5, (scale_s, 0.0)) == pytest.approx(0.5 + 6 * 0.02)
    assert trimmed(0.5, (0.0, scale_s)) == pytest.approx(0.5 - 6 * 0.02)
    assert trimmed(0.5, (3 * scale_s, scale_s)) == pytest.approx(0.5 + 6 * 0.01)


@pytest.mark.parametrize("backlogs", [[(0.0, 0.0)], [(2.0, 2.0)]])
def test_a_share_stays_where_the_backlogs_are_equal(backlogs: list[tuple[float, float]]) -> None:
    assert trimmed(0.5, *backlogs) == 0.5


def test_a_share_goes_by_the_mean_since_the_last_step() -> None:
    trim = Trim(ONE // 2)
    trim.observe(9.0, 0.0, 0)
    trim.observe(0.0, 7.0, TRIM_NS - 1)
    assert trim.share == ONE // 2, "not yet"
    trim.observe(0.0, 2.0, TRIM_NS)
    assert trim.share == ONE // 2, "9 s each"
    trim.observe(0.0, 2.0, 2 * TRIM_NS)
    assert trim.share == ONE // 2 - TRIM_STEP, "what was before is forgotten"


def test_the_clock_of_a_trim_starts_with_its_first_backlogs() -> None:
    trim = Trim(ONE // 2)
    trim.observe(9.0, 0.0, 100 * TRIM_NS)
    assert trim.share == ONE // 2


@settings(deadline=None, max_examples=25)
@given(
    SHARES,
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 2 * TRIM_NS))),
)
def test_a_share_is_trimmed_by_a_step_in_ten_seconds_at_most(
    share: int, seen: list[tuple[float, float, int]]
) -> None:
    trim, now_ns, changes = Trim(share), 0, [-TRIM_NS]
    for local_s, remote_s, gap_ns in seen:
        now_ns, before = now_ns + gap_ns, trim.share
        trim.observe(local_s, remote_s, now_ns)
        assert 0 <= trim.share <= ONE
        assert abs(trim.share - before) <= TRIM_STEP
        if trim.share != before:
            assert now_ns - changes[-1] >= TRIM_NS
            changes.append(now_ns)

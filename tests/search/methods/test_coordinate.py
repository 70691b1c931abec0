from easerve.search.methods.coordinate import Coordinate
from easerve.search.space import SHARE
from tests.search.landscapes import BATCH, PEAKS, ridge, space
from tests.search.test_methods import history


def test_from_its_start_it_climbs_to_the_top_of_a_smooth_hill() -> None:
    start = space().configuration("e4-p2-d2", {SHARE: 0.5, BATCH: 4})
    found = history(Coordinate(space(), 0, start), ridge, 24)
    assert found[0].configuration == start
    assert max(ridge(each.configuration) for each in found) == max(map(ridge, space()))


def test_the_allocations_are_its_first_axis() -> None:
    start = space().configuration("e4-p2-d2", {SHARE: 0.4, BATCH: 4})
    found = history(Coordinate(space(), 0, start), ridge, len(PEAKS))
    assert {each.configuration.allocation for each in found} == set(PEAKS)


def test_one_coordinate_changes_at_a_time() -> None:
    start = space().configuration("e2-p4-d2", {SHARE: 0.4, BATCH: 4})
    found = history(Coordinate(space().restricted(["e2-p4-d2"]), 0, start), ridge, 8)
    tried = {each.configuration for each in found}
    for each in found[1:]:
        assert any(
            sum(
                one != other
                for one, other in zip(each.configuration.values, by.values, strict=True)
            )
            == 1
            for by in tried
        )


def test_on_the_top_it_starts_anew_somewhere_else() -> None:
    """More trials than one descent takes, none of them twice; the next start is the seed's."""
    start = space().configuration("e2-p2x2-d2", {SHARE: 0.65, BATCH: 8})
    one, other = (history(Coordinate(space(), seed, start), ridge, 40) for seed in (1, 2))
    assert len({each.configuration for each in one}) == 40
    assert one[:7] == other[:7]
    assert one != other

from easerve.search.methods.coordinate import Coordinate
from tests.search.landscapes import PEAKS, ridge, space
from tests.search.test_methods import history


def test_it_climbs_to_the_top_of_a_smooth_hill() -> None:
    found = history(Coordinate(space()), ridge, 48)
    assert max(ridge(each.configuration) for each in found) == max(map(ridge, space()))


def test_the_allocations_are_its_first_axis() -> None:
    found = history(Coordinate(space()), ridge, len(PEAKS))
    assert {each.configuration.allocation for each in found} == set(PEAKS)


def test_one_coordinate_changes_at_a_time() -> None:
    found = history(Coordinate(space().restricted(["e2-p4-d2"])), ridge, 8)
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
    """More trials than one descent takes, none of them twice; starts are the seed's."""
    one, other = (history(Coordinate(space(), seed), ridge, 60) for seed in (1, 2))
    assert len({each.configuration for each in one}) == 60
    assert one[0] != other[0]

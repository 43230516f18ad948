"""How the capacities of a sweep are written."""

import pytest

from fdcache.errors import ReplayOptionError
from fdcache.replay.capacities import MOST_VALUES, Axis, Capacities

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "axis", "values"),
    [
        ("device-blocks=1000", Axis.DEVICE_BLOCKS, (1000,)),
        ("device-blocks=2000, 500,2000", Axis.DEVICE_BLOCKS, (500, 2000)),
        ("device-blocks=1000..20000/6", Axis.DEVICE_BLOCKS, (1000, 4800, 8600, 12400, 16200, 20000)),
        ("device-blocks=1..4/2,9", Axis.DEVICE_BLOCKS, (1, 4, 9)),
        ("device-blocks=7..7/3", Axis.DEVICE_BLOCKS, (7,)),
        ("device-blocks=100..1000/x2", Axis.DEVICE_BLOCKS, (100, 200, 400, 800)),
        ("device-blocks=1..2/x1.3", Axis.DEVICE_BLOCKS, (1, 2)),
        ("host-memory=0,1.5GiB", Axis.HOST_MEMORY, (0, 3 * GIB // 2)),
        ("host-memory=1.5GiB..6GiB/x2", Axis.HOST_MEMORY, (3 * GIB // 2, 3 * GIB, 6 * GIB)),
        ("host-memory=0..4G/3", Axis.HOST_MEMORY, (0, 2 * 10**9, 4 * 10**9)),
    ],
)
def test_capacities_are_parsed_and_sorted(text: str, axis: Axis, values: tuple[int, ...]) -> None:
    assert Capacities.parse(text) == Capacities(axis, values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' cannot be varied; write device-blocks=VALUES or host-memory=VALUES"),
        ("storage=1GiB", "'storage' cannot be varied"),
        ("device-blocks", "'' is not a number of blocks"),
        ("device-blocks=", "'' is not a number of blocks"),
        ("device-blocks=1,,2", "'' is not a number of blocks"),
        ("device-blocks=1GiB", "'1GiB' is not a number of blocks"),
        ("device-blocks=0", "0 is below 1"),
        ("device-blocks=-5", "-5 is below 1"),
        ("host-memory=much", "'much' is not a size such as 512MiB or 4G"),
        ("device-blocks=5..10", "'5..10' is not a range; write A..B/N"),
        ("device-blocks=5..10/many", "is not a range; write A..B/N"),
        ("device-blocks=5..10/1", "1 is not between 2 and 1000 values"),
        ("device-blocks=5..10/2000", "2000 is not between 2 and 1000 values"),
        ("device-blocks=10..5/3", "descends; write the smaller end first"),
        ("device-blocks=5..10/x", "'' is not a factor; write A..B/N"),
        ("device-blocks=5..10/x1", "give a factor above 1"),
        ("device-blocks=5..10/xnan", "'nan' is not a factor"),
        ("host-memory=0..4GiB/x2", "a first value above 0"),
        ("device-blocks=1..900/900,1001..1900/900", "1800 capacities are more than 1000"),
    ],
)
def test_an_error_names_the_option_and_the_remedy(text: str, says: str) -> None:
    with pytest.raises(ReplayOptionError) as caught:
        Capacities.parse(text)
    assert caught.value.option == "--sweep"
    assert says in caught.value.reason


def test_a_small_factor_ends() -> None:
    with pytest.raises(ReplayOptionError, match="more than 1000"):
        Capacities.parse("device-blocks=1..1000000/x1.001,1..1000/1000,2000..2999/1000")
    assert len(Capacities.parse("device-blocks=1..2/x1.0000001").values) <= MOST_VALUES

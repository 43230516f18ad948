"""The planner: runs, parts, and which way a range of planes is copied."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdcache import _core
from fdcache.layout import KVLayout
from tests.property.test_round_trips import LAYOUTS

KIB, MIB = 1 << 10, 1 << 20


def slots(values: list[int]) -> Any:
    return np.array(values, np.int32)


def plane_table(layout: KVLayout) -> _core.PlaneTable:
    planes = layout.planes
    return _core.PlaneTable(
        [0] * len(planes),
        [plane.device_stride for plane in planes],
        [plane.nbytes for plane in planes],
        [plane.offset for plane in planes],
        (),
    )


def make_policy(choice: _core.SwapChoice = _core.SwapChoice.AUTO, **changes: Any) -> _core.SwapPolicy:
    options: dict[str, Any] = {
        "to_host": [512 * KIB, 128 * KIB, 8 * MIB],
        "to_device": [128 * KIB, 64 * KIB, 8 * MIB],
        "staging_bytes": 16 * MIB,
        "kernel_ctas": 2,
        "transpose_ctas": 32,
        "direct_pieces": 8192,
        "small_pieces": 1024,
        "batched": True,
    }
    return _core.SwapPolicy(choice=choice, **(options | changes))


def uniform(plane_kib: int, layers: int = 32) -> KVLayout:
    return KVLayout.uniform(
        model="m",
        revision="r",
        num_layers=layers,
        block_size=1,
        kv_heads=1,
        head_dim=plane_kib * KIB,
        dtype="uint8",
    )


def method_of(
    layout: KVLayout,
    policy: _core.SwapPolicy,
    *,
    to_host: bool = False,
    planes: tuple[int, int] | None = None,
    rows: int = 16,
    runs: int = 16,
    contended: bool = False,
    unhurried: bool = False,
) -> _core.SwapMethod:
    first, last = planes or (0, layout.num_planes)
    return _core.choose_method(
        policy,
        to_host,
        plane_table(layout),
        first,
        last,
        layout.record_bytes,
        rows,
        runs,
        contended,
        unhurried,
    )


@given(st.lists(st.integers(0, 200), unique=True), st.integers(1, 20))
def test_runs_are_maximal_and_cross_no_extent(values: list[int], per_extent: int) -> None:
    values.sort()
    runs = _core.find_runs(slots(values), per_extent)
    assert [i for first, count in runs for i in range(first, first + count)] == list(range(len(values)))
    for first, count in runs:
        part = values[first : first + count]
        assert part == list(range(part[0], part[0] + count))
        assert part[0] // per_extent == part[-1] // per_extent
    for (first, count), (after, _) in pairwise(runs):
        last = values[first + count - 1]
        assert values[after] != last + 1 or values[after] % per_extent == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("limit", [1, 1 << 10, 1 << 13, 1 << 30])
def test_a_range_is_split_into_columns_that_fit(name: str, limit: int) -> None:
    layout = LAYOUTS[name]
    offsets = [*(plane.offset for plane in layout.planes), layout.record_bytes]
    parts = _core.split_range(plane_table(layout), 0, layout.num_planes, layout.record_bytes, limit)
    assert [plane for first, last in parts for plane in range(first, last)] == list(range(layout.num_planes))
    assert all(offsets[last] - offsets[first] <= limit or last == first + 1 for first, last in parts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_cover_every_plane_and_the_gaps_of_a_record_once(name: str) -> None:
    layout = LAYOUTS[name]
    data, first = _core.swap_chunks(plane_table(layout), layout.record_bytes)
    kinds = [("base", "u8"), ("stride", "i8"), ("offset", "u8"), ("nbytes", "u4"), ("padding", "u4")]
    chunks = np.frombuffer(data, np.dtype(kinds))
    assert first[0] == 0 and first[-1] == len(chunks)
    for index, plane in enumerate(layout.planes):
        mine = chunks[first[index] : first[index + 1]]
        assert mine["offset"][0] == plane.offset and int(mine["nbytes"].sum()) == plane.nbytes
        assert (mine["nbytes"] <= 8192).all() and (mine["stride"] == plane.device_stride).all()
        assert (mine["base"] == mine["offset"] - plane.offset).all()
    ends = chunks["offset"] + chunks["nbytes"] + chunks["padding"]
    assert (chunks["offset"][1:] == ends[:-1]).all() and int(ends[-1]) == layout.record_bytes


@pytest.mark.parametrize(
    ("plane_kib", "to_host", "planes", "method"),
    [
        (128, False, None, _core.SwapMethod.DIRECT),
        (128, True, None, _core.SwapMethod.STAGED),
        (16, False, (2, 10), _core.SwapMethod.STAGED),
        (16, False, (0, 2), _core.SwapMethod.KERNEL),
        (4, False, (0, 8), _core.SwapMethod.KERNEL),
        (4, False, (0, 16), _core.SwapMethod.STAGED),
        (4, True, None, _core.SwapMethod.STAGED),
    ],
)
def test_auto_goes_by_the_calibration(
    plane_kib: int, to_host: bool, planes: tuple[int, int] | None, method: _core.SwapMethod
) -> None:
    assert method_of(uniform(plane_kib), make_policy(), to_host=to_host, planes=planes) is method


def test_narrow_columns_of_long_runs_are_strided_copies_rather_than_a_kernel() -> None:
    narrow = {"planes": (0, 2), "rows": 64}
    assert method_of(uniform(4), make_policy(), runs=3, **narrow) is _core.SwapMethod.KERNEL  # type: ignore[arg-type]
    assert method_of(uniform(4), make_policy(), runs=2, **narrow) is _core.SwapMethod.STAGED  # type: ignore[arg-type]


def test_large_batches_of_large_planes_are_staged_so_that_submitting_them_stays_short() -> None:
    layout = uniform(128)
    assert method_of(layout, make_policy(), rows=128) is _core.SwapMethod.DIRECT
    assert method_of(layout, make_policy(), rows=129, planes=(0, 8)) is _core.SwapMethod.STAGED


def test_large_planes_are_staged_while_copies_run_the_other_way() -> None:
    layout = uniform(128)
    assert method_of(layout, make_policy(), planes=(0, 8), contended=True) is _core.SwapMethod.STAGED
    direct = make_policy(_core.SwapChoice.DIRECT)
    assert method_of(layout, direct, planes=(0, 8), contended=True) is _core.SwapMethod.DIRECT


@pytest.mark.parametrize("to_host", [True, False])
def test_small_batches_that_a_thread_submits_spare_the_memory_of_the_gpu(to_host: bool) -> None:
    def method(plane_kib: int = 128, **changes: Any) -> _core.SwapMethod:
        options: dict[str, Any] = {"to_host": to_host, "planes": (0, 8), "contended": True, "unhurried": True}
        return method_of(uniform(plane_kib), make_policy(), **(options | changes))

    assert method(rows=16) is method(64, rows=16) is _core.SwapMethod.DIRECT
    assert method(rows=17) is _core.SwapMethod.STAGED, "more pieces than a small batch has"
    assert method(32, rows=16) is _core.SwapMethod.STAGED, "the copy engines are slow with such pieces"
    assert method(unhurried=False) is _core.SwapMethod.STAGED, "each piece would cost the engine's thread"
    staged = make_policy(_core.SwapChoice.STAGED)
    assert method_of(uniform(128), staged, planes=(0, 8), unhurried=True) is _core.SwapMethod.STAGED


@pytest.mark.parametrize(("plane_kib", "short_mib"), [(64, 2), (128, 2), (512, 8), (1024, 16)])
def test_small_batches_that_a_thread_submits_leave_the_driver_to_others_often(
    plane_kib: int, short_mib: int
) -> None:
    """Of large pieces a call has sixteen, since the copy engine idles between two calls."""
    layout = uniform(plane_kib, layers=4)
    records = _core.RecordTable([1 << 40], 64, layout.record_bytes, [1 << 41], 64, ())
    numbers = slots(list(range(0, 64, 4)))

    def bytes_of_calls(unhurried: bool) -> set[int]:
        steps = _core.plan_steps(
            make_policy(), False, plane_table(layout), records, numbers, numbers, 0, layout.num_planes,
            16 * MIB, False, unhurried,
        )  # fmt: skip
        return {sum(piece[2] for piece in step[2]) for step in steps if step[0] == "pieces"}

    whole = min(16, plane_kib // 8)
    assert bytes_of_calls(True) == {short_mib * MIB}
    assert bytes_of_calls(False) == {whole * MIB}


def test_a_wanted_method_is_taken() -> None:
    wanted = {
        _core.SwapChoice.DIRECT: _core.SwapMethod.DIRECT,
        _core.SwapChoice.KERNEL: _core.SwapMethod.KERNEL,
        _core.SwapChoice.STAGED: _core.SwapMethod.STAGED,
    }
    for choice, method in wanted.items():
        assert method_of(uniform(4), make_policy(choice), planes=(0, 1)) is method


def test_without_multiprocessors_the_copy_engines_do_it_all() -> None:
    for choice in (_core.SwapChoice.AUTO, _core.SwapChoice.KERNEL, _core.SwapChoice.STAGED):
        assert method_of(uniform(4), make_policy(choice, kernel_ctas=0)) is _core.SwapMethod.DIRECT


def test_a_column_larger_than_the_ring_is_not_staged() -> None:
    assert method_of(uniform(512), make_policy(_core.SwapChoice.STAGED)) is _core.SwapMethod.DIRECT


def test_without_batches_only_long_runs_are_staged() -> None:
    policy = make_policy(batched=False)
    assert method_of(uniform(16), policy, planes=(0, 8), rows=64, runs=64) is _core.SwapMethod.KERNEL
    assert method_of(uniform(16), policy, planes=(0, 8), rows=64, runs=1) is _core.SwapMethod.STAGED


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("choice", [_core.SwapChoice.DIRECT, _core.SwapChoice.STAGED])
def test_addresses_have_64_bits_on_both_sides(choice: _core.SwapChoice, to_host: bool) -> None:
    """No memory is touched: tables of a device and a host with more of it than any machine."""
    layout, tib = uniform(16, layers=2), 1 << 40
    planes = _core.PlaneTable(
        [tib * (1 + i) for i in range(layout.num_planes)],
        [MIB + plane.nbytes for plane in layout.planes],
        [plane.nbytes for plane in layout.planes],
        [plane.offset for plane in layout.planes],
        (),
    )
    per_extent = 1 << 24
    records = _core.RecordTable(
        [64 * tib, 80 * tib], per_extent, layout.record_bytes, [96 * tib, 97 * tib], 2 * per_extent, ()
    )
    devices = [2_000_000_000, 70_000, 5, 70_001]
    hosts = [3, 9_000_000, per_extent, 2 * per_extent - 1]
    steps = _core.plan_steps(
        make_policy(choice), to_host, planes, records, slots(devices), slots(hosts), 0, layout.num_planes,
        16 * MIB, False, False,
    )  # fmt: skip
    pieces = [piece for kind, *rest in steps if kind == "pieces" for piece in rest[1]]
    starts = [
        (64 + 16 * (host // per_extent)) * tib + host % per_extent * layout.record_bytes for host in hosts
    ]
    if choice is _core.SwapChoice.STAGED:
        column = layout.record_bytes
        assert pieces == [(start, row * column, column) for row, start in enumerate(starts)]
        return
    assert sorted(pieces) == sorted(
        (start + plane.offset, tib * (1 + index) + device * (MIB + plane.nbytes), plane.nbytes)
        for index, plane in enumerate(layout.planes)
        for device, start in zip(devices, starts, strict=True)
    )

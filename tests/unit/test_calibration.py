"""Calibration: chosen from measurements, kept in a file, applied as a policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fdcache.devices.calibration import choose_calibration, make_policy, min_group_bytes
from fdcache.devices.topology import Gpu, link_of, numa_node_of
from fdcache.machine.calibration import (
    FORMAT,
    KIB,
    MIB,
    NEVER,
    Calibration,
    Measurement,
    calibrated_link,
    calibration_path,
    load_calibration,
    save_calibration,
)
from fdcache.settings.cache import CopySettings, SwapMethod

GPU = Gpu(0, "GPU-1", "a GPU", 13000, "0000:00:06.0", "PCIe 32.0 GT/s x16", 1, 132, 1 << 37)


def measurements(direction: str) -> list[Measurement]:
    direct = {16: 20.0, 32: 54.0, 64: 53.0, 128: 54.5}
    staged = {32: 40.0, 64: 52.0, 128: 54.0}
    kernel = {1: 35.0, 2: 51.0, 4: 51.4}
    return [
        *(Measurement(direction, "direct", size * KIB, 0, rate) for size, rate in direct.items()),
        *(Measurement(direction, "staged", size * KIB, 0, rate) for size, rate in staged.items()),
        *(Measurement(direction, "kernel", 8 * KIB, ctas, rate) for ctas, rate in kernel.items()),
    ]


def calibration(link: float = 55.0, gpu: Gpu = GPU) -> Calibration:
    found = measurements("host to device") + measurements("device to host")
    return choose_calibration(gpu, found, link_to_device=link, link_to_host=link, measured_at="now")


def test_thresholds_are_the_smallest_fast_sizes() -> None:
    found = calibration()
    assert found.to_device.direct_plane == 32 * KIB
    assert found.to_device.staged_column == 64 * KIB
    assert found.to_device.group_column == 128 * KIB
    assert found.kernel_ctas == 2
    assert found.suits(GPU)


def test_a_method_that_is_never_fast_is_never_used() -> None:
    found = calibration(link=80.0)
    assert found.to_device.direct_plane == NEVER and found.to_device.group_column == NEVER


def test_a_calibration_is_kept_for_its_gpu(tmp_path: Path) -> None:
    assert load_calibration(GPU, tmp_path) is None
    found = calibration()
    assert save_calibration(found, GPU, tmp_path / "a" / "b") == calibration_path(GPU, tmp_path / "a" / "b")
    assert load_calibration(GPU, tmp_path / "a" / "b") == found
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["GPU-1.json"]


@pytest.mark.parametrize("change", [{"driver": 12080}, {"pci_address": "0000:41:00.0"}, {"numa_node": 0}])
def test_another_driver_or_slot_makes_a_calibration_stale(
    tmp_path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    save_calibration(calibration(), GPU, tmp_path)
    assert load_calibration(replace(GPU, **change), tmp_path) is None  # type: ignore[arg-type]
    assert "fdcache init" in caplog.text


def test_a_file_of_another_format_or_a_broken_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_calibration(replace(calibration(), format=FORMAT + 1), GPU, tmp_path)
    assert load_calibration(GPU, tmp_path) is None
    calibration_path(GPU, tmp_path).write_text("{")
    assert load_calibration(GPU, tmp_path) is None
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ('"kernel_ctas": 2', '"kernel_ctas": -2'),
        ('"transpose_ctas": 33', '"transpose_ctas": 0'),
        ('"direct_plane": 32768', '"direct_plane": -1'),
        ('"staged_column": 65536', f'"staged_column": {1 << 63}'),
        ('"link_to_host": 55.0', '"link_to_host": "fast"'),
        ('"link_to_host": 55.0', '"link_to_host": -1.0'),
        ('"link_to_host": 55.0', '"link_to_host": 1e308'),
    ],
)
def test_a_calibration_with_impossible_values_is_ignored(
    tmp_path: Path, sound: str, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_calibration(calibration(), GPU, tmp_path)
    text = path.read_text()
    assert sound in text
    path.write_text(text.replace(sound, broken))
    assert load_calibration(GPU, tmp_path) is None
    assert broken.split('"')[1] in caplog.text and "fdcache init" in caplog.text


@pytest.mark.parametrize("link", [-1.0, 0.0, 1e-320, 1e308])
def test_an_impossible_link_is_no_speed(tmp_path: Path, link: float) -> None:
    other = replace(GPU, uuid="GPU-other")
    save_calibration(replace(calibration(), link_to_device=50.0), GPU, tmp_path)
    save_calibration(replace(calibration(), link_to_device=link), other, tmp_path)
    assert calibrated_link(tmp_path) == 50e9


def test_settings_limit_the_thread_blocks() -> None:
    calibrated = replace(calibration(), kernel_ctas=4)
    ctas = {
        budget: make_policy(CopySettings(swap_sm_budget=budget), calibrated, batched=True).kernel_ctas
        for budget in (0, 2, 32)
    }
    assert ctas == {0: 0, 2: 2, 32: 4}


@pytest.mark.parametrize(("multiprocessors", "ctas"), [(108, 27), (132, 33), (142, 36), (148, 37)])
def test_the_transposing_kernel_has_a_quarter_of_the_multiprocessors_within_the_budget(
    multiprocessors: int, ctas: int
) -> None:
    calibrated = calibration(gpu=replace(GPU, multiprocessors=multiprocessors))

    def chosen(settings: CopySettings) -> int:
        return make_policy(settings, calibrated, batched=True).transpose_ctas

    assert chosen(CopySettings()) == ctas
    assert chosen(CopySettings(swap_sm_budget=8)) == 8


def group(blocks: int, record: int, method: SwapMethod = SwapMethod.AUTO, *, batched: bool = True) -> int:
    settings = CopySettings(swap_method=method)
    return min_group_bytes(settings, Calibration(), blocks, record, batched=batched)


def test_groups_are_large_enough_for_the_copy_engines() -> None:
    assert group(1000, MIB) >= Calibration().to_device.group_column
    assert group(8192, MIB) * 6144 >= 8192 * MIB
    assert group(1, MIB) >= MIB
    assert group(1000, MIB, SwapMethod.KERNEL) < group(1000, MIB) + 1
    assert all(group(blocks, MIB) % (64 * KIB) == 0 for blocks in (1, 7, 100, 5000))


def test_link_and_node_come_from_sysfs(tmp_path: Path) -> None:
    assert link_of(tmp_path) == "PCIe link unknown" and numa_node_of(tmp_path) is None
    (tmp_path / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (tmp_path / "max_link_width").write_text("16\n")
    (tmp_path / "numa_node").write_text("-1\n")
    assert link_of(tmp_path) == "PCIe 32.0 GT/s PCIe x16" and numa_node_of(tmp_path) is None
    (tmp_path / "numa_node").write_text("1\n")
    assert numa_node_of(tmp_path) == 1


def test_a_scheduler_knows_the_slowest_calibrated_link(tmp_path: Path) -> None:
    assert calibrated_link(tmp_path) == calibrated_link(tmp_path / "missing") == 0.0
    for name, speed in (("a", 55.0), ("b", 24.0), ("c", 0.0)):
        made = replace(Calibration(), gpu=name, link_to_device=speed)
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(made))
    (tmp_path / "d.json").write_bytes(
        msgspec.json.encode(replace(made, format=FORMAT - 1, link_to_device=1.0))
    )
    (tmp_path / "e.json").write_text("{")
    assert calibrated_link(tmp_path) == 24e9

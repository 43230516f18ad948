"""``fdcache replay --pd``: every byte compared, with and without faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands import fdcache
from tests.transfer_help import require_nixl

SMALL = ("replay", "--pd", "--device-blocks", "1200", "--block-size", "32", "--host-memory", "0")
"""The arguments of a small replay."""


def report(*arguments: str, status: int = 0, **environment: str) -> Any:
    found = fdcache(
        *SMALL,
        "--json",
        *arguments,
        **environment,
    )
    assert found.returncode == status, found.stderr
    return json.loads(found.stdout)


def test_blocks_are_handed_over_and_flipped_ones_are_computed() -> None:
    found = report("--requests", "30", "--faults", "flip=3,abort=2", "--seed", "3")
    assert found["clean"]
    assert found["wrong_blocks"] == 0
    assert found["finished"] + found["aborted"] == found["requests"] > 20
    assert found["compared_blocks"] > 100
    assert found["transfers"]["fetch done"] > 5
    assert sum(found["faults"].values()) == 5


def test_head_ranges_are_handed_over_to_fewer_ranks_and_flipped_ones_are_computed() -> None:
    found = report("--requests", "30", "--kv-heads", "2", "--pd-ranks", "2:1", "--faults", "flip=8,abort=1")
    assert found["clean"]
    assert found["compared_blocks"] > 100
    assert found["transfers"]["fetch done"] > 5
    assert found["transfers"]["fetch corrupt"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        ("--pd-ranks", "1:2"),
        ("--pd-ranks", "2:1", "--layout", "mla"),
        ("--pd-ranks", "1:2", "--layout", "mla"),
    ],
)
def test_ranks_of_unequal_instances_leave_nothing_and_change_no_byte(ranks: tuple[str, ...]) -> None:
    heads = () if "mla" in ranks else ("--kv-heads", "2")
    found = report("--requests", "150", *heads, *ranks, "--faults", "kill=2,stop=2,abort=2,reset=2")
    assert found["clean"]
    assert found["transfers"]["fetch done"] > 5


@pytest.mark.slow
def test_head_ranges_without_verification_show_flipped_bytes() -> None:
    few = ("--requests", "100", "--kv-heads", "2", "--pd-ranks", "1:2", "--faults", "flip=20")
    assert report(*few, status=1, FDCACHE_VERIFY="off")["wrong_blocks"] > 0
    assert report(*few)["wrong_blocks"] == 0


@pytest.mark.slow
def test_blocks_are_handed_over_through_nixl_with_and_without_faults() -> None:
    require_nixl()
    found = report("--transfer", "rdma", "--requests", "300", "--faults", "kill=4,stop=4,abort=4,reset=4")
    assert found["clean"]
    assert sum(found["faults"].values()) == 16
    assert found["transfers"]["fetch done"] > 5


@pytest.mark.slow
def test_kills_stops_aborts_and_resets_leave_nothing_and_change_no_byte() -> None:
    found = report(
        *("--requests", "400", "--faults", "40"), FDCACHE_TRANSFER_TIMEOUT="1", FDCACHE_TRANSFER_LEASE="0.5"
    )
    assert found["clean"]
    assert found["faults"] == {"kill": 10, "stop": 10, "abort": 10, "reset": 10}


@pytest.mark.slow
def test_without_verification_flipped_bytes_are_seen() -> None:
    found = report("--requests", "300", "--faults", "flip=30", status=1, FDCACHE_VERIFY="off")
    assert found["wrong_blocks"] > 0
    verified = report("--requests", "300", "--faults", "flip=30")
    assert verified["wrong_blocks"] == 0
    assert verified["transfers"]["fetch corrupt"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("replay", "--faults", "3"), "only a --pd has it"),
        (("replay", "--pd", "--sweep", "device-blocks=1,2"), "a --pd"),
        (("replay", "--pd", "--faults", "fire=3"), "'fire=3' is none"),
        (("replay", "--pd", "--pd-ranks", "2"), "write the ranks of prefill and decode"),
        (("replay", "--pd", "--pd-ranks", "3:1"), "cannot be divided evenly"),
        (("replay", "--pd-ranks", "2:1"), "only a --pd has it"),
        (("replay", "--pd", "--transfer", "pigeons"), "no such connector"),
        (("replay", "--pd", "--transfer", "none"), "hands nothing over"),
        (("replay", "--pd", "--device-blocks", "4", "--requests", "3"), "each of the 3 prompts is larger"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], words: str) -> None:
    found = fdcache(*arguments)
    assert found.returncode != 0
    assert words in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr


def test_an_instance_that_cannot_start_says_why() -> None:
    found = fdcache("replay", "--pd", "--requests", "3", FDCACHE_TRANSFER_DIR="/proc/none")
    assert found.returncode == 1
    assert found.stderr.startswith("error: /proc/none takes no file of planes")
    assert "Traceback" not in found.stderr

"""``fdcache replay --nodes``: three services and engines that share what they store, and what happens to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ReplayOptionError
from fdcache.replay.config import ReplayConfig
from fdcache.replay.nodes.cluster import Cluster, NodeFault, NodesConfig
from fdcache.replay.nodes.engine_process import Totals
from fdcache.replay.nodes.run import NodesReport
from fdcache.storage.objects.variables import ObjectSettings
from tests.commands import fdcache
from tests.object_help import Bucket
from tests.replay_help import small_config

Store = dict[str, str]
PATIENT = {"FDCACHE_PREFETCH_POLICY": "wait_complete", "FDCACHE_RPC_TIMEOUT": "60"}
"""A slow machine is no reason to compute."""
HURRIED = {"FDCACHE_PREFETCH_POLICY": "timeout", "FDCACHE_RPC_TIMEOUT": "2"}
"""Requests go on without what is late; on a slow machine something comes in time."""

WAYS = ["nodes", "shared", "object"]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """The variables of a way; that over the host tiers of nodes needs none."""
    common = {**PATIENT, "FDCACHE_ARENA_DIR": str(tmp_path)}
    if request.param == "local bucket":
        return common | Bucket(f"file://{tmp_path}/bucket").environment
    if request.param == "object":
        bucket: Bucket = request.getfixturevalue("s3")
        return common | bucket.environment
    return common | ({"FDCACHE_STORAGE": "shared"} if request.param == "shared" else {})


@pytest.fixture
def store_of_nodes(tmp_path: Path) -> Store:
    return {"FDCACHE_ARENA_DIR": str(tmp_path)}


def replayed(store: Store, nodes: int, *options: str) -> dict[str, Any]:
    """Replay on so many nodes; the memory of all of them together is always the same."""
    sizes = ("--host-memory", f"{96 // nodes}MiB", "--device-blocks", f"{600 // nodes}")
    command = (
        *("replay", "--nodes", str(nodes), *sizes, "--concurrency", f"{6 // nodes}"),
        *options,
        "--json",
    )
    done = subprocess.run(
        [sys.executable, "-m", "fdcache_cli.main", *command],
        env={**os.environ, **store},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["totals"]["wrong_blocks"] == report["left"] == 0
    assert report["broken"] == []
    assert report["clean"]
    assert done.returncode == 0
    assert report["totals"]["compared_blocks"] > 0
    return report


@pytest.mark.slow
@pytest.mark.parametrize("store", ["nodes", "shared", "local bucket", "object"], indirect=True)
def test_three_nodes_find_what_one_with_all_the_memory_finds(store: Store, tmp_path: Path) -> None:
    options = ("--requests", "300")
    three = replayed(store, 3, *options)
    one = replayed({**PATIENT, "FDCACHE_ARENA_DIR": str(tmp_path)}, 1, *options)
    assert three["totals"]["finished"] == one["totals"]["finished"] == 300
    assert three["totals"]["storage_tokens"] > 0
    assert abs(three["hit_rate"] - one["hit_rate"]) < 0.02
    assert three["errors"] == []
    assert list(tmp_path.glob("fdcache-nodes-*")) == []


@pytest.mark.slow
def test_requests_that_find_their_prefix_read_little_from_other_nodes(store_of_nodes: Store) -> None:
    shares = {}
    for route in ("random", "prefix"):
        report = replayed({**PATIENT, **store_of_nodes}, 3, "--requests", "120", "--route", route)
        shares[route] = report["totals"]["storage_tokens"] / report["totals"]["hit_tokens"]
    assert shares["prefix"] < shares["random"] / 4


@pytest.mark.slow
@pytest.mark.parametrize("store", WAYS, indirect=True)
def test_nothing_is_wrong_or_late_whatever_happens_to_nodes(store: Store) -> None:
    report = replayed({**store, **HURRIED}, 3, "--requests", "80", "--faults", "8", "--seed", "1")
    assert report["totals"]["storage_tokens"] > 0
    assert report["totals"]["longest_wait"] <= report["wait_limit"] == 11
    assert report["totals"]["finished"] + report["again"] >= 80
    assert sum(report["faults"].values()) == 8


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["2", "3"])
@pytest.mark.parametrize("store", WAYS, indirect=True)
def test_nothing_is_wrong_or_late_after_a_hundred_faults(store: Store, seed: str) -> None:
    report = replayed({**store, **HURRIED}, 3, "--requests", "600", "--faults", "100", "--seed", seed)
    assert sum(report["faults"].values()) == report["planned"] == 100
    assert report["totals"]["storage_tokens"] > 0
    assert report["totals"]["longest_wait"] <= report["wait_limit"] == 11
    assert report["totals"]["finished"] + report["again"] >= 600


def test_nodes_that_die_and_are_cut_off(store_of_nodes: Store) -> None:
    options = ("--requests", "40", "--route", "prefix")
    report = replayed(store_of_nodes, 3, *options, "--faults", "kill=1,engine=1,cut=1")
    assert report["route"] == "prefix"
    assert report["faults"] == {"kill": 1, "engine": 1, "cut": 1}


# --- the replay notices -----------------------------------------------------------------------------------

_OTHER_MODEL = """
import os

import fdcache.replay.models as models

make = models.make_model
models.make_model = lambda arrays, layout, rank: make(arrays, layout, rank + os.getpid())
"""
"""Makes the engine of each process compute something else for the same tokens."""


def test_blocks_with_the_wrong_bytes_are_noticed(store_of_nodes: Store, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_OTHER_MODEL)
    command = ("replay", "--nodes", "2", "--requests", "30", "--host-memory", "32MiB", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "fdcache_cli.main", *command],
        env={**os.environ, **store_of_nodes, **PATIENT, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["totals"]["wrong_blocks"] > 0, done.stderr
    assert not report["clean"]
    assert done.returncode != 0


@pytest.mark.parametrize(
    "changes",
    [
        {"totals": Totals(wrong_blocks=1)},
        {"totals": Totals(longest_wait=11.1)},
        {"left": 1},
        {"broken": ["service of node 0: ended with 1"]},
        {"planned": 2},
    ],
)
def test_a_report_with_anything_amiss_is_not_clean(changes: dict[str, Any]) -> None:
    sound = NodesReport(
        "nodes", 3, True, 11.0, planned=1, faults=Counter(kill=1), totals=Totals(longest_wait=10.9)
    )
    assert sound.clean
    assert not replace(sound, **changes).clean


@pytest.mark.slow  # which faults are counted is that of test_nodes_that_die_and_are_cut_off, but for one kind
def test_a_fault_that_does_not_happen_is_not_counted(tmp_path: Path) -> None:
    config = NodesConfig(small_config(), 1, arena_folder=tmp_path)
    with Cluster(config) as cluster:
        (node,) = cluster.nodes
        assert not cluster.break_node(node, NodeFault.CUT), "one node alone has no way that could be cut"
        for fault in (NodeFault.STOP, NodeFault.ENGINE, NodeFault.KILL):
            assert cluster.break_node(node, fault)
            assert node.heal is not None
            node.heal()
        node.service.wait()


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", "17"), "17 is not between 1 and 16"),
        (("--nodes", "3", "--sweep", "host-memory=1MiB"), "a replay of --nodes does not have it"),
        (("--nodes", "3", "--pd"), "a replay of --nodes does not have it"),
        (("--route", "prefix"), "only a replay of --nodes has it"),
        (("--nodes", "3", "--faults", "flood=3"), "'flood=3' is none; write 200, or kinds of kill"),
        (("--nodes", "3", "--faults", "full=3"), "full: only a bucket behind FDCACHE_OBJECT_ENDPOINT can be"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], words: str) -> None:
    done = fdcache("replay", *options, COLUMNS="300")
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("way", "bucket", "faults", "words"),
    [
        ("local", None, {}, "FDCACHE_STORAGE=local shares nothing; set it to nodes, object, shared"),
        ("object", ObjectSettings(url="s3://bucket/folder"), {}, "needs a bucket in a folder"),
        (
            "object",
            ObjectSettings(url="file:///folder"),
            {NodeFault.CUT: 1},
            "cut: nodes reach a folder without",
        ),
        ("shared", None, {NodeFault.SLOW: 1}, "slow: nodes reach a folder without a network"),
    ],
)
def test_what_cannot_be_is_said(
    way: str, bucket: ObjectSettings | None, faults: dict[NodeFault, int], words: str
) -> None:
    config: ReplayConfig = small_config()
    with pytest.raises(ReplayOptionError, match=words):
        NodesConfig(config, 3, way, bucket=bucket, faults=faults)


def test_the_longest_wait_of_several_engines_is_not_their_sum() -> None:
    both = Totals(finished=2, longest_wait=1.5).plus(Totals(finished=3, longest_wait=0.5))
    assert (both.finished, both.longest_wait) == (5, 1.5)

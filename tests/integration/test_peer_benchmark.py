"""The benchmark beside other engines, with its processes: equal hits, complete reports, and peers that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import profile
from benchmarks.peers.adapters.base import Adapter, Pool
from benchmarks.peers.adapters.fdcache import FdcacheAdapter
from benchmarks.peers.adapters.minimal import MinimalAdapter
from benchmarks.peers.environments import (
    PEERS,
    MissingError,
    Peer,
    build_minimal,
    default_home,
    interpreter,
)
from benchmarks.peers.rounds import PeerProcess, WorkerError, fastest, in_turns, started
from benchmarks.peers.scenarios import PHASES, MakeAdapter, Replay
from benchmarks.peers.traffic import record
from fdcache.replay.workloads import WorkloadName, generate

TINY = peers.Effort(40, 20, 2, 2, 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the compiled minimal list and no environments."""
    folder = tmp_path_factory.mktemp("peers")
    try:
        build_minimal(folder)
    except MissingError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traffic")
    record(generate(WorkloadName.AGENT, 200, 1), folder)
    return folder


def hits(make: MakeAdapter, traffic: Path, blocks: int) -> tuple[list[int], Adapter]:
    """Replay in slices of 50 requests; return the hit tokens of each."""
    replay = Replay(make, traffic=str(traffic), blocks=blocks, in_flight=8)
    found = [replay.advance(50) for _ in range(4)]
    assert sum(one.requests for one in found) == 200
    assert all(len(one.ns["free"]) <= len(one.ns["match"]) + 8 for one in found)
    assert sum(len(one.ns["free"]) for one in found) == 200
    replay.adapter.check()
    return [one.hit_tokens for one in found], replay.adapter


@pytest.mark.parametrize("lists", [False, True], ids=["int32", "lists"])
def test_fdcache_and_the_minimal_list_hit_alike(home: Path, traffic: Path, lists: bool) -> None:
    library = build_minimal(home)

    def minimal(pool: Pool) -> MinimalAdapter:
        return MinimalAdapter(pool, library)

    def ours(pool: Pool) -> FdcacheAdapter:
        return FdcacheAdapter(pool, lists=lists)

    least, floor = hits(minimal, traffic, 5000)
    assert hits(ours, traffic, 5000)[0] == least
    assert isinstance(floor, MinimalAdapter)
    assert floor.free_blocks() == 5000
    short = hits(minimal, traffic, 600)[0]
    assert sum(short) < sum(least)  # blocks were evicted
    assert sum(hits(ours, traffic, 600)[0]) == pytest.approx(sum(short), rel=0.02)


def test_a_run_reports_every_part(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "QUICK", TINY)
    monkeypatch.setattr(peers, "SMALL", 9000)
    monkeypatch.setattr(peers, "LARGE", 12_000)
    names = ["fdcache-int32", "fdcache-list", "minimal"]
    assert peers.main(["--quick", "--json", "--home", str(home), "--peers", *names]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [list(costs) for costs in found["us_per_request"].values()] == [names, names]
    assert {
        len(found[part]) for part in ("us_per_decode_step", "us_per_cached_prompt", "bytes_per_block")
    } == {3}
    for costs in found["us_per_request"].values():
        assert {one["hit_rate"] for one in costs.values()} == {costs["minimal"]["hit_rate"]}
        assert all(one["requests"] == TINY.requests and set(PHASES) < set(one) for one in costs.values())
        assert all(
            one["total"] == pytest.approx(sum(one[phase] for phase in PHASES)) for one in costs.values()
        )
    measured = [aim["name"] for aim in found["targets"] if aim["value"] is not None]
    alone = [
        aim["name"] for aim in found["targets"] if "vLLM" not in aim["name"] and "SGL" not in aim["name"]
    ]
    assert measured == alone
    assert found["faults"] == []


def test_a_peer_that_fails_is_one_line_with_its_log(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("broken", "fdcache", {"lists": False, "colour": "red"})
    monkeypatch.setattr(peers, "PEERS", (broken,))
    monkeypatch.setattr(peers, "QUICK", TINY)
    assert peers.main(["--quick", "--only", "decode", "--home", str(home), "--peers", "broken"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("broken has stopped: TypeError")
    assert "colour" in line
    assert (home / "logs/broken.log").read_text().startswith("Traceback")


def test_a_process_that_is_gone_is_named(tmp_path: Path) -> None:
    process = PeerProcess(Peer("gone", "nothing"), default_home(), tmp_path / "log")
    with pytest.raises(WorkerError, match="gone has stopped: ModuleNotFoundError"):
        process.wait_until_ready()
    with pytest.raises(WorkerError, match="gone has stopped"):
        process.order("end")
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_other_engines_hit_as_the_minimal_list_does(name: str, home: Path, traffic: Path) -> None:
    peer = next(one for one in PEERS if one.name == name)
    assert peer.environment
    try:
        interpreter(default_home(), peer.environment)
    except MissingError as error:
        pytest.skip(str(error))
    floor = next(one for one in PEERS if one.name == "minimal")
    settings = {"traffic": str(traffic), "blocks": 2000, "in_flight": 8}
    with started([peer, floor], default_home(), home) as processes:
        found = in_turns(processes, "replay", settings, [100, 100], 1, lambda: None)
    rates = {one: [fastest([part]).hit_rate for part in measured[0]] for one, measured in found.items()}
    assert rates[name] == pytest.approx(rates["minimal"], abs=0.02)


def test_a_profile_shows_the_calls_and_the_functions_of_the_project(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(profile.COUNTS, "hit", 2)
    assert profile.main(["hit", "--functions", "50"]) == 0
    shown = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    calls = {name.strip(): number.strip() for name, number in shown}
    assert {calls[phase] for phase in ("hash", "match", "allocate", "commit", "free")} == {"2"}
    assert [number for name, number in calls.items() if name.endswith(" match_prefix")] == ["2"]
    assert not [name for name in calls if "scenarios.py" in name]

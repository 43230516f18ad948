"""Many hand-overs, and many peers that come and go: nothing of them stays."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytest

from fdcache.manager import Request
from tests.handover_engine import Engine
from tests.transfer_help import prompt_of


def hand_over(prefill: Engine, decode: Engine, number: int) -> None:
    """Hand a prompt over; every fifth is declined, every seventh asks for what does not exist."""
    mine, theirs = Request(f"p-{number}", prompt_of(number, 2)), Request(f"d-{number}", prompt_of(number, 2))
    prefill.ended.clear()
    decode.outcomes.clear()
    table = prefill.send(mine, f"p-{number}")
    prefill.step()
    name = "nothing" if number % 7 == 0 else f"p-{number}"
    decode.handovers.fetch(theirs, prefill.source(name))
    if number % 5:
        target = decode.allocate(decode.manager.match(theirs, 0).num_tokens)
        decode.manager.load(theirs, target)
        if number % 7 == 0:
            decode.step()
        else:
            decode.until(lambda: decode.outcomes, prefill)
            assert decode.is_right(theirs, target)
        decode._free += target.tolist()
    decode.manager.finish([theirs])
    if number % 7 == 0:
        prefill.handovers.end(mine)
    prefill.until(lambda: prefill.ended and prefill.is_clean and decode.is_clean, decode)
    prefill._free += table.tolist()


def sizes_of(engine: Engine) -> dict[str, int]:
    """Return the lengths of all collections below an endpoint, by path."""
    found: dict[str, int] = {}
    transfer = engine.controller._parts.transfer
    assert transfer is not None
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Sized) and not isinstance(value, str | bytes) and hasattr(value, "__iter__"):
            found[path] = len(value)
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        if type(value).__module__.startswith("fdcache.transfer"):
            for name in names:
                visit(getattr(value, name, None), f"{path}.{name}")
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each, f"{path}[]")

    visit(transfer.endpoint, "endpoint")
    return found


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


BOUNDED = ("._over", "._ended", "._done", "._dead", "._peers")
"""What is remembered of the last ones, up to a number."""


def check(tmp_path: Path, *, handovers: int, peers: int) -> None:
    with Engine("prefill", tmp_path, "p") as prefill:
        with Engine("decode", tmp_path, "d") as decode:
            for number in range(50):
                hand_over(prefill, decode, number)
            before = sizes_of(prefill) | {f"decode {name}": size for name, size in sizes_of(decode).items()}
            files, threads = _open_files(), threading.active_count()
            for number in range(50, 50 + handovers):
                hand_over(prefill, decode, number)
            after = sizes_of(prefill) | {f"decode {name}": size for name, size in sizes_of(decode).items()}
            grown = {
                name: (before.get(name), size)
                for name, size in after.items()
                if size > before.get(name, 0) and not name.endswith(BOUNDED)
            }
            assert not grown
            assert max(size for name, size in after.items() if name.endswith(BOUNDED)) <= 4096
            # Fewer if what an earlier test has left was collected meanwhile.
            assert _open_files() <= files
            assert threading.active_count() <= threads
        for number in range(peers):
            with Engine("decode", tmp_path, f"peer-{number % 3}") as decode:
                hand_over(prefill, decode, 7 * number + 1 if (7 * number + 1) % 5 else 7 * number + 2)
        transfers = prefill.controller.transfer_stats()
        assert transfers is not None
        prefill.until(lambda: not sizes_of(prefill)["endpoint._links.incoming"])
        gc.collect()
        assert _open_files() <= files
        assert threading.active_count() <= threads


def test_nothing_of_hand_overs_and_peers_stays(tmp_path: Path) -> None:
    check(tmp_path, handovers=100, peers=10)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_nothing_of_ten_thousand_hand_overs_and_a_thousand_peers_stays(tmp_path: Path) -> None:
    check(tmp_path, handovers=5000, peers=500)  # what is learned of the first half is not counted
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "again").mkdir()
    check(tmp_path / "again", handovers=5000, peers=500)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 50 << 10, "kilobytes"

"""Blocks of windows, chunks and states on a GPU, handed over by a process with another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.manager.results import LoadStatus
from tests.ranked_engine import PAGE, fetch
from tests.transfer_help import require_nixl

pytest.importorskip("cupy")

from tests.gpu.peers import Peer, use_nixl_for_the_stand_in
from tests.gpu.ranked_peers import GpuEngine

LENGTHS = (3 * PAGE, 5 * PAGE + 7, 8 * PAGE, PAGE + 1)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=lambda ranks: f"{ranks[0]}:{ranks[1]}")
@pytest.mark.parametrize("connector", ["ipc", "rdma"])
def test_each_rank_has_its_part_of_what_the_next_token_needs(
    connector: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    if connector == "rdma":
        require_nixl()
        use_nixl_for_the_stand_in()
    options = (tmp_path, connector, *ranks, "all")
    with Peer(0, *options, module="tests.gpu.ranked_peers") as prefill:
        decode = GpuEngine("decode", tmp_path, connector, ranks[1], ranks[0], "all")
        try:
            for seed, num_tokens in enumerate(LENGTHS):
                assert prefill.tell(f"{seed} {num_tokens}") == "computed"
                into, model = fetch(decode, seed, num_tokens, prefill.line.split())
                outcome = decode.outcomes[-1]
                assert (outcome.status, outcome.error_message) == (LoadStatus.CONFIRMED, None)
                assert decode.is_right(into, model)
            assert prefill.end() == "done"
            assert set(decode.results) == {"done"}
        finally:
            decode.close()

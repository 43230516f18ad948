"""Blocks of windows, chunks and states, handed over between engines of unequal numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import TransferError
from fdcache.manager.results import LoadStatus
from fdcache.metadata import Int32Array
from fdcache.settings.cache import CopySettings
from fdcache.settings.peers import PeerSettings
from tests.ranked_engine import GROUPS, PAGE, PARTS, Engine, Model, fetch, layout_of, send, step_until
from tests.transfer_help import require_nixl


@contextmanager
def engines(
    folder: Path, connector: str, ranks: tuple[int, int], kind: str = "states"
) -> Iterator[tuple[Engine, Engine]]:
    if connector == "rdma":
        require_nixl()
    prefill = Engine("prefill", folder, connector, ranks[0], ranks[1], kind)
    decode = Engine("decode", folder, connector, ranks[1], ranks[0], kind)
    try:
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def hand_over(prefill: Engine, decode: Engine, seed: int, num_tokens: int) -> tuple[Int32Array, Model]:
    """Compute a prompt at prefill, and let decode fetch it; return its blocks and what their bytes should be."""
    send(prefill, seed, num_tokens)
    return fetch(decode, seed, num_tokens, prefill.addresses, prefill)


@pytest.mark.parametrize(
    ("connector", "kind", "ranks"),
    [
        *((connector, "all", ranks) for connector in ("ipc", "rdma") for ranks in ((1, 2), (2, 1))),
        *(("ipc", kind, ranks) for kind in ("states", "chunks", "windows") for ranks in ((1, 2), (2, 1))),
        ("ipc", "all", (4, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}:{value[1]}",
)
def test_each_rank_has_its_part_of_what_the_next_token_needs(
    connector: str, kind: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    with engines(tmp_path, connector, ranks, kind) as (prefill, decode):
        for seed, num_tokens in enumerate((3 * PAGE, 5 * PAGE + 7, 8 * PAGE, PAGE + 1)):
            into, model = hand_over(prefill, decode, seed, num_tokens)
            assert decode.outcomes[-1].status is LoadStatus.CONFIRMED
            assert decode.is_right(into, model)
        step_until(lambda: len(prefill.results) == 4 * len(prefill.ranks), (prefill, decode))
        assert {*prefill.results, *decode.results} == {"done"}


def test_a_byte_of_a_state_that_changes_on_the_way_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the parts are compared as those of heads are."""
    with engines(tmp_path, "ipc", (1, 2)) as (prefill, decode):
        offset = PARTS[0] + 5
        compute = Engine.compute

        def changed(engine: Engine, table: Int32Array, model: Model) -> None:
            compute(engine, table, model)
            transfer = prefill.ranks[0]._parts.transfer
            assert transfer is not None
            sums = transfer.endpoint._sends.side.sums

            def late(*arguments: object) -> None:
                sums(*arguments)  # type: ignore[arg-type]
                engine.planes[0][0][table[-1], offset] ^= 1

            monkeypatch.setattr(transfer.endpoint._sends.side, "sums", late)

        monkeypatch.setattr(Engine, "compute", changed)
        hand_over(prefill, decode, 1, 40)
        assert decode.outcomes[-1].status is LoadStatus.FAILED
        assert "corrupt" in decode.results


def test_states_without_parts_are_refused_by_name(tmp_path: Path) -> None:
    layout = layout_of(1, GROUPS["states"])
    settings = PeerSettings(
        role="prefill", connector="ipc", directory=tmp_path, address=f"ipc://{tmp_path}/x", peer_ranks=2
    )
    with CacheController(CopySettings(), layout) as controller:
        controller.initialize_kv_cache(4, shared=tmp_path)
        with pytest.raises(
            TransferError,
            match="FDCACHE_TRANSFER_PEER_RANKS=2: the layout has states, and it is not known which part",
        ):
            controller.open_transfer(settings)
        with pytest.raises(TransferError, match="cannot be divided among 2 ranks in multiples of 8 bytes"):
            controller.open_transfer(settings, state_parts=(24, 16))

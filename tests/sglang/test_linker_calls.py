"""FdcacheLinker without an engine: its calls over pools of SGLang, what it refuses by name, and what it forgets."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from fdcache.devices.cpu import CpuStream
from fdcache.errors import ConfigurationError, DeviceLostError, HashingError, UnsupportedLayoutError
from fdcache.hashing import sglang_keys
from fdcache.integrations.sglang import config as sglang_config
from fdcache.integrations.sglang import device_pools, offloads, pool_tier, weights
from fdcache.integrations.sglang import linker as module
from fdcache.integrations.sglang.linker import FdcacheLinker
from fdcache.tasks import CpuEvent
from tests.service_help import service_process, until
from tests.sglang.test_storage import keys as hex_keys

PAGE, TOKENS, LAYERS = 16, 64 * 16, 3


def mha() -> MHATokenToKVPool:
    return MHATokenToKVPool(TOKENS, PAGE, torch.float32, 2, 8, LAYERS, "cpu", False, enable_alt_stream=False)


def mla() -> MLATokenToKVPool:
    return MLATokenToKVPool(TOKENS, PAGE, torch.float32, 24, 8, LAYERS, "cpu", False)


def parameters(pool: Any, **more: Any) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator, page_size=PAGE, sliding_window_size=None, **more
    )


def arguments(**given: Any) -> Any:
    return SimpleNamespace(
        **{"model_path": "model", "served_model_name": "model", "dtype": "float32", "random_seed": 0} | given
    )


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_of(server_args: Any, pages: Any, extra: Any) -> sglang_config.Rank:
        is_mla = all(each.description.get("type") == "MLATokenToKVPool" for each in pages)
        return sglang_config.Rank("model", 0, 1, 0, 1, 0, 1, 0, is_mla, extra)

    monkeypatch.setattr(module, "_rank_of", rank_of)


@contextmanager
def linker(pool: Any, *, tp_size: int = 1, **extra: Any) -> Iterator[FdcacheLinker]:
    made = FdcacheLinker(
        arguments(tp_size=tp_size),
        parameters(pool),
        components={ComponentType.FULL},
        extra_config={"FDCACHE_HOST_MEMORY": "4MiB", **extra},
    )
    try:
        yield made
    finally:
        made.close()


def transfer(keys: list[str], pages: list[int] | None = None) -> list[PoolTransfer]:
    indices = None
    if pages is not None:
        indices = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
    return [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=indices)]


def stored(made: FdcacheLinker, keys: list[str], pages: list[int]) -> bool:
    assert made.offload(transfer(keys, pages))
    until(lambda: made.num_completed_offloads() == 1, "the offload ends")
    return made.pop_completed_offload()


def loaded(made: FdcacheLinker, rid: str, keys: list[str], pages: list[int]) -> bool:
    assert made.load(rid, transfer(keys, pages))
    index = made.start_layer_wise_loading()
    made.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        made.layer_done_counter.wait_until(layer)
    made.layer_done_counter.set_consumer(-1)
    return made.finish_layer_wise_loading(index)


@pytest.mark.parametrize(("adapter", "salt"), [(None, None), ("a", None), (None, "s"), ("", "s")])
def test_tools_know_the_keys_of_sglang(adapter: str | None, salt: str | None) -> None:
    tokens = list(range(3, 3 + 5 * PAGE))
    key = RadixKey(array("q", tokens), extra_key=adapter, cache_salt=salt)
    expected = get_storage_hash_str(key, None, page_size=PAGE)
    assert [row.tobytes().hex() for row in sglang_keys(tokens, PAGE, adapter=adapter, salt=salt)] == expected


@pytest.mark.parametrize(("salt", "is_same"), [(None, True), ("tenant", False)])
def test_names_of_sglangs_events_are_the_first_8_bytes_of_its_keys(salt: str | None, is_same: bool) -> None:
    """Without a salt: what is kept here could be told under the names that SGLang itself tells routers."""
    tokens = list(range(3, 3 + 5 * PAGE))
    root = SimpleNamespace(key=(), parent=None, hash_value=[], event_hash_value=None)
    key = RadixKey(array("q", tokens), extra_key=None, cache_salt=salt)
    node = SimpleNamespace(key=key, parent=root, hash_value=None, event_hash_value=None)
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE)
    recorder.record_store(node)
    names = [name for event in recorder.take() for name in event.block_hashes]
    keys = sglang_keys(tokens, PAGE, salt=salt)
    first = [int.from_bytes(row[:8].tobytes(), "big", signed=True) for row in keys]
    assert len(names) == 5 and (names == first) == is_same


@pytest.mark.parametrize("make", [mha, mla])
def test_pages_of_all_layers_come_back(make: Any) -> None:
    pool = make()
    buffers = pool.kv_buffer if make is mla else [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        buffer.copy_(torch.rand(buffer.shape))
    before = [buffer.clone() for buffer in buffers]
    keys = hex_keys(6)
    with linker(pool) as made:
        assert made.lookup("a", transfer(keys)) == []
        assert stored(made, keys, [1, 2, 3, 4, 5, 6])
        for buffer in buffers:
            buffer.zero_()
        assert made.lookup("b", transfer(keys)) == [6]
        assert made.lookup("c", transfer(keys[:5])) == [5]
        assert loaded(made, "c", keys[:5], [9, 8, 12, 20, 10])
        for buffer, was in zip(buffers, before, strict=True):
            for target, source in zip([9, 8, 12, 20, 10], range(1, 6), strict=True):
                rows = slice(target * PAGE, target * PAGE + PAGE)
                assert torch.equal(buffer[rows], was[source * PAGE : source * PAGE + PAGE])
            assert not buffer[11 * PAGE : 12 * PAGE].any()


def test_of_several_ranks_each_tells_lengths_that_others_may_have_too() -> None:
    keys = hex_keys(130)
    with linker(mha(), FDCACHE_HOST_MEMORY="8MiB", tp_size=2) as made:
        assert stored(made, keys[:10], list(range(1, 11)))
        assert made.lookup("a", transfer(keys[:12])) == list(range(1, 11))
        assert made.lookup("b", transfer(keys)) == [3, 6, 9, 10]
        assert not made.load("a", transfer(keys[:11], list(range(20, 31))))
        assert loaded(made, "b", keys[:9], list(range(20, 29)))


def test_pages_offered_again_after_their_load_are_not_copied() -> None:
    keys = hex_keys(4)
    with linker(mha()) as made:
        assert stored(made, keys, [1, 2, 3, 4])
        copied = made._kv.stats.counters.blocks_backed_up
        made.lookup("a", transfer(keys))
        assert loaded(made, "a", keys, [5, 6, 7, 8])
        assert stored(made, keys, [5, 6, 7, 8])
        assert made._kv.stats.counters.blocks_backed_up == copied == 4


def test_ends_come_in_the_order_of_the_offloads() -> None:
    keys = hex_keys(12)
    with linker(mha()) as made:
        for first in (0, 4, 8):
            assert made.offload(transfer(keys[first : first + 4], list(range(1 + first, 5 + first))))
        until(lambda: made.num_completed_offloads() == 3, "all end")
        assert [made.pop_completed_offload() for _ in range(3)] == [True] * 3
        assert made.lookup("a", transfer(keys)) == [12]


def test_the_schedulers_thread_offers_and_submits_nothing_to_be_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, threads = hex_keys(4), set()
    with linker(mha()) as made:
        for name in ("offer", "submit", "take_reports"):
            call = getattr(made._kv, name)

            def noted(*arguments: Any, call: Any = call) -> Any:
                threads.add(threading.current_thread().name)
                return call(*arguments)

            monkeypatch.setattr(made._kv, name, noted)
        assert stored(made, keys, [1, 2, 3, 4])
        assert threads == {"fdcache-turns"}


def test_a_load_that_is_planned_waits_for_the_scheduler_to_submit_it() -> None:
    """A turn would submit it behind the stream of stores, before the slots are free."""
    keys, pool = hex_keys(4), mha()
    with linker(pool) as made:
        pool.k_buffer[0].fill_(7)
        assert stored(made, keys, [1, 2, 3, 4])
        assert made.lookup("a", transfer(keys)) == [4]
        assert made.load("a", transfer(keys, [9, 10, 11, 12]))
        assert made.offload(transfer(hex_keys(2, "other"), [5, 6]))
        pool.k_buffer[0][9 * PAGE :].zero_()
        for _ in range(3):
            made._turn()
        assert not made._kv._in_flight and not made._offloads.num_completed
        assert not pool.k_buffer[0][9 * PAGE :].any()
        assert made.finish_layer_wise_loading(made.start_layer_wise_loading())
        assert (pool.k_buffer[0][9 * PAGE : 13 * PAGE] == 7).all()
        until(lambda: made.num_completed_offloads() == 1, "the store goes on")


def test_what_fails_in_a_turn_is_raised_in_the_schedulers_thread() -> None:
    with linker(mha()) as made:
        assert made.offload(transfer(["not hexadecimal"], [1]))
        with pytest.raises(HashingError):
            until(lambda: made.num_completed_offloads() == 1, "the offload ends")


def test_an_offload_of_many_pages_is_begun_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloads, "MOST_PAGES", 5)
    keys = hex_keys(12)
    with linker(mha()) as made:
        assert made.offload(transfer(keys[:1], [1]))
        assert made.offload(transfer(keys[1:], list(range(2, 13))))
        made._turn()
        assert made._offloads.num_completed == 0
        queued = made._kv.manager.get_stats()
        assert queued.queued_backups + queued.plans_in_flight and made._kv._in_flight == 1
        until(lambda: made.num_completed_offloads() == 2, "all end")
        assert [made.pop_completed_offload() for _ in range(2)] == [True] * 2
        assert made._kv.stats.counters.blocks_backed_up == 12
        assert made.lookup("a", transfer(keys)) == [12]
        assert made._kv.manager.get_stats().host.unjoined == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("most_pages", "most_bytes", "pieces"),
    [(256, 3, [6, 3, 3]), (5, 1 << 20, [5, 5, 2]), (1, 1 << 20, [1] * 12), (256, 0, [6, 3, 2, 1])],
)
def test_a_piece_of_an_offload_has_few_pages_and_half_of_its_bytes(
    monkeypatch: pytest.MonkeyPatch, most_pages: int, most_bytes: int, pieces: list[int]
) -> None:
    """Of many pages a call takes more of them, so that steps which take long do not leave ever more behind."""
    keys = hex_keys(12)
    with linker(mha()) as made:
        monkeypatch.setattr(offloads, "MOST_PAGES", most_pages)
        monkeypatch.setattr(offloads, "MOST_BYTES", most_bytes * made._kv.layout.payload_bytes)
        offer, taken = made._kv.offer, []
        made._kv.offer = lambda run, *rest: taken.append(len(run)) or offer(run, *rest)  # type: ignore[func-returns-value,method-assign]
        assert made.offload(transfer(keys, list(range(1, 13))))
        made._offloads.take_added()
        assert made._offloads.are_many == (most_pages == 1)
        until(lambda: made.num_completed_offloads() == 1, "it ends")
        assert made.pop_completed_offload()
        assert taken == pieces
        assert not made._offloads._pages_left and not made._offloads._bytes_left
        assert made.lookup("a", transfer(keys)) == [12]


def test_a_load_that_was_not_promised_is_refused_and_one_can_be_withdrawn() -> None:
    keys = hex_keys(4)
    with linker(mha()) as made:
        assert stored(made, keys, [1, 2, 3, 4])
        assert not made.load("a", transfer(keys, [5, 6, 7, 8]))
        made.lookup("a", transfer(keys))
        assert made.load("a", transfer(keys, [5, 6, 7, 8]))
        assert made.cancel_queued_load("a")
        assert not made.cancel_queued_load("a")
        assert made.start_layer_wise_loading() == -1
        assert made._kv.manager.get_stats().live_requests == 0
        assert made._kv.manager._host.in_use == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_gone_is_computed_by_one_rank_and_fails_on_all_of_several(ranks: int) -> None:
    """Every rank has to take the same branch, so that only the end of a load may differ."""
    keys = hex_keys(4)
    with linker(mha(), tp_size=ranks) as made:
        assert stored(made, keys, [1, 2, 3, 4])
        assert made.lookup("a", transfer(keys))[-1] == 4
        made._kv.manager.unmatch([made._asked["a"].request])
        assert made.load("a", transfer(keys, [5, 6, 7, 8])) == (ranks == 2)
        index = made.start_layer_wise_loading()
        assert (index == -1) == (ranks == 1)
        assert made.finish_layer_wise_loading(index) == (ranks == 1)
        assert made._kv.manager.get_stats().live_requests == 0
        assert made._kv.manager._host.in_use == 0
        assert made.lookup("b", transfer(keys))[-1] == 4
        assert loaded(made, "b", keys, [5, 6, 7, 8])


def late_load(made: FdcacheLinker, keys: list[str], stream: CpuStream, patch: pytest.MonkeyPatch) -> int:
    """Begin to load four pages behind a stream; return the index of their batch."""
    assert stored(made, keys, [1, 2, 3, 4])
    patch.setattr(made._slots, "current_stream", lambda: stream)
    assert made.lookup("a", transfer(keys)) == [4]
    assert made.load("a", transfer(keys, [9, 10, 11, 12]))
    return made.start_layer_wise_loading()


def test_a_load_that_is_late_writes_nothing_once_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives its slots to other requests then."""
    keys, gate, stream = hex_keys(4), CpuEvent(), CpuStream(1)
    stream.wait_event(gate)
    with linker(mha(), FDCACHE_PLAN_TIMEOUT="200ms") as made:
        index = late_load(made, keys, stream, monkeypatch)
        opened = threading.Timer(0.6, gate.set)
        opened.start()
        assert not made.finish_layer_wise_loading(index)
        assert gate.query() and not made._kv._copying
        opened.join()
        assert made.lookup("b", transfer(keys)) == [4]
        assert loaded(made, "b", keys, [9, 10, 11, 12])
    stream.close()


@pytest.mark.parametrize("is_flushed", [False, True])
def test_copies_that_do_not_end_end_the_engine_by_name(
    is_flushed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their pages cannot be given to others; a long wait is told once."""
    monkeypatch.setattr(pool_tier, "_LONG_WAIT", 0.05)
    keys, gate, stream = hex_keys(4), CpuEvent(), CpuStream(1)
    stream.wait_event(gate)
    with linker(mha(), FDCACHE_PLAN_TIMEOUT="200ms") as made:
        index = late_load(made, keys, stream, monkeypatch)
        monkeypatch.setattr(pool_tier, "COPIES_END_WITHIN", 0.5)
        with pytest.raises(DeviceLostError, match="pool kv"):
            made.reset() if is_flushed else made.finish_layer_wise_loading(index)
        assert caplog.text.count("waiting for copies of the pool kv") == 1
        gate.set()
        monkeypatch.undo()
        made.reset()
        assert made.lookup("b", transfer(keys)) == [4]
    stream.close()


def test_a_request_that_gets_other_slots_is_loaded_into_these_alone() -> None:
    keys, pool = hex_keys(2), mha()
    with linker(pool) as made:
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.copy_(torch.rand(buffer.shape))
        first = pool.k_buffer[0][PAGE : 3 * PAGE].clone()
        assert stored(made, keys, [1, 2])
        pool.k_buffer[0].zero_()
        for pages in ([5, 6], [7, 8]):
            made.lookup("a", transfer(keys))
            assert made.load("a", transfer(keys, pages))
        assert made.finish_layer_wise_loading(made.start_layer_wise_loading())
        assert torch.equal(pool.k_buffer[0][7 * PAGE : 9 * PAGE], first)
        assert not pool.k_buffer[0][5 * PAGE : 7 * PAGE].any()
        assert made._kv.manager.get_stats().live_requests == 0


def test_no_pool_is_left_without_memory() -> None:
    assert device_pools.shares_of([100]) == [1]
    assert device_pools.shares_of([300, 100]) == [0.75, 0.25]
    assert device_pools.shares_of([1, 10**9])[0] > 0.1
    assert sum(device_pools.shares_of([1, 2, 10**9])) == pytest.approx(1)


def test_requests_that_ask_and_are_aborted_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = hex_keys(4)
    with linker(mha()) as made:
        assert stored(made, keys, [1, 2, 3, 4])
        monkeypatch.setattr(module, "_FORGET_AFTER", 0.01)
        for number in range(10_000):
            assert made.lookup(str(number), transfer(keys)) == [4]
        assert len(made._asked) < 5000
        made.reset()
        assert made._kv.manager.get_stats().live_requests == 0
        assert made._kv.manager._host.in_use == 0
        assert made.lookup("after", transfer(keys)) == [4]


def test_an_idle_engine_gives_up_what_was_promised_to_requests_that_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle scheduler counts offloads, and calls nothing else."""
    monkeypatch.setattr(module, "_FORGET_AFTER", 0.05)
    keys = hex_keys(4)
    with linker(mha()) as made:
        assert stored(made, keys, [1, 2, 3, 4])
        assert made.lookup("a", transfer(keys)) == [4]
        assert made._kv.manager._host.in_use
        until(
            lambda: made.num_completed_offloads() == 0 and not made._kv.manager._host.in_use,
            "nothing is pinned",
        )
        assert made._kv.manager.get_stats().live_requests == 0
        assert not made.load("a", transfer(keys, [5, 6, 7, 8]))
        assert made.lookup("b", transfer(keys)) == [4]


def test_a_look_up_of_nothing_finds_nothing() -> None:
    with linker(mha()) as made:
        assert made.lookup("a", transfer([])) == []
        assert made._kv.manager.get_stats().live_requests == 0


def test_what_is_promised_stays_pinned_while_the_request_asks() -> None:
    keys, other = hex_keys(4), hex_keys(64, "other")
    with linker(mha(), FDCACHE_PLAN_TIMEOUT=1, FDCACHE_HOST_MEMORY="800KiB") as made:
        assert stored(made, keys, [1, 2, 3, 4])
        deadline = time.monotonic() + 2.5
        turn = 0
        while time.monotonic() < deadline:
            assert made.lookup("a", transfer(keys)) == [4]
            pages = list(range(5, 55))
            stored(made, hex_keys(50, str(turn)), pages)  # more than the tier has room for
            turn += 1
        assert turn > 1
        assert made.lookup("a", transfer(keys)) == [4]
        assert loaded(made, "a", keys, [60, 61, 62, 63])
        assert made.lookup("b", transfer(other)) == []


def planes_of(pool: MHATokenToKVPool) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer]


def fill(pool: MHATokenToKVPool) -> list[torch.Tensor]:
    """Fill all pages with bytes of their own; return a copy of them."""
    for plane in planes_of(pool):
        plane.copy_(torch.rand(plane.shape))
    return [plane.clone() for plane in planes_of(pool)]


def are_copies(pool: MHATokenToKVPool, before: list[torch.Tensor], of: list[int], pages: list[int]) -> bool:
    """Return True if pages have the bytes that others had before."""
    return all(
        torch.equal(plane[page * PAGE : (page + 1) * PAGE], old[source * PAGE : (source + 1) * PAGE])
        for plane, old in zip(planes_of(pool), before, strict=True)
        for source, page in zip(of, pages, strict=True)
    )


def test_a_service_that_is_killed_before_a_load_begins_or_lands_gives_no_wrong_bytes(tmp_path: Path) -> None:
    """Another one takes its memory over, at once."""
    keys, pool, stored_in = hex_keys(6), mha(), [1, 2, 3, 4, 5, 6]
    before, numbers = fill(pool), count()
    with service_process(tmp_path / "service", FDCACHE_HOST_MEMORY="16MiB") as service:

        def killed() -> None:
            service.kill()
            service.start()

        def found(made: FdcacheLinker) -> str:
            def is_there() -> bool:
                made.num_completed_offloads()
                return made.lookup(f"asks {next(numbers)}", transfer(keys)) == [6]

            until(is_there, "the pages are found")
            return f"asks {next(numbers) - 1}"

        with linker(pool, FDCACHE_HOST_MEMORY=0, FDCACHE_SERVER=service.address) as made:
            assert stored(made, keys, stored_in)
            for state in ("found", "planned", "begun", "undisturbed"):
                pages = [each + 10 for each in stored_in]
                for plane in planes_of(pool):
                    plane[10 * PAGE :].zero_()
                rid = found(made)
                next(numbers)
                if state == "found":
                    killed()
                is_planned = made.load(rid, transfer(keys, pages))
                if state == "planned":
                    killed()
                index = made.start_layer_wise_loading()
                if state == "begun":
                    killed()
                is_loaded = made.finish_layer_wise_loading(index) and is_planned
                assert not is_loaded or are_copies(pool, before, stored_in, pages), state
                assert is_loaded or state != "undisturbed"


def test_requests_that_come_and_go_at_random_get_the_bytes_that_were_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are stored, loaded, withdrawn, forgotten and flushed beside each other, in a tier that evicts."""
    monkeypatch.setattr(module, "_FORGET_AFTER", 0.02)
    chosen, pool, kept, num_loaded = random.Random(3), mha(), {}, 0
    with linker(pool, FDCACHE_HOST_MEMORY="800KiB") as made:
        for number in range(250):
            before = fill(pool)
            keys = hex_keys(chosen.randint(1, 8), str(number))
            pages = chosen.sample(range(1, 40), len(keys))
            made.offload(transfer(keys, pages))
            kept[number] = keys, pages, before
            if chosen.random() < 0.7:
                until(lambda: made.num_completed_offloads() == 1, "it is stored")
                made.pop_completed_offload()
            else:
                made.reset()
            slots, begun = list(range(40, 64)), []
            for keys, pages, before in chosen.sample(list(kept.values())[-20:], min(len(kept), 3)):
                rid = f"{number} {len(slots)}"
                found = (made.lookup(rid, transfer(keys)) or [0])[0]
                if chosen.random() < 0.1:
                    time.sleep(0.03)
                    made.num_completed_offloads()  # it is forgotten
                into = [slots.pop() for _ in range(found)]
                if not found or not made.load(rid, transfer(keys[:found], into)):
                    continue
                if chosen.random() < 0.2:
                    assert made.cancel_queued_load(rid)
                else:
                    begun.append((before, pages[:found], into))
            index = made.start_layer_wise_loading()
            if chosen.random() < 0.1:
                made.reset()
                continue
            assert made.finish_layer_wise_loading(index)
            for before, pages, into in begun:
                num_loaded += len(into)
                assert are_copies(pool, before, pages, into)
        made.reset()
        assert num_loaded > 100
        assert made._kv.manager._host.in_use == 0
        assert made._kv.manager.get_stats().live_requests == 0


def test_a_reset_ends_what_is_in_flight_and_forgets_nothing_that_is_stored() -> None:
    keys = hex_keys(8)
    with linker(mha()) as made:
        assert stored(made, keys[:4], [1, 2, 3, 4])
        assert made.offload(transfer(keys[4:], [5, 6, 7, 8]))
        made.lookup("a", transfer(keys))
        made.load("a", transfer(keys[:4], [9, 10, 11, 12]))
        made.reset()
        assert made.num_completed_offloads() == 0
        assert made.start_layer_wise_loading() == -1
        assert made.lookup("b", transfer(keys[:4])) == [4]


def test_pages_of_weights_that_are_replaced_are_neither_found_nor_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first write of other weights to the flush nothing is; then only what comes under the new ones."""
    monkeypatch.setattr(runtime_context, "get_serving", lambda: SimpleNamespace(weight_version="second"))
    monkeypatch.setattr(weights, "_weights", weights._Weights())
    keys = hex_keys(4)
    with linker(mha()) as made:
        assert stored(made, keys, [1, 2, 3, 4])
        assert made.lookup("a", transfer(keys)) == [4]
        with pytest.raises(AttributeError):  # SGLang's own method runs, and fails: it has nothing to write to
            WeightUpdater.update_weights_from_tensor(None, [])
        assert made.lookup("b", transfer(keys)) == []
        assert not made.load("a", transfer(keys, [5, 6, 7, 8]))
        assert not stored(made, keys, [1, 2, 3, 4])
        made.reset()
        assert made.lookup("c", transfer(keys)) == []
        first = made._kv.manager.layout.revision
        assert stored(made, keys, [1, 2, 3, 4])
        assert made.lookup("d", transfer(keys)) == [4]
        assert loaded(made, "d", keys, [5, 6, 7, 8])
    with linker(mha()) as other:  # made after the update, and told of the same weights
        assert not stored(other, keys, [1, 2, 3, 4])
        other.reset()
        assert other._kv.manager.layout.revision == first
        with pytest.raises(AttributeError):
            WeightUpdater.update_weights_from_ipc(None, None)
        other.reset()
        assert other._kv.manager.layout.revision != first, "a name that comes again tells nothing"


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_config, "version", lambda name: "0.5.21")
    with (
        pytest.raises(ConfigurationError, match=r"FdcacheLinker: SGLang 0\.5\.21; served are 0\.5\.23"),
        linker(mha()),
    ):
        pass


def test_a_method_that_is_gone_or_new_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINKER_METHODS", (*sglang_config.LINKER_METHODS, "num_completed_loads"))
    with (
        pytest.raises(ConfigurationError, match="UnifiedCacheLinker has no num_completed_loads"),
        linker(mha()),
    ):
        pass
    monkeypatch.setattr(module, "LINKER_METHODS", sglang_config.LINKER_METHODS[1:-1])
    with pytest.raises(ConfigurationError, match="UnifiedCacheLinker has also lookup"), linker(mha()):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp_draft_device_pools", "draft"),
        ("sidecar_draft_device_pools", "draft"),
        ("mtp_draft_mamba_pools", "draft"),
    ],
)
def test_draft_pools_that_nobody_else_checks_are_refused(name: str, message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        FdcacheLinker(arguments(), parameters(mha(), **{name: (mha(),)}), components={ComponentType.FULL})


def test_pools_that_are_not_carried_are_refused_by_name() -> None:
    for pool, components, named in (
        (SimpleNamespace(layer_num=1), {ComponentType.FULL}, "SimpleNamespace named kv"),
        (mha(), {ComponentType.FULL, ComponentType.SWA}, "MHATokenToKVPool with the components FULL, SWA"),
    ):
        with pytest.raises(UnsupportedLayoutError, match=named):
            FdcacheLinker(arguments(), parameters(pool), components=components)
    scaled = mha()
    scaled.k_scale_buffer = scaled.v_scale_buffer = [torch.zeros(1)]
    with (
        pytest.raises(UnsupportedLayoutError, match="MHATokenToKVPool named kv is not carried"),
        linker(scaled),
    ):
        pass


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (
            {"FDCACHE_HOST_MEMROY": "1GiB"},
            "linker_extra_config: FDCACHE_HOST_MEMROY is no setting; did you mean",
        ),
        ({"FDCACHE_VERIFY": "some"}, "FDCACHE_VERIFY"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named), linker(mha(), **extra):
        pass


def test_a_linker_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="FDCACHE_HOST_MEMORY and FDCACHE_SERVER are not set"):
        FdcacheLinker(arguments(), parameters(mha()), components={ComponentType.FULL}, extra_config={})

"""Engines with ranks that hand windows, chunks and states over, in this process or in one elsewhere.

The bytes of a model are cut as vLLM does it: keys and values by head, of a state each part by itself. What lies behind
the parts of a state in its block belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import Device
from fdcache.groups import CacheGroup, Reach, path_end
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.manager import LoadOutcome, OffloadManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.metadata import NO_BLOCK, Int32Array
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.engine_handovers import EngineHandovers
from fdcache.transfer.handovers import PeerTerms
from tests.service_help import until

PAGE, _HEADS, _LAYERS, _STATES, BLOCKS = 16, 4, 3, 2, 100
PARTS = (1024, 256, 256, 2048)
"""Bytes of the parts of a state over all ranks, less than those of a page: x, B and C of a convolution, and heads."""
_PAGE_BYTES = 4096


GROUPS = {
    "states": (*[CacheGroup(PAGE, Reach.STATE)] * _STATES, CacheGroup(PAGE)),
    "chunks": (*[CacheGroup(PAGE, Reach.CHUNK, 4 * PAGE)] * 3, CacheGroup(PAGE)),
    "windows": (CacheGroup(PAGE, Reach.LAST, 40), CacheGroup(PAGE)),
    "all": (
        *[CacheGroup(PAGE, Reach.STATE)] * _STATES,
        CacheGroup(PAGE, Reach.CHUNK, 2 * PAGE),
        CacheGroup(PAGE, Reach.LAST, 24),
        CacheGroup(PAGE),
    ),
}


def layout_of(ranks: int, groups: tuple[CacheGroup, ...]) -> KVLayout:
    whole = KVLayout.build(
        [PlaneSpec(PlaneKind.PAIR, "uint8", (_HEADS, _PAGE_BYTES // _HEADS))],
        model="m",
        revision="1",
        block_size=PAGE,
        num_layers=_LAYERS,
        groups=groups,
    )
    return whole.with_tp_size(ranks)


class Model:
    """The bytes that the ranks of an engine have of a prompt with so many blocks of tokens."""

    def __init__(self, seed: int, blocks: int) -> None:
        chosen = np.random.default_rng(seed)
        self.tokens = chosen.integers(0, 256, (blocks, _LAYERS, _PAGE_BYTES), np.uint8)
        self.states = [chosen.integers(0, 256, (_STATES, _LAYERS, size), np.uint8) for size in PARTS]

    def tokens_of(self, block: int, layer: int, rank: int, ranks: int) -> np.ndarray:
        """Return the heads of a rank."""
        found: np.ndarray = self.tokens[block, layer].reshape(ranks, -1)[rank]
        return found

    def state_of(self, number: int, layer: int, rank: int, ranks: int) -> np.ndarray:
        """Return the parts of a rank, one after the other."""
        return np.concatenate([part[number, layer].reshape(ranks, -1)[rank] for part in self.states])


class Engine:
    """An engine with ranks, above an ``OffloadManager``."""

    def __init__(
        self,
        role: str,
        folder: Path,
        connector: str,
        ranks: int,
        peers: int,
        kind: str = "states",
        device: Device | None = None,
        stream: Any = None,
    ) -> None:
        settings = PeerSettings(
            role=role,
            connector=connector,
            directory=folder,
            address=f"ipc://{folder}/{role}",
            peer_ranks=peers,
            timeout=60.0,
            lease=60.0,
        )
        self.layout = layout = layout_of(ranks, GROUPS[kind])
        cache = CacheSettings(host_memory=32 * layout.record_bytes, write_policy="write_through")
        self.manager = OffloadManager(cache, layout)
        self.handovers = EngineHandovers(self.manager, PeerTerms(settings, 60.0), BLOCKS)
        self.stream = stream
        self.ranks = [
            CacheController(CopySettings(group_layers=1), layout, rank=rank, device=device)
            for rank in range(ranks)
        ]
        self.planes, self.addresses = [], []
        for each in self.ranks:
            tensors = each.initialize_kv_cache(BLOCKS, shared=None if device else folder)
            self.planes.append([plane.reshape(BLOCKS, -1).view(np.uint8) for plane in tensors])
            each.initialize_host_cache(self.manager.host_cache)
            parts = tuple(size // ranks for size in PARTS)
            self.addresses.append(each.open_transfer(settings, state_parts=parts) or "")
        self.outcomes: list[LoadOutcome] = []
        self.results: list[str] = []

    def close(self) -> None:
        """Release everything."""
        for each in self.ranks:
            each.shutdown()
        self.manager.close()

    def step(self) -> None:
        """Submit what is planned and apply what was reported."""
        for plan in self.manager.take_plans():
            for each in self.ranks:
                each.submit_swap_tasks(plan, self.stream).wait_all()
        for each in self.ranks:
            reports = each.poll()
            self.results += [report.handover.result for report in reports if report.handover is not None]
            self.outcomes += self.manager.apply(reports)

    def write(self, plane: Any, slot: int, data: np.ndarray) -> None:
        """Write the first bytes of a block."""
        plane[slot] = 99
        plane[slot, : len(data)] = data

    def read(self, plane: Any, slot: int) -> np.ndarray:
        """Return the bytes of a block."""
        found: np.ndarray = plane[slot]
        return found

    def places(self, table: Int32Array, model: Model) -> Iterator[tuple[Any, int, np.ndarray]]:
        """Yield a plane of each rank, a block, and the bytes that the model has: those that belong to nobody aside."""
        states, ranks = self.layout.num_states, len(self.ranks)
        blocks = len(table) - states
        for rank, planes in enumerate(self.planes):
            for layer, plane in enumerate(planes):
                for block in np.flatnonzero(table[:blocks] != NO_BLOCK):
                    yield plane, table[block], model.tokens_of(int(block), layer, rank, ranks)
                for number in range(states):
                    yield plane, table[blocks + number], model.state_of(number, layer, rank, ranks)

    def compute(self, table: Int32Array, model: Model) -> None:
        """Write the blocks of a prompt."""
        for place in self.places(table, model):
            self.write(*place)

    def is_right(self, table: Int32Array, model: Model) -> bool:
        """Return True if every byte is the model's."""
        return all(
            np.array_equal(self.read(plane, slot)[: len(wanted)], wanted)
            for plane, slot, wanted in self.places(table, model)
        )


def step_until(condition: Callable[[], object], engines: Sequence[Engine]) -> None:
    def stepped() -> bool:
        for each in engines:
            each.step()
        return bool(condition())

    until(stepped, "engines with ranks")


class Prompt:
    """A prompt by its seed: its tokens and its bytes. The last token is decode's to compute."""

    def __init__(self, layout: KVLayout, seed: int, num_tokens: int) -> None:
        self.seed, self.num_tokens = seed, num_tokens
        self.tokens = np.random.default_rng(seed).integers(3, 500, num_tokens + 1).astype(np.int32)
        pages = -(-num_tokens // PAGE)
        self.needed = path_end(layout.groups, np.zeros((pages, 32), np.uint8), num_tokens).needed
        self.model = Model(seed, len(self.needed) - layout.num_states)

    def table(self, side: int) -> Int32Array:
        """Return blocks for it: the first of all in an order of chance, or with ``side`` -1 the last."""
        table = np.random.default_rng(self.seed).permutation(BLOCKS).astype(np.int32)
        found, count = np.full(len(self.needed), NO_BLOCK, np.int32), int(self.needed.sum())
        found[self.needed] = table[:count] if side > 0 else table[-count:]
        return found


def send(engine: Engine, seed: int, num_tokens: int) -> None:
    """Compute all tokens of a prompt but the last, and hand them over."""
    prompt = Prompt(engine.layout, seed, num_tokens)
    request, sent = Request(f"p-{seed}", prompt.tokens[:-1]), prompt.table(1)
    engine.compute(sent, prompt.model)
    engine.manager.prepare([request])
    assert engine.handovers.send(request, f"of-{seed}", num_tokens, sent) == int(prompt.needed.sum())
    engine.manager.finish([request])


def fetch(
    engine: Engine, seed: int, num_tokens: int, addresses: Sequence[str], *others: Engine
) -> tuple[Int32Array, Model]:
    """Fetch a prompt; return its blocks, and what their bytes should be."""
    prompt = Prompt(engine.layout, seed, num_tokens)
    request, into = Request(f"d-{seed}", prompt.tokens), prompt.table(-1)
    engine.handovers.fetch(request, PeerSource(f"of-{seed}", tuple(addresses)))
    assert engine.manager.match(request, 0).num_tokens == num_tokens
    engine.manager.load(request, into)
    before = len(engine.outcomes)
    step_until(lambda: len(engine.outcomes) > before, (engine, *others))
    engine.manager.finish([request])
    return into, prompt.model

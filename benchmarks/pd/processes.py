"""Measure hand-overs from a prefill to a decode process: speed beside plain copies, and what they add to a first token.

All of a run move the same bytes, in turns. ``copy`` is one copy of as many bytes within a process, ``nixl`` one READ of
NIXL between the processes (with rdma), ``nixl, pieces`` one of pieces at scattered places, as large as the planes.
``reads`` of a hand-over are from the begin of the first to the end of the last: beside the sums of both processes, or
``unverified``, without them. A hand-over of blocks that are computed already is as fast as it gets; one of blocks that
are computed layer by layer shows what a decode instance adds to the time to first token of a mixed one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Report
from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.metadata import Int32Array
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import ReadEnd, ReadOrder
from fdcache.transfer.handovers import Handovers, PeerTerms
from fdcache.transfer.nixl import find_nixl

MIB = 1 << 20
CHUNK = 64 << 10


def layout_of(layers: int, plane_kib: int) -> KVLayout:
    """Return a layout with planes of this size."""
    return KVLayout.uniform(
        model="bench",
        revision="1",
        num_layers=layers,
        block_size=plane_kib // 2,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )


@dataclass(frozen=True)
class Case:
    """A kind of hand-over, of prompts of so many blocks."""

    connector: str
    layout: KVLayout
    blocks: int
    scattered: bool = False
    verify: bool = True


class Instance:
    """One instance with one rank."""

    def __init__(self, role: str, case: Case, folder: Path) -> None:
        connector, layout = case.connector, case.layout
        peers = PeerSettings(
            role=role, connector=connector, address=f"ipc://{folder}/{role}-{connector}-{case.verify}"
        )
        cache = CacheSettings(device_blocks=2 * case.blocks + 16)
        self.manager = CacheManager(cache, layout)
        self.handovers = Handovers(self.manager, PeerTerms(peers))
        self.controller = CacheController(CopySettings(first_group_layers=1, group_layers=4), layout)
        shared = peers.directory if connector == "ipc" else None
        for plane in self.controller.initialize_kv_cache(cache.device_blocks, shared=shared):
            plane.reshape(-1).view(np.uint8)[:] = 7
        self.controller.initialize_host_cache(self.manager.host_cache)
        self._num_blocks, self._block_size = cache.device_blocks, layout.block_size
        self._scattered = case.scattered
        self.address = self.controller.open_transfer(peers, verifies=case.verify) or ""

    def scatter(self, seed: int) -> None:
        """Let the next blocks that are allocated be scattered, if they are to be."""
        if not self._scattered:
            return
        random = np.random.default_rng(seed)
        requests = [
            Request(f"scatter-{i}", random.integers(0, 50_000, self._block_size).astype(np.int32))
            for i in range(self._num_blocks)
        ]
        self.manager.match_prefix(requests)
        self.manager.allocate_device_blocks([(each, self._block_size) for each in requests])
        for index in random.permutation(len(requests)):
            self.manager.finish([requests[index]])

    def submit(self) -> None:
        """Submit what is planned."""
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan)

    def close(self) -> None:
        """Release everything."""
        self.controller.shutdown()
        self.manager.close()


def serve(pipe: Connection, case: Case, folder: Path) -> None:
    """Be the prefill process: compute what is asked for, and answer with the time of the last layer."""
    instance, layout = Instance("prefill", case, folder), case.layout
    raw = _Raw(case.blocks * layout.payload_bytes) if case.connector == "rdma" else None
    pipe.send((instance.address, raw.description if raw else None))
    instance.scatter(0)
    while (work := _receive(pipe, raw)) is not None:
        name, tokens, layer_seconds = work
        request = Request(name, tokens)
        instance.manager.match_prefix([request])
        assert instance.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        instance.handovers.send([(request, name)])
        instance.submit()
        start = time.monotonic()
        for layer in range(layout.total_layers):
            while time.monotonic() < start + (layer + 1) * layer_seconds:
                time.sleep(0.0002)
            instance.controller.layer_computed(layer, {name: len(request.block_hashes)})
        pipe.send(time.monotonic())
        instance.manager.finish([request])
        while instance.manager.get_stats().plans_in_flight:
            instance.manager.apply(instance.controller.poll())
            time.sleep(0.0005)
        instance.manager.reset_cache()
        instance.scatter(len(name))
        pipe.send("ready")
    instance.close()
    if raw is not None:
        raw.close()


def _receive(pipe: Connection, raw: _Raw | None) -> Any:
    """Return what comes next, and let NIXL serve its readers until then."""
    while not pipe.poll(0.001):
        if raw is not None:
            raw.agent.get_new_notifs()
    return pipe.recv()


class _Raw:
    """Memory that NIXL reads as it is."""

    def __init__(self, nbytes: int) -> None:
        nixl = find_nixl()
        self.chunks = -(-nbytes // CHUNK)
        self.bytes = np.full(self.chunks * CHUNK, 7, np.uint8)
        self.agent = nixl.nixl_agent(
            f"raw-{time.monotonic_ns()}", nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self._registered = self.agent.register_memory(
            [(self.bytes.ctypes.data, self.bytes.nbytes, 0, "")], "DRAM"
        )
        self.description = (self.agent.get_agent_metadata(), self.bytes.ctypes.data)

        self._rows: list[Any] = []

    def close(self) -> None:
        """Release what was prepared, then the memory."""
        for row in self._rows:
            row.release()
        self.agent.deregister_memory(self._registered)
        self._rows.clear()
        del self.agent

    def _row(self, name: str, address: int, piece: int) -> Any:
        row = np.array([[address, piece, 0, piece, self.bytes.nbytes // piece]], np.uint64)
        self._rows.append(self.agent.prep_xfer_dlist(name, row, "DRAM"))
        return self._rows[-1]

    def readers(self, metadata: bytes, address: int, piece: int | None) -> dict[str, Callable[[], None]]:
        """Return what reads a peer's memory: as it lies, and pieces of this size from and to scattered places."""
        name, random = self.agent.add_remote_agent(metadata), np.random.default_rng(1)
        as_it_lies = np.arange(self.chunks, dtype=np.int32)
        readers = {"nixl": self._reader(name, address, CHUNK, as_it_lies, as_it_lies)}
        if piece is not None:
            mine, theirs = (random.permutation(self.bytes.nbytes // piece).astype(np.int32) for _ in range(2))
            readers["nixl, pieces"] = self._reader(name, address, piece, mine, theirs)
        return readers

    def _reader(
        self, name: str, address: int, piece: int, mine: Int32Array, theirs: Int32Array
    ) -> Callable[[], None]:
        own = self._row("NIXL_INIT_AGENT", self.bytes.ctypes.data, piece)
        other = self._row(name, address, piece)

        def read() -> None:
            handle = self.agent.make_prepped_xfer("READ", own, mine, other, theirs)
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            assert state == "DONE", state
            handle.release()

        return read


@dataclass
class Recorder:
    """A connector that notes when its reads begin and end."""

    connector: Any
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connector, name)

    def read(self, order: ReadOrder) -> None:
        """Begin a read."""
        self.begun.append(time.monotonic())
        self.connector.read(order)

    def poll(self) -> list[ReadEnd]:
        """Return the reads that have ended."""
        ended: list[ReadEnd] = self.connector.poll()
        self.ended += [time.monotonic()] * len(ended)
        return ended


@dataclass(frozen=True)
class HandOver:
    """Seconds of one hand-over. ``added``: from the last layer of prefill to the blocks at decode, checked."""

    total: float
    wait: float
    first: float
    rest: float
    check: float
    added: float
    ahead: float
    """From the first group at decode to the last layer of prefill."""


class Pair:
    """A prefill process, and a decode instance in this one."""

    def __init__(self, case: Case, folder: Path) -> None:
        layout, blocks = case.layout, case.blocks
        self._layout, self._blocks = layout, blocks
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, case, folder), daemon=True)
        self._process.start()
        self._decode = Instance("decode", case, folder)
        self._address, raw = self._pipe.recv()
        self._raw = _Raw(blocks * layout.payload_bytes) if raw else None
        self.nixl: dict[str, Callable[[], None]] = {}
        """What NIXL does alone, by name."""
        if self._raw is not None:
            metadata, start = raw
            piece = layout.planes[0].nbytes if case.scattered else None
            self.nixl = self._raw.readers(metadata, start, piece)
        transfer = self._decode.controller._parts.transfer
        assert transfer is not None
        endpoint = transfer.endpoint
        self._recorder = endpoint._connector = Recorder(endpoint._connector)
        self._count = 0

    def hand_over(self, layer_seconds: float) -> HandOver:
        """Compute a prompt and hand it over."""
        self._count += 1
        decode, name = self._decode, f"bench-{self._count}"
        random = np.random.default_rng(self._count)
        decode.scatter(self._count)
        tokens = random.integers(0, 50_000, self._blocks * self._layout.block_size + 1).astype(np.int32)
        self._recorder.begun.clear()
        self._recorder.ended.clear()
        request = Request(name, tokens)
        decode.manager.match_prefix([request])
        assert decode.handovers.fetch([(request, PeerSource(name, (self._address,)))])[0] == self._blocks
        assert decode.manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        start = time.monotonic()
        self._pipe.send((name, tokens, layer_seconds))
        decode.submit()
        while not (outcomes := decode.manager.apply(decode.controller.poll())):
            time.sleep(0.0002)
        end = time.monotonic()
        assert outcomes[0].recompute_from == self._blocks * self._layout.block_size, outcomes
        computed = self._pipe.recv()
        assert self._pipe.recv() == "ready"
        decode.manager.finish([request])
        decode.manager.reset_cache()
        begun, ended = self._recorder.begun[0], self._recorder.ended
        return HandOver(
            total=end - start,
            wait=begun - start,
            first=ended[0] - begun,
            rest=ended[-1] - ended[0],
            check=end - ended[-1],
            added=end - computed,
            ahead=computed - ended[0],
        )

    def close(self) -> None:
        """End both."""
        self._pipe.send(None)
        self.nixl.clear()
        if self._raw is not None:
            self._raw.close()
        self._process.join()
        self._decode.close()


@contextmanager
def pair(case: Case) -> Iterator[Pair]:
    """Yield a pair of instances."""
    with tempfile.TemporaryDirectory(prefix="fdcache-bench-") as folder:
        made = Pair(case, Path(folder))
        try:
            yield made
        finally:
            made.close()


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def hand_overs(case: Case, layer_seconds: float, rounds: int) -> tuple[dict[str, float], list[HandOver]]:
    """Return the least seconds of each way to move the bytes, and the hand-overs of layers that are computed."""
    nbytes = case.blocks * case.layout.payload_bytes
    source, target = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
    times: dict[str, list[float]] = defaultdict(list)
    with pair(case) as verified, pair(replace(case, verify=False)) as other:
        for each in (verified, other):
            each.hand_over(0.0)  # connects
        for _ in range(rounds):
            times["copy"].append(timed(lambda: np.copyto(target, source)))
            for name, read in verified.nixl.items():
                times[name].append(timed(read))
            for name, each in (("", verified), (", unverified", other)):
                done = each.hand_over(0.0)
                times["reads" + name].append(done.first + done.rest)
                times["hand-over" + name].append(done.total)
        layered = [verified.hand_over(layer_seconds) for _ in range(rounds)]
    return {name: min(values) for name, values in times.items()}, layered


def report_case(report: Report, case: Case, layer_seconds: float, rounds: int) -> None:
    """Measure one connector."""
    best, layered = hand_overs(case, layer_seconds, rounds)
    nbytes = case.blocks * case.layout.payload_bytes
    title = (
        f"{case.connector}: {nbytes / MIB:.0f} MiB, {case.blocks} blocks, planes of "
        f"{case.layout.planes[0].nbytes >> 10} KiB, {'scattered' if case.scattered else 'adjoining'}"
    )
    bases = [base for base in ("copy", "nixl", "nixl, pieces") if base in best]
    report.table(
        title,
        (
            {"way": name, "GB/s": nbytes / seconds / 1e9}
            | {f"of {base}": best[base] / seconds for base in bases}
            for name, seconds in best.items()
        ),
    )
    parts = {
        name: 1e3 * median(getattr(each, name) for each in layered) for name in HandOver.__dataclass_fields__
    }
    layers = (
        f"{case.connector}, layer by layer, {layer_seconds * 1e3:g} ms a layer, medians of {rounds} in ms"
    )
    names = ("wait", "first", "rest", "check", "added", "total", "ahead")
    report.table(layers, [{name: parts[name] for name in names}])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transfer", default="ipc,rdma")
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plane-kib", type=int, default=64)
    parser.add_argument("--scattered", action="store_true", help="blocks of prompts do not adjoin")


def measure(options: argparse.Namespace, report: Report) -> None:
    layout = layout_of(options.layers, options.plane_kib)
    for connector in options.transfer.split(","):
        blocks = max(options.mebibytes * MIB // layout.payload_bytes, 1)
        case = Case(connector, layout, blocks, options.scattered)
        report_case(report, case, options.layer_ms / 1e3, options.rounds)
    report.note("added: to the time to first token; ahead: from the first group to the last layer of prefill")

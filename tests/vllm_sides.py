"""Both sides of the vLLM connector over pages of a few bytes, with the records and requests of vLLM's wheel."""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from fdcache.groups import CacheGroup, Reach
from fdcache.integrations.vllm.early import EarlyLoads
from fdcache.integrations.vllm.events import EventTranslator
from fdcache.integrations.vllm.metadata import StepMetadata, WorkerReports
from fdcache.integrations.vllm.scheduler import SchedulerSide
from fdcache.integrations.vllm.worker import WorkerSide
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.manager import OffloadManager
from fdcache.settings import Settings
from tests.service_help import until

BLOCK, BLOCKS, PAGE = 4, 32, 64
LAYOUT = KVLayout.build(
    [PlaneSpec(PlaneKind.KEY, "uint8", (PAGE,))], model="m", revision="r", block_size=BLOCK, num_layers=2
)
WINDOWS = replace(LAYOUT, groups=(CacheGroup(BLOCK), CacheGroup(BLOCK, Reach.LAST, 6)))
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


def request(name: str, tokens: list[int] | None = None, **options: Any) -> Request:
    """A request of vLLM's, by default of ten tokens."""
    given = list(range(10)) if tokens is None else tokens
    return Request(name, given, SamplingParams(max_tokens=8), None, block_hasher=HASHER, **options)


def image(name: str, offset: int, length: int) -> list[MultiModalFeatureSpec]:
    """An image of a request."""
    return [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))]


class Engine:
    """The scheduler's and the worker's side, and device pages whose bytes tell which block of which text they are."""

    def __init__(self, layout: KVLayout = LAYOUT, device: str = "cpu", **variables: str) -> None:
        given = {
            "FDCACHE_BLOCK_SIZE": str(BLOCK),
            "FDCACHE_HOST_MEMORY": "1MiB",
            "FDCACHE_WRITE_POLICY": "write_through",
            "FDCACHE_VERIFY": "all",
        }
        settings = Settings.load(environ=given | variables)
        self.events = EventTranslator()
        self.manager = OffloadManager.from_settings(layout, self.events.enable(settings), loads_ahead=True)
        self.side = SchedulerSide(self.manager, self.events, early=EarlyLoads())
        self.worker = WorkerSide(settings, layout, 0)
        page = layout.payload_bytes // layout.total_layers
        self.pages = {
            name: torch.zeros(BLOCKS, page, dtype=torch.uint8, device=device) for name in ("0", "1")
        }
        self.worker.register(list(self.pages.values()))
        self.steps: list[StepMetadata] = []

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.close()

    def admit(self, source: Request, blocks: list[int], computed: int = 0) -> SchedulerOutput:
        """The step that computes all of a request whose first ``computed`` tokens are on the device."""
        new = replace(NewRequestData.from_request(source, (blocks,)), num_computed_tokens=computed)
        count = source.num_tokens - computed
        return replace(
            SchedulerOutput.make_empty(),
            scheduled_new_reqs=[new],
            num_scheduled_tokens={source.request_id: count},
            total_num_scheduled_tokens=count,
        )

    def step(self, output: SchedulerOutput | None = None, fill: int = 0) -> set[str]:
        """Execute a step, in which the model writes ``fill`` into the new blocks; return the requests that arrived."""
        made = self.side.step(output or SchedulerOutput.make_empty())
        self.steps.append(made)
        self.worker.submit(pickle.loads(pickle.dumps(made)))  # noqa: S301 - as vLLM does
        for new in output.scheduled_new_reqs if output is not None else ():
            for block in new.block_ids[0][new.num_computed_tokens // BLOCK :]:
                for pages in self.pages.values():
                    pages[block] = fill
        arrived = self.worker.poll()
        self.side.received(arrived)
        self.side.reported(WorkerReports(self.worker.take_reports()).reports)
        return arrived

    def settle(self) -> None:
        """Step until no copy is in flight."""
        until(lambda: not self.side.has_pending_work or self.step(), "the end of all copies")

    def arrived(self) -> set[str]:
        """Step until a load ends; return the requests whose load has."""
        found: set[str] = set()

        def has_ended() -> bool:
            found.update(self.step())
            return bool(found)

        until(has_ended, "the end of the load")
        return found

    def compute(self, source: Request, blocks: list[int], fill: int) -> None:
        """Compute and finish a request."""
        assert self.side.matched(source, 0) == 0
        self.side.allocated(source, (blocks,), 0)
        self.step(self.admit(source, blocks), fill)
        source.num_computed_tokens = source.num_tokens
        self.side.finished(source, (blocks,))
        self.settle()

    def load(self, source: Request, blocks: list[int]) -> int | None:
        """Load what is there of a request; return the number of tokens."""
        found = self.side.matched(source, 0)
        if found:
            self.side.allocated(source, (blocks,), found)
            assert self.arrived() == {source.request_id}
        return found

    def content(self, block: int) -> set[int]:
        """The bytes of a device block."""
        return {
            byte for pages in self.pages.values() for byte in np.unique(pages[block].cpu().numpy()).tolist()
        }


def host_memory(engine: Engine) -> np.ndarray:
    """The bytes of the worker's records."""
    arena = engine.worker._controller.host_arena  # type: ignore[union-attr]
    (extent,) = arena.extents  # type: ignore[union-attr]
    return np.ctypeslib.as_array((ctypes.c_uint8 * extent.nbytes).from_address(extent.address))


def continued(name: str, start: int, count: int, blocks: tuple[list[int], ...]) -> SchedulerOutput:
    """The step that computes the next tokens of a running request, which gets more blocks."""
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_block_ids = [name], [blocks]
    cached.num_computed_tokens, cached.num_output_tokens = [start], [0]
    return replace(
        SchedulerOutput.make_empty(), scheduled_cached_reqs=cached, num_scheduled_tokens={name: count}
    )

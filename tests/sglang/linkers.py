"""A linker that does something wrong on purpose."""

from __future__ import annotations

from typing import Any

from fdcache.integrations.sglang.linker import FdcacheLinker
from fdcache.manager.keyed import KeyedRequest
from fdcache.metadata import Int32Array


class WrongLinker(FdcacheLinker):
    """Loads the bytes of the first page of a run into all of its pages."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._to_spoil: list[Int32Array] = []
        plan = self._kv.plan_load

        def planned(request: KeyedRequest, slots: Int32Array) -> bool:
            self._to_spoil.append(slots)
            return plan(request, slots)

        setattr(self._kv, "plan_load", planned)  # noqa: B010

    def start_layer_wise_loading(self) -> int:
        """Begin the loads, and spoil what they bring."""
        index = super().start_layer_wise_loading()
        for counter, _ in self.layer_done_counter.batches[index].counters if index >= 0 else ():
            counter.wait_all()
        for slots in self._to_spoil:
            for plane in self._kv.pages.planes:
                plane[slots[1:]] = plane[slots[:1]]
        self._to_spoil.clear()
        return index

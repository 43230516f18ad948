"""The layers that a step has computed so far, as vLLM tells them, and how far it can be handed over before its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fdcache.integrations.vllm.pages import memories, pages_of


class StepLayers:
    """Follows the layers of one step after another.

    ``planes``: the plane that each layer writes. ``ends``: planes, in order; one is announced with those before it.
    Layers may be told in any order, and again. Those that vLLM does not tell hold up the planes after theirs.
    """

    def __init__(self, planes: Mapping[str, int], ends: Iterable[int]) -> None:
        self._planes = planes
        self._ends = tuple(ends) if planes else ()
        self._counts = Counter(planes.values())
        self.begin()

    def begin(self) -> None:
        """Take note that a step begins."""
        self._unsaved = self._counts.copy()
        self._saved: set[str] = set()
        self._whole = self._announced = 0

    def saved(self, name: str) -> list[int]:
        """Take note that a layer is computed; return the ends that are reached with it."""
        plane = self._planes.get(name)
        if plane is None or name in self._saved:
            return []
        self._saved.add(name)
        self._unsaved[plane] -= 1
        while self._whole in self._unsaved and not self._unsaved[self._whole]:
            self._whole += 1
        reached = self._announced
        while reached < len(self._ends) and self._ends[reached] < self._whole:
            reached += 1
        ends, self._announced = self._ends[self._announced : reached], reached
        return list(ends)


def layers_of_planes(vllm_config: Any, kv_cache_config: Any) -> dict[str, int]:
    """Return the plane that each layer of a step writes; none if a layer that was computed may be written again.

    It may where the batch is computed in parts, one after the other, and where a model proposes tokens after the step.
    """
    if vllm_config.speculative_config is not None or vllm_config.parallel_config.use_ubatching:
        return {}
    pages = pages_of(kv_cache_config)
    if pages is None:
        shared = enumerate(memories(kv_cache_config))
        return {name: number for number, (layers, _) in shared for name in layers}
    found: dict[str, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            begin = tensor.offset + number * tensor.layer_stride
            found[name] = next(
                at for at, page in enumerate(pages) if page.offset <= begin < page.offset + page.nbytes
            )
    return found

"""Which layers of a load share an event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fdcache.devices.base import BlockCopy, Device, Event, Stream
from fdcache.layout import KVLayout


class LayerGroups:
    """The groups of one layout: a small first one, so that the forward pass can start, and larger later ones."""

    def __init__(self, device: Device, layout: KVLayout, *, first: int, later: int) -> None:
        self._device = device
        starts = [layout.layer_planes(layer)[0].offset for layer in range(layout.total_layers)]
        self._offsets = [*starts, layout.record_bytes]
        planes = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
        self._first_plane = [0, *accumulate(planes)]
        self._groups = layer_groups(layout.total_layers, first, later)
        self._widened: dict[int, list[tuple[int, int]]] = {}

    @property
    def num_layers(self) -> int:
        """Main and draft layers together."""
        return len(self._first_plane) - 1

    def enqueue_whole(self, copy: BlockCopy, stream: Stream) -> None:
        """Put all planes of a batch on a stream at once."""
        copy.enqueue(stream, 0, self._first_plane[-1])

    def enqueue(self, copy: BlockCopy, stream: Stream, num_blocks: int) -> list[Event | None]:
        """Put a batch on a stream group by group; the event of each layer."""
        min_bytes = self._device.min_group_bytes(num_blocks, self._offsets[-1])
        if min_bytes not in self._widened:
            self._widened[min_bytes] = widen_groups(self._groups, self._offsets, min_bytes)
        groups = self._widened[min_bytes]
        ranges = [(self._first_plane[first], self._first_plane[last]) for first, last in groups]
        events: list[Event | None] = []
        for (first, last), event in zip(groups, copy.enqueue_groups(stream, ranges), strict=True):
            events += [event] * (last - first)
        return events


def layer_groups(num_layers: int, first: int, later: int) -> list[tuple[int, int]]:
    """Ranges of layers, the end not included: one of ``first`` layers, the others of ``later``."""
    starts = [0, *range(min(first, num_layers), num_layers, later)]
    return list(zip(starts, [*starts[1:], num_layers], strict=True))


def widen_groups(
    groups: Sequence[tuple[int, int]], offsets: Sequence[int], min_bytes: int
) -> list[tuple[int, int]]:
    """The same groups, later ones joined until each has ``min_bytes`` of the record; the first stays small.

    ``offsets`` has the record offset of each layer, and the end.
    """
    first, *later = groups
    widened: list[tuple[int, int]] = []
    for start, end in later:
        narrow = bool(widened) and offsets[widened[-1][1]] - offsets[widened[-1][0]] < min_bytes
        if narrow:
            widened[-1] = (widened[-1][0], end)
        else:
            widened.append((start, end))
    if len(widened) > 1 and offsets[widened[-1][1]] - offsets[widened[-1][0]] < min_bytes:
        _, end = widened.pop()
        widened[-1] = (widened[-1][0], end)
    return [first, *widened]

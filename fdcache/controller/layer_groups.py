"""Which layers of a load share an event."""

from __future__ import annotations

from collections.abc import Sequence


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

"""HostPages: a host pool of SGLang as planes of whole pages."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import UnsupportedLayoutError
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.metadata import Int32Array

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class HostPages:
    """The pages of a host pool, in its own memory: nothing is copied on the way.

    ``planes``: one array of bytes, shape (pages, bytes), for each piece that SGLang has of a page: keys and values of
    all layers or of each, or one piece for latent attention. The order of bytes in a piece is the pool's layout.

    Raises ``UnsupportedLayoutError`` for a pool whose pages have no such pieces.
    """

    def __init__(self, pool: Any, name: str) -> None:
        self.pool = pool
        self._name = name
        self.page_size = int(pool.page_size)
        self.num_pages = int(pool.page_num)
        if str(pool.layout) not in _LAYOUTS:
            raise self._unsupported(
                f"pages in the layout {pool.layout}",
                f"set --hicache-mem-layout to {' or '.join(_LAYOUTS[1:3])}",
            )
        self._sizes = self._pieces_of(0)[1]
        self.planes = [self._plane(piece) for piece in range(len(self._sizes))]

    @property
    def specs(self) -> list[PlaneSpec]:
        """The planes of one layer of the layout; every layer has the same."""
        sizes = self._sizes[: 1 + self._has_pairs]
        kinds = (PlaneKind.KEY, PlaneKind.VALUE)
        return [PlaneSpec(kind, "uint8", (size,)) for kind, size in zip(kinds, sizes, strict=False)]

    @property
    def num_layers(self) -> int:
        """Layers of the layout: pieces of a page, or pairs of them."""
        return len(self._sizes) // (1 + self._has_pairs)

    def slots_of(self, host_indices: Any) -> Int32Array:
        """Return the pages that SGLang names by the indices of their tokens."""
        first = np.asarray(host_indices)[:: self.page_size]
        return np.ascontiguousarray(first // self.page_size, np.int32)

    @property
    def _has_pairs(self) -> bool:
        """True for keys and values in turn."""
        return len(self._sizes) % 2 == 0

    def _pieces_of(self, page: int) -> tuple[list[int], list[int]]:
        """Return addresses and sizes of the pieces of a page."""
        import torch

        first = page * self.page_size
        addresses, sizes = self.pool.get_page_buffer_meta(torch.arange(first, first + self.page_size))
        return [int(each) for each in addresses], [int(each) for each in sizes]

    def _plane(self, piece: int) -> NDArray[np.uint8]:
        last = self.num_pages - 1
        addresses = [self._pieces_of(page)[0][piece] for page in (0, min(1, last), last)]
        size, stride = self._sizes[piece], addresses[1] - addresses[0] or self._sizes[piece]
        if addresses[2] - addresses[0] != last * stride or stride < size or not self._is_regular():
            raise self._unsupported("pages that do not lie at equal distances", "use another pool")
        memory = memoryview((ctypes.c_uint8 * (last * stride + size)).from_address(addresses[0]))
        return np.lib.stride_tricks.as_strided(
            np.frombuffer(memory, np.uint8), (self.num_pages, size), (stride, 1)
        )

    def _is_regular(self) -> bool:
        """Return True if all layers have pieces of the same sizes."""
        return self._sizes == self._sizes[: 1 + self._has_pairs] * self.num_layers

    def _unsupported(self, wrong: str, right: str) -> UnsupportedLayoutError:
        return UnsupportedLayoutError(f"FdcacheStorage: the host pool {self._name} has {wrong}; {right}")

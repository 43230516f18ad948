"""The keys of records in Mooncake Store, the same on every machine."""

from __future__ import annotations

from fdcache.layout import KVLayout
from fdcache.metadata import HashArray


class ObjectKeys:
    """Keys ``fdcache/1/<fingerprint>/<rank>of<ranks>/<hash>`` of one layout, for one rank if nothing else is said."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank

    def prefix(self, rank: int | None = None) -> str:
        """What all keys of a rank begin with."""
        own = self._rank if rank is None else rank
        return f"fdcache/1/{self._layout.fingerprint.hex()}/{own}of{self._layout.tp_size}/"

    def key(self, block_hash: bytes, rank: int | None = None) -> str:
        """The key of a block's record."""
        return self.prefix(rank) + block_hash.hex()

    def of(self, hashes: HashArray) -> list[str]:
        """The keys of this rank's records."""
        return [self.key(row.tobytes()) for row in hashes]

    def of_all_ranks(self, hashes: HashArray) -> list[str]:
        """The keys of every rank's record, block by block."""
        ranks = range(self._layout.tp_size)
        return [self.key(row.tobytes(), rank) for row in hashes for rank in ranks]

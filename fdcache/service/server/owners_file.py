"""OwnersFile: the tenants of blocks below the root, kept beside the blocks. docs/format-storage.md has the bytes."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from fdcache.hashing import TENANT_BYTES

log = logging.getLogger("fdcache.service.server")

HASH_BYTES = 32
ROW = HASH_BYTES + TENANT_BYTES
_SLACK = 4096  # obsolete rows before the file is rewritten


class OwnersFile:
    """Rows of the hash of a block and the key of its tenant, added at the end; the last one of a block counts.

    ``owners`` has the rows that are to stay when the file is written anew. What cannot be written is logged: after a
    restart these blocks belong to no tenant.
    """

    def __init__(self, path: Path, owners: Mapping[bytes, bytes]) -> None:
        self.path = path
        self._owners = owners
        self._file = -1
        self._rows = 0

    def add(self, owners: Mapping[bytes, bytes]) -> None:
        """Add rows, which ``owners`` has already."""
        if not owners:
            return
        data = _packed(owners)
        try:
            if self._file < 0 or self._rows + len(owners) > 2 * len(self._owners) + _SLACK:
                self.rewrite()
                return
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("%s: the owners of %d blocks are not kept: %s", self.path, len(owners), error)
            self.close()  # the next rows write it as a whole
        else:
            self._rows += len(owners)

    def keep(self) -> None:
        """Write the file again if others removed it. Raises ``OSError``."""
        if self._file >= 0 and not self.path.exists():
            self.rewrite()

    def rewrite(self) -> None:
        """Write the file as a whole. Raises ``OSError``."""
        self.close()
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_bytes(_packed(self._owners))
        fresh.rename(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._rows = len(self._owners)

    def load(self) -> dict[bytes, bytes]:
        """Return the rows, as the earlier service wrote them."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return {}
        rows = (data[at : at + ROW] for at in range(0, len(data) - ROW + 1, ROW))
        return {row[:HASH_BYTES]: row[HASH_BYTES:] for row in rows}

    def close(self) -> None:
        """Close the file, which stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """Remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)


def _packed(owners: Mapping[bytes, bytes]) -> bytes:
    return b"".join(block + key for block, key in owners.items())

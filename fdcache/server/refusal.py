"""A request that is not carried out."""

from __future__ import annotations

from fdcache.errors import FdcacheError


class RefusalError(FdcacheError):
    """A request that is not carried out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

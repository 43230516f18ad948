"""The native core: block hashing, tiers, block copies."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# --- hashing ---------------------------------------------------------------------------------------

_Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | array[int]

def sha_backends() -> list[str]: ...
def sha256(message: bytes, backend: str | None = None) -> bytes: ...
def root_hash(fingerprint: bytes, tenant: bytes | None) -> bytes: ...
def hash_blocks(
    tokens: _Tokens,
    block_size: int,
    parent: bytes,
    start: int,
    extra_keys: ExtraKeys,
    backend: str | None = None,
) -> NDArray[np.uint8]: ...

class ExtraKeys:
    def __init__(self, adapter_id: bytes | None, items: list[tuple[int, int, bytes, bool]]) -> None: ...
    def block_items(self, start: int, end: int, index: int) -> tuple[int, list[int]]: ...

class TokenBlocks:
    def __init__(self, block_size: int, root: bytes, extra_keys: ExtraKeys) -> None: ...
    def append(self, tokens: int | _Tokens) -> None: ...
    def __len__(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def hashes(self) -> NDArray[np.uint8]: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...

# --- tier ------------------------------------------------------------------------------------------

# --- copy ------------------------------------------------------------------------------------------

# --- pattern ---------------------------------------------------------------------------------------

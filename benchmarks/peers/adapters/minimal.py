"""The minimal list of ``minimal.cpp`` behind ctypes: the least that the same calls can cost from Python."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.adapters.base import Adapter, OutOfBlocksError, Pool, Tokens

_POINTER, _SIZE, _BOOL = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
_FUNCTIONS = {
    "pool_open": (_POINTER, [_SIZE, _SIZE]),
    "pool_close": (None, [_POINTER]),
    "pool_free_blocks": (_SIZE, [_POINTER]),
    "request_open": (_POINTER, [_POINTER, _SIZE]),
    "request_hash": (None, [_POINTER, _POINTER]),
    "request_match": (_SIZE, [_POINTER, _POINTER]),
    "request_allocate": (_BOOL, [_POINTER, _POINTER, _POINTER]),
    "request_commit": (None, [_POINTER, _POINTER]),
    "request_decode": (_BOOL, [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER]),
    "step_decode": (_BOOL, [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER]),
    "request_close": (None, [_POINTER, _POINTER]),
}


def load(path: Path) -> ctypes.CDLL:
    """Return the library with its functions declared."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class MinimalRequest:
    """A native request, its prompt, which the native one refers to, and the array that receives its block table."""

    __slots__ = ("handle", "prompt", "table", "table_address")

    def __init__(self, handle: int, prompt: Tokens, most_blocks: int) -> None:
        self.handle = handle
        self.prompt = prompt
        self.table = np.empty(most_blocks, np.int32)
        self.table_address = self.table.ctypes.data


class MinimalOutput:
    """Generated tokens and their address."""

    __slots__ = ("address", "count", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.address = tokens.ctypes.data
        self.count = len(tokens)


class MinimalAdapter(Adapter):
    """Takes tokens as int32 arrays. A decode step is one call for all requests, whose handles stay in one array."""

    def __init__(self, pool: Pool, library: Path) -> None:
        self._library = load(library)
        self._pool = self._library.pool_open(pool.block_size, pool.blocks)
        weakref.finalize(self, self._library.pool_close, self._pool)
        self._most_blocks = pool.max_tokens // pool.block_size + 2
        self._batch: Sequence[MinimalRequest] = ()
        self._handles = np.zeros(0, np.uintp)
        self._tokens = self._blocks = np.zeros(0, np.int32)

    def make_request(self, number: int, prompt: Tokens) -> MinimalRequest:
        handle = self._library.request_open(prompt.ctypes.data, len(prompt))
        return MinimalRequest(handle, prompt, self._most_blocks)

    def make_output(self, tokens: Tokens) -> MinimalOutput:
        return MinimalOutput(tokens)

    def hash(self, request: MinimalRequest) -> None:
        self._library.request_hash(self._pool, request.handle)

    def match(self, request: MinimalRequest) -> int:
        return int(self._library.request_match(self._pool, request.handle))

    def allocate(self, request: MinimalRequest) -> None:
        if not self._library.request_allocate(self._pool, request.handle, request.table_address):
            raise OutOfBlocksError

    def commit(self, request: MinimalRequest) -> None:
        self._library.request_commit(self._pool, request.handle)

    def decode(self, request: MinimalRequest, output: MinimalOutput) -> None:
        if not self._library.request_decode(
            self._pool, request.handle, output.address, output.count, request.table_address
        ):
            raise OutOfBlocksError

    def decode_step(self, requests: Sequence[MinimalRequest], step: list[list[int]]) -> None:
        if self._batch is not requests:
            self._batch = requests
            self._handles = np.array([request.handle for request in requests], np.uintp)
            self._tokens, self._blocks = np.empty((2, len(requests)), np.int32)
        self._tokens[:] = [token for (token,) in step]
        if not self._library.step_decode(
            self._pool,
            self._handles.ctypes.data,
            self._tokens.ctypes.data,
            len(requests),
            self._blocks.ctypes.data,
        ):
            raise OutOfBlocksError

    def free(self, request: MinimalRequest) -> None:
        self._library.request_close(self._pool, request.handle)

    def free_blocks(self) -> int:
        """Return the number of blocks that no request uses."""
        return int(self._library.pool_free_blocks(self._pool))


def make(pool: Pool, library: str) -> MinimalAdapter:
    """Return an adapter of the library at a path."""
    return MinimalAdapter(pool, Path(library))

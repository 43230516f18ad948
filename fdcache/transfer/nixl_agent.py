"""One agent of NIXL: its registered memory, the agents of peers, reads, and notifications.

NIXL has no common base of its errors, so every call catches all of them, and returns a reason or raises
``TransferError``. All calls of an agent come from one thread.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fdcache.errors import TransferError, TransferNotFoundError
from fdcache.transfer.memory_pieces import Numbers

logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


def find_nixl() -> Any:
    """Import and return the installed NIXL package. Raises ``TransferNotFoundError`` if there is none."""
    for name in _PACKAGES:
        try:
            package = importlib.import_module(name)
        except ImportError as error:
            if error.name not in _PACKAGES:
                raise TransferNotFoundError(
                    f"FDCACHE_TRANSFER=rdma: the package {name} cannot be loaded: {error}"
                ) from error
            continue
        theirs = logging.getLogger("nixl")  # it has a handler that prints to the standard output
        theirs.handlers.clear()
        theirs.propagate = True
        return package
    raise TransferNotFoundError(
        "FDCACHE_TRANSFER=rdma: NIXL is not installed; pip install 'fdcache[nixl]', or use FDCACHE_TRANSFER=ipc on one "
        "node"
    )


class NixlRead:
    """A read in flight. Until ``has_ended`` its bytes may arrive; it cannot be taken back."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state
        self.error: str | None = None
        """Why it has failed."""

    def has_ended(self) -> bool:
        """Return True once nothing arrives any more."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # noqa: BLE001 - raised for the error that has ended a transfer
                self._state, self.error = "ERR", _words(error)
        if self._state not in ("PROC", "DONE"):
            self.error = self.error or "NIXL: the read has failed"
        return self._state != "PROC"

    def release(self) -> str | None:
        """Release a read that has ended; return why that is not possible."""
        try:
            self._handle.release()
        except Exception as error:  # noqa: BLE001
            return _words(error)
        return None


class NixlAgent:
    """An agent with UCX alone, and ``memory`` of addresses and bytes, registered.

    ``kind``: DRAM, or VRAM of the GPU with the number ``device``. Raises ``TransferNotFoundError`` without NIXL,
    ``TransferError`` if the agent cannot be made.
    """

    def __init__(
        self, name: str, memory: Sequence[tuple[int, int]], kind: str = "DRAM", device: int = 0
    ) -> None:
        nixl = find_nixl()
        self._kind, self._device = kind, device
        try:
            # A progress thread of NIXL takes a core for ever; calls of `notifications` make progress instead.
            options = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl.nixl_agent(name, options)
            described = [(address, nbytes, device, "") for address, nbytes in memory]
            self._registered = self._agent.register_memory(described, kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(
                f"FDCACHE_TRANSFER=rdma: the NIXL agent cannot be made: {_words(error)}; if UCX_TLS is set, it has to "
                "allow tcp"
            ) from error
        self._names: dict[bytes, str] = {}
        """Agents of peers, each loaded once: twice would end its reads."""

    def load(self, peer: bytes, metadata: bytes) -> str:
        """Load the agent of a peer once; return its name. Raises ``TransferError`` if it cannot be reached."""
        if peer not in self._names:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransferError(f"NIXL cannot reach the peer: {_words(error)}") from error
            self._names[peer] = name.decode() if isinstance(name, bytes) else name
        return self._names[peer]

    def unload(self, peer: bytes) -> None:
        """Remove the agent of a peer of which no read is in flight. Idempotent."""
        if (name := self._names.pop(peer, None)) is None:
            return
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001
            logger.info("the agent %s cannot be removed: %s", name, error)

    def read(
        self, peer: bytes, device: int, theirs: Numbers, mine: Numbers, sizes: Numbers
    ) -> NixlRead | str:
        """Begin to read pieces of a peer's memory, of its GPU ``device``; return why that is not possible."""
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._described(mine, sizes, self._device),
                self._described(theirs, sizes, device),
                self._names[peer],
            )
        except Exception as error:  # noqa: BLE001
            return _words(error)
        try:
            state = self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001
            failed = NixlRead(self._agent, handle, "ERR")
            failed.error = _words(error)
            return failed
        return NixlRead(self._agent, handle, state)

    def _described(self, addresses: Numbers, sizes: Numbers, device: int) -> Any:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
        return self._agent.get_xfer_descs(rows, self._kind)

    def notify(self, peer: bytes, data: bytes) -> bool:
        """Send a message to a loaded agent; return False if that is not possible."""
        name = self._names.get(peer)
        if name is None:
            return False
        try:
            self._agent.send_notif(name, data)
        except Exception as error:  # noqa: BLE001 - the peer may be gone
            logger.info("transfer peer %s takes no notifications: %s", peer.hex()[:8], error)
            return False
        return True

    def notifications(self) -> list[bytes]:
        """Advance NIXL, and return the messages that have arrived."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:  # noqa: BLE001
            logger.info("no notifications: %s", error)
            return []
        return [message for messages in arrived.values() for message in messages]

    def close(self) -> None:
        """Release the memory and the agent. No read is in flight."""
        self._agent.deregister_memory(self._registered)
        self._names.clear()
        del self._agent  # now, and not with the interpreter, when NIXL's libraries are being unloaded


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

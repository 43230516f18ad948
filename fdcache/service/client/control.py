"""Control of a running service by tools: pins, reads ahead, deletions, moves to storage, and quotas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from fdcache.errors import ConfigurationError, ProtocolError
from fdcache.hashing import SGLANG, TokenBlocks, root_hash, sglang_keys
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.service.client.connection import Client
from fdcache.service.wire.control_views import (
    DeleteView,
    MoveView,
    PinView,
    PrefetchView,
    QuotaView,
    UnpinView,
)
from fdcache.service.wire.views import ExplainView, NamedTenantView

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix by its ``tokens``, or by the hexadecimal ``hashes`` of its blocks.

    ``namespace``: the beginning of a name; None where the service has only one. Tokens belong to ``tenant``, are
    computed with ``adapter``, and ``lookahead`` is the FDCACHE_LOOKAHEAD_TOKENS of the engines. Of SGLang's requests
    ``tenant`` is the ``cache_salt`` and ``adapter`` the ``extra_key``.
    """

    tokens: Sequence[int] | None = None
    hashes: Sequence[str] | None = None
    namespace: str | None = None
    tenant: str | None = None
    adapter: str | None = None
    lookahead: int = 0

    def arguments(self, ask: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of a question about it; ``ask`` is that of a client.

        Raises ``ConfigurationError`` unless it has one of the two.
        """
        if (self.tokens is None) == (self.hashes is None):
            raise ConfigurationError("prefix: give tokens or hashes, one of the two")
        if self.tokens is None:
            return {"namespace": self.namespace, "hashes": list(self.hashes or ())}
        layout = KVLayout.from_json(msgspec.json.encode(ask("layout", namespace=self.namespace)))
        hashes = [row.tobytes().hex() for row in self._keys(layout, list(self.tokens))]
        return {"namespace": layout.fingerprint.hex()[:16], "hashes": hashes}

    def _keys(self, layout: KVLayout, tokens: list[int]) -> HashArray:
        if layout.revision.startswith(SGLANG):
            return sglang_keys(tokens, layout.block_size, adapter=self.adapter, salt=self.tenant)
        root = root_hash(layout.fingerprint, self.tenant)
        blocks = TokenBlocks(layout.block_size, root, adapter_id=self.adapter, lookahead=self.lookahead)
        blocks.append(tokens)
        return blocks.hashes


class Control:
    """Commands about prefixes and quotas.

    ::

        with Client(address) as client:
            pin = Control(client).pin(Prefix(tokens=system_prompt), seconds=3600)

    Each returns what was done. Raises what ``Client.ask`` does.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def explain(self, prefix: Prefix) -> ExplainView:
        """Return where each block of a prefix is, or when and why it left."""
        return self._ask(ExplainView, "explain", **prefix.arguments(self._client.ask))

    def pin(self, prefix: Prefix, seconds: float, most_blocks: int | None = None) -> PinView:
        """Keep the leading blocks of a prefix that are in the host tier there, for a time."""
        return self._ask(
            PinView, "pin", seconds=seconds, most_blocks=most_blocks, **prefix.arguments(self._client.ask)
        )

    def unpin(self, pin: int | Prefix) -> UnpinView:
        """End the pin with a number, or all pins of exactly this prefix."""
        if isinstance(pin, int):
            return self._ask(UnpinView, "unpin", pin=pin)
        return self._ask(UnpinView, "unpin", **pin.arguments(self._client.ask))

    def pins(self) -> list[PinView]:
        """Return the pins in force."""
        return self._ask(list[PinView], "pins")

    def prefetch(self, prefix: Prefix, source: str | None = None) -> PrefetchView:
        """Begin to read what storage has of a prefix into the host tier; ask again to learn how far that is.

        ``source``: address of the node that is asked first.
        """
        return self._ask(PrefetchView, "prefetch", source=source, **prefix.arguments(self._client.ask))

    def move(self, prefix: Prefix) -> MoveView:
        """Begin to move a prefix from the host tier to storage; ask again to learn how far that is."""
        return self._ask(MoveView, "move", **prefix.arguments(self._client.ask))

    def delete(self, prefix: Prefix, start: int = 0, *, dry_run: bool = False) -> DeleteView:
        """Delete the blocks of a prefix from block ``start`` on, and all that continue them."""
        return self._ask(
            DeleteView, "delete", start=start, dry_run=dry_run, **prefix.arguments(self._client.ask)
        )

    def quotas(self, namespace: str | None = None) -> list[NamedTenantView]:
        """Return the tenants with the most blocks, and the quota of each."""
        return self._ask(list[NamedTenantView], "tenants", namespace=namespace)

    def set_quota(self, tenant: str, share: float) -> QuotaView:
        """Set the share of each namespace that a tenant may have, until the service ends."""
        return self._ask(QuotaView, "quota", tenant=tenant, share=share)

    def _ask(self, kind: type[Answer], what: str, **arguments: Any) -> Answer:
        answer = self._client.ask(what, **arguments)
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise ProtocolError(
                f"{self._client.address}: the answer to {what!r} cannot be read ({error}); use the fdcache of the "
                "service's version"
            ) from error

"""The path of a prompt: the hashes that a namespace of a service has its blocks under."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fdcache.hashing import TokenBlocks, root_hash
from fdcache.layout import KVLayout
from fdcache.service.client.connection import Client


def path_of(
    client: Client,
    namespace: str | None,
    tokens: Sequence[int],
    tenant: str | None = None,
    adapter: str | None = None,
    lookahead: int = 0,
) -> tuple[str, list[str]]:
    """Hash tokens with the layout of the namespace whose name begins with ``namespace``, or of the only one.

    Return the whole name and the hashes in hexadecimal. Raises ``RefusedError`` if none or several namespaces fit,
    ``HashingError`` for tokens that cannot be hashed, and what ``Client.ask`` does.
    """
    layout = KVLayout.from_json(msgspec.json.encode(client.ask("layout", namespace=namespace)))
    root = root_hash(layout.fingerprint, tenant)
    blocks = TokenBlocks(layout.block_size, root, adapter_id=adapter, lookahead=lookahead)
    blocks.append(list(tokens))
    return layout.fingerprint.hex()[:16], [row.tobytes().hex() for row in blocks.hashes]

"""Block keys of vLLM's requests: which of their tokens are the same, and which requests are not cached.

    python -m fdcache.integrations.vllm.keys NAME PATH

prints the id of an adapter, for ``fdcache inspect explain --adapter``.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from fdcache.hashing import MultimodalItem
from fdcache.integrations.weights import digest_of
from fdcache.manager import Request


def request_of(request: Any) -> Request | None:
    """Return fdcache's request for one of vLLM's; None for one that is never cached.

    The salt is the tenant. Adapters are known by ``adapter_id``, images and the like by identifier, offset and length.
    Prompts of embeddings have no tokens to tell them apart, and sessions that are resumed shorten theirs.
    """
    if request.prompt_embeds is not None or request.resumable:
        return None
    adapter = request.lora_request
    if adapter is not None and adapter.load_inplace:
        return None  # other weights may get its name and path
    made = Request(
        request.request_id,
        known_tokens(request, 0),
        multimodal=[
            MultimodalItem(item.mm_position.offset, item.mm_position.length, item.identifier)
            for item in request.mm_features
        ],
        adapter_id=None
        if adapter is None
        else _loaded(adapter.lora_int_id, adapter.lora_name, adapter.lora_path),
        tenant=request.cache_salt,
        device_only=bool(request.skip_reading_prefix_cache),
    )
    if adapter is not None:
        made.adapter_name = adapter.lora_name
    return made


def adapter_id(name: str, path: str) -> str:
    """Return the id of an adapter: its name and, for a local folder, the digest of its files, else its path.

    An adapter that is trained anew into its folder is another one; a copy in another place is the same.
    """
    digest = digest_of(Path(path))
    return f"{len(name)}:{name}{path if digest is None else f'@{digest[:32]}'}"


@functools.lru_cache(1024)
def _loaded(number: int, name: str, path: str) -> str:
    """Return the id of an adapter as it was when the engine first saw it: vLLM numbers each load anew."""
    return adapter_id(name, path)


def extra_of(request: Any) -> dict[str, Any]:
    """Return the fields of a request that may hold hints: ``kv_hints`` where vLLM has it, and extra arguments."""
    found: dict[str, Any] = {}
    for fields in (getattr(request.sampling_params, "extra_args", None), request.kv_transfer_params):
        if isinstance(fields, dict):
            found |= fields
    envelope = getattr(request, "kv_hints", None)
    return found if envelope is None else {**found, "kv_hints": envelope}


def known_tokens(request: Any, start: int) -> list[int]:
    """Return the tokens of a request from ``start`` on that vLLM knows by now."""
    tokens: list[int] = request.all_token_ids[start:]
    return tokens


if __name__ == "__main__":
    sys.stdout.write(f"{adapter_id(*sys.argv[1:])}\n")

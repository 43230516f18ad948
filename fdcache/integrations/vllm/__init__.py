"""A KV connector for vLLM: host memory, storage and a node's shared cache below vLLM's own prefix cache.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FdcacheConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "fdcache.integrations.vllm"}'

Settings come from the environment, or from ``kv_connector_extra_config`` under the same names. See docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdcache.integrations.vllm.connector import FdcacheConnector

__all__ = ["FdcacheConnector"]


def __getattr__(name: str) -> object:
    """Import vLLM with the connector alone: the settings and keys of this package do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fdcache.integrations.vllm.connector import FdcacheConnector

    return FdcacheConnector

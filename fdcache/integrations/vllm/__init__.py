"""A KV connector for vLLM: host memory, storage and a node's shared cache below vLLM's own prefix cache.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FdcacheConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "fdcache.integrations.vllm"}'

Settings come from the environment, or from ``kv_connector_extra_config`` under the same names. See docs/vllm.md.
"""

from fdcache.integrations.vllm.connector import FdcacheConnector

__all__ = ["FdcacheConnector"]

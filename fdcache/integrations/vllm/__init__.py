"""A KV connector for vLLM: host memory, storage and a node's shared cache below vLLM's own prefix cache.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}'

vLLM knows the name by its entry point for plug-ins, ``register``. Settings come from the environment, or from
``kv_connector_extra_config`` under the same names. See docs/vllm.md.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdcache.integrations.vllm.connector import FdcacheConnector

logger = logging.getLogger(__name__)

__all__ = ["FdcacheConnector", "register"]


def register() -> None:
    """Register the name of the connector with vLLM, which is imported when its class is asked for. Idempotent.

    vLLM calls it in each process, also where the connector is not used: one that cannot take the name goes on.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logger.debug("this vLLM takes no connectors by name: %s", error)
        return
    with suppress(ValueError):  # the name is registered
        KVConnectorFactory.register_connector("FdcacheConnector", __name__, "FdcacheConnector")


def __getattr__(name: str) -> object:
    """Import vLLM with the connector alone: the settings and keys of this package do not need it.

    vLLM asks for the class before it loads the weights: the configuration that it is making is checked then.
    """
    if name != "FdcacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fdcache.integrations.vllm.connector import FdcacheConnector, check_configurations

    register()
    check_configurations()
    return FdcacheConnector

"""The small ends of a service's line: for tools, and for engines that keep their own device blocks."""

from fdcache.client.engine import AsyncEngineClient, EngineClient
from fdcache.client.tool import AsyncClient, Client

__all__ = ["AsyncClient", "AsyncEngineClient", "Client", "EngineClient"]

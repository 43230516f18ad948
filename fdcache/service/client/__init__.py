"""Clients of a service: for tools, and for engines that manage their own device blocks."""

from fdcache.service.client.connection import AsyncClient, Client
from fdcache.service.client.engine import AsyncEngineClient, EngineClient

__all__ = ["AsyncClient", "AsyncEngineClient", "Client", "EngineClient"]

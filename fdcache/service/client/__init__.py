"""Clients of a service: for tools, and the parts of a manager that lie in it."""

from fdcache.service.client.connection import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]

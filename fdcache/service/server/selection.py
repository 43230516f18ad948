"""Which layouts a tool means."""

from __future__ import annotations

from fdcache.service.server.arguments import ArgumentError, Arguments
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service


def fitting_namespaces(service: Service, arguments: Arguments, *, required: bool = True) -> list[Namespace]:
    """The layouts that ``namespace``, the beginning of a name, fits; all without it.

    Raises ``ArgumentError`` when none is ``required`` to and does.
    """
    wanted = arguments.get("namespace")
    if wanted is None:
        return list(service.namespaces.values())
    fitting = [each for each in service.namespaces.values() if each.id.startswith(str(wanted).lower())]
    if not fitting and required:
        raise ArgumentError(f"namespace: none is called {wanted!r}; see `fdcache inspect namespaces`")
    return fitting


def only_namespace(service: Service, arguments: Arguments) -> Namespace:
    """The one that ``arguments`` name. Raises ``ArgumentError`` when they fit several, or none."""
    chosen = fitting_namespaces(service, arguments)
    if len(chosen) != 1:
        raise ArgumentError(f"namespace: {len(chosen)} fit; name one of `fdcache inspect namespaces`")
    return chosen[0]

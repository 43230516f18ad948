"""What must hold of a service at every moment."""

from __future__ import annotations

from fdcache.server.service import Service


def check_integrity(service: Service) -> list[str]:
    """Every invariant that does not hold, in words."""
    broken = [
        f"layout {namespace.id}: {text}"
        for namespace in service.namespaces.values()
        if namespace.tier is not None
        for text in namespace.tier.check_integrity()
    ]
    for namespace in service.namespaces.values():
        if namespace.tier is None:
            continue
        clients = service.sessions.of(namespace)
        figures = namespace.tier.stats()
        stocked = sum(len(client.stock) for client in clients)
        leases = sum(
            1 + len(client.runs) + len(client.former) + client.fetches.num_leases for client in clients
        )
        if figures.writing < stocked:
            broken.append(f"layout {namespace.id}: {figures.writing} slots are written, {stocked} granted")
        if figures.leases != leases:
            broken.append(f"layout {namespace.id}: {figures.leases} leases, {leases} known")
    return broken

"""The variables of the host tiers of other nodes."""

from __future__ import annotations

from collections.abc import Iterator

from fdcache.settings.extensions import Extension, GivenSettings
from fdcache.settings.kinds import Secret, Text, TextList
from fdcache.settings.problems import Problem
from fdcache.settings.variable import Component, Group, variable


class NodesSettings(Group):
    """The nodes of ``FDCACHE_STORAGE=nodes``."""

    used_in = (Component.STORAGE,)

    address: Text | None = variable(
        "FDCACHE_NODES_ADDRESS",
        None,
        "Address at which this node serves its host tier, tcp://host:port with the host by which the others reach it. "
        "Without a service, rank r adds r to the port. Unset, the node reads from others and serves nothing.",
    )
    key: Secret | None = variable(
        "FDCACHE_NODES_KEY",
        None,
        "Secret that all nodes share, at least 16 bytes: links are encrypted, and open to no one else.",
    )
    listed: TextList = variable(
        "FDCACHE_NODES",
        (),
        "Addresses of the other nodes, such as tcp://a:7400,tcp://b:7400; the own one may be among them.",
    )
    directory: Secret | None = variable(
        "FDCACHE_NODES_DIRECTORY",
        None,
        "Redis in which the nodes that are there enter their addresses, such as redis://:password@host:6379/0.",
    )


def _check(settings: GivenSettings) -> Iterator[Problem]:
    if settings.storage_tier.connector.lower() != "nodes":
        return
    nodes = settings.group(NodesSettings)
    if nodes.key is None:
        yield settings.conflict(
            ("FDCACHE_STORAGE", "FDCACHE_NODES_KEY"),
            "whoever reaches a node could read its blocks",
            "set FDCACHE_NODES_KEY_FILE to a file with a secret that all nodes share",
        )
    if not (nodes.address or nodes.listed or nodes.directory):
        yield settings.conflict(
            ("FDCACHE_STORAGE", "FDCACHE_NODES"),
            "no other node is known, and none can find this one",
            "set FDCACHE_NODES_ADDRESS, and FDCACHE_NODES or FDCACHE_NODES_DIRECTORY",
        )


EXTENSION = Extension({"nodes": NodesSettings}, check=_check)

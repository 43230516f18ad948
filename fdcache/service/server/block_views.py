"""Views of single blocks: the hottest ones, those with a hash, and those of a path."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fdcache.groups import record_keys, state_keys
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.service.server.arguments import (
    ArgumentError,
    Arguments,
    check_path,
    hashes_of_path,
    number,
    select_namespace,
    select_namespaces,
)
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.service.server.slices import in_batches, json_list, json_object
from fdcache.service.wire.views import BlockView, ExplainedBlock
from fdcache.tiers.pool import TreeNode

MAX_TREE = 10_000
BLOCKS_A_SLICE = 128


class BlockViews:
    """Answers about blocks, in slices: blocks may come and go between two of them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def tree(self, arguments: Arguments) -> Iterator[bytes]:
        """Yield the hottest blocks, each with its ancestors, parents first."""
        limit = int(number(arguments, "limit", 30, 1, MAX_TREE))
        chosen = select_namespaces(self._service, arguments)
        return json_list(
            in_batches((node for each in chosen for node in _nodes(each, limit)), BLOCKS_A_SLICE)
        )

    def block(self, arguments: Arguments) -> Iterator[bytes]:
        """Yield the blocks whose hash begins with ``hash``, at least 4 hexadecimal digits."""
        prefix = str(arguments.get("hash", "")).lower()
        if not 4 <= len(prefix) <= 64 or any(letter not in "0123456789abcdef" for letter in prefix):
            raise ArgumentError("hash: give 4 to 64 hexadecimal digits")
        return json_list(
            self._blocks_of(namespace, prefix) for namespace in select_namespaces(self._service, arguments)
        )

    def _blocks_of(self, namespace: Namespace, prefix: str) -> list[BlockView]:
        tier, found = namespace.tier, []
        if tier is not None:
            for slot in tier.starting_with(bytes.fromhex(prefix[: len(prefix) // 2 * 2])).slots.tolist():
                node = tier.node(slot)
                if node.hash.hex().startswith(prefix):
                    found.append(
                        BlockView(
                            namespace=namespace.id,
                            tenant=namespace.tenants.name_of(node.tenant),
                            hash=node.hash.hex(),
                            slot=slot,
                            generation=node.generation,
                            depth=node.depth,
                            children=node.children,
                            pins=node.pins,
                            hits=node.hits,
                            stored_at=time.time() - node.ready_seconds,
                            idle_seconds=node.idle_seconds,
                            checksum=f"{node.checksum:016x}",
                            unverified=slot in namespace.unverified,
                        )
                    )
        found += [
            BlockView(namespace=namespace.id, hash=key.hex(), reason=reason, left_at=when)
            for key, when, reason in namespace.history.evictions.starting_with(prefix)
        ]
        # Storage finds whole hashes only: those found above, or the one that was given in full.
        candidates = found or ([BlockView(namespace.id, prefix)] if len(prefix) == 64 else [])
        if candidates:
            stored = self._stored(namespace, hashes_of_path([each.hash for each in candidates]))
            for each in candidates:
                key = bytes.fromhex(each.hash)
                each.stored = key in stored
                if namespace.feed is not None:
                    each.devices = namespace.feed.on_devices(key)
        return [each for each in candidates if each in found or each.stored or each.devices]

    def explain(self, arguments: Arguments) -> Iterator[bytes]:
        """Yield where each block of a path is. ``hashes`` are hexadecimal, in path order."""
        namespace = select_namespace(self._service, arguments)
        texts = check_path(arguments.get("hashes"))
        run = _Run(namespace.layout)

        def batches() -> Iterator[list[ExplainedBlock]]:
            for first in range(0, len(texts), BLOCKS_A_SLICE):
                blocks = self._explained(
                    namespace, hashes_of_path(texts[first : first + BLOCKS_A_SLICE]), first
                )
                run.add(blocks)
                yield blocks

        return json_object(
            namespace=namespace.id,
            blocks=batches(),
            broken_at=lambda: run.broken_at,
            usable=lambda: run.usable,
            ended_by=lambda: run.ended_by,
        )

    def _explained(self, namespace: Namespace, hashes: HashArray, first: int) -> list[ExplainedBlock]:
        namespace.collect_events()
        tier, evictions = namespace.tier, namespace.history.evictions
        slots: dict[bytes, int] = {}
        if tier is not None:
            found = tier.find(hashes)
            slots = {
                row.tobytes(): slot for row, slot in zip(found.hashes, found.slots.tolist(), strict=True)
            }
        stored = self._stored(namespace, hashes)
        elsewhere = self._elsewhere(namespace, hashes)
        blocks = []
        for position, row in enumerate(hashes, first):
            key = row.tobytes()
            block = ExplainedBlock(position=position, hash=key.hex(), tier=None)
            if tier is not None and key in slots:
                node = tier.node(slots[key])
                block.tier, block.slot, block.hits = "host", node.slot, node.hits
                block.stored_at, block.idle_seconds = time.time() - node.ready_seconds, node.idle_seconds
            elif key in stored:
                block.tier = "storage"
                block.left_host_at, _ = evictions.find(key)
                if key in elsewhere:
                    block.node = elsewhere[key]
            else:
                block.left_at, block.reason = evictions.find(key)
            if namespace.feed is not None:
                block.devices = namespace.feed.on_devices(key)
            blocks.append(block)
        if namespace.layout.groups:
            self._explain_groups(namespace, hashes, blocks)
        return blocks

    def _explain_groups(
        self, namespace: Namespace, hashes: HashArray, blocks: Sequence[ExplainedBlock]
    ) -> None:
        """Tell for each page the first group that has nothing of it, and whether states are at its end."""
        layout = namespace.layout
        there = self._there(namespace, record_keys(hashes, layout.page_records)).reshape(len(blocks), -1)
        kept = self._there(namespace, state_keys(hashes, layout.page_records, layout.num_states))
        kept = kept.reshape(len(blocks), -1)
        for block, records, states in zip(blocks, there, kept, strict=True):
            if not records.all():
                block.group = layout.page_groups[int(records.argmin())]
            if layout.num_states:
                block.states = bool(states.all())
            if not layout.page_records and states.all():
                block.tier = "host"

    def _there(self, namespace: Namespace, keys: HashArray) -> NDArray[np.bool_]:
        """Return which records are in the host tier or stored."""
        found = set() if namespace.tier is None else set(map(bytes, namespace.tier.find(keys).hashes))
        found |= self._stored(namespace, keys)
        return np.array([key.tobytes() in found for key in keys], np.bool_)

    def _stored(self, namespace: Namespace, hashes: HashArray) -> set[bytes]:
        """Return the blocks known to be stored; of a shared store, those that went through this service."""
        storage = self._service.storage_of(namespace)
        if storage is None:
            return set()
        if storage.reads_from_nodes:
            return set(self._elsewhere(namespace, hashes))
        absent = storage.index.is_absent(hashes).tolist()
        return {row.tobytes() for row, gone in zip(hashes, absent, strict=True) if not gone}

    def _elsewhere(self, namespace: Namespace, hashes: HashArray) -> dict[bytes, str]:
        """Return the node on whose host each block was when it was last asked for; those of none are left out."""
        storage = self._service.storage_of(namespace)
        if storage is None or not storage.reads_from_nodes:
            return {}
        found = zip(hashes, storage.seen(hashes), strict=True)
        return {row.tobytes(): node for row, node in found if node is not None}


class _Run:
    """The leading blocks of a path that are there, and the group of layers that ends them."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._has_pages = not layout.groups or layout.page_records > 0
        self._group: int | None = None
        self._blocks = 0
        self.broken_at: int | None = None
        self.usable = 0

    def add(self, blocks: Sequence[ExplainedBlock]) -> None:
        """Add the next blocks of the path."""
        for block in blocks:
            self._blocks += 1
            if self.broken_at is not None:
                continue
            if block.tier is None and self._has_pages:
                self.broken_at = block.position
                self._group = block.group if isinstance(block.group, int) else None
            elif block.states is not False:
                self.usable = block.position + 1

    @property
    def ended_by(self) -> str | None:
        """The group that ends the run; that of states if there are pages beyond the last that has them."""
        groups, states = self._layout.groups, self._layout.state_groups
        end = self._blocks if self.broken_at is None else self.broken_at
        at = states[0] if states and (self.usable < end or self._group is None) else self._group
        if at is None or self.usable == self._blocks:
            return None
        group = groups[at]
        tokens = f" {group.tokens}" if group.tokens else ""
        return f"{at + 1} of {len(groups)}: {group.reach}{tokens}, blocks of {group.block_size} tokens"


def _nodes(namespace: Namespace, limit: int) -> Iterator[TreeNode]:
    """Yield the hottest blocks of a namespace and their ancestors."""
    if namespace.tier is not None:
        for node, parent in namespace.tier.hottest_paths(limit):
            yield TreeNode.of(namespace.id, node, parent)

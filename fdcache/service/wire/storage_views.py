"""Records of the storage tier of a service; ``records.py`` explains the annotations."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from fdcache.service.wire.records import Unit, counter, gauge, shown

_FAILED = "Blocks not read or written."


class StorageTotals(msgspec.Struct):
    """Totals of a namespace's storage since the service started, over all ranks."""

    hit_blocks: Annotated[
        int, shown("Blocks found by requests.", counter("fdcache_storage_hit_blocks"), column="hits")
    ] = 0
    read_blocks: Annotated[
        int, shown("Blocks read into the host tier.", counter("fdcache_storage_read_blocks"))
    ] = 0
    stored_blocks: Annotated[int, shown("Blocks written.", counter("fdcache_storage_stored_blocks"))] = 0
    dropped_blocks: Annotated[
        int,
        shown(
            "Blocks not written for want of room.",
            counter("fdcache_storage_dropped_blocks"),
            column="dropped",
        ),
    ] = 0
    shared_reads: Annotated[
        int, shown("Reads that a second request joined.", counter("fdcache_storage_shared_reads"))
    ] = 0
    timed_out_reads: Annotated[
        int,
        shown(
            "Requests that went on before their read had ended.", counter("fdcache_storage_timed_out_reads")
        ),
    ] = 0
    corrupt_blocks: Annotated[
        int,
        shown(
            "Blocks refused for their checksum.", counter("fdcache_storage_corrupt_blocks"), column="corrupt"
        ),
    ] = 0
    resets: Annotated[int, shown("Resets.", counter("fdcache_storage_resets"))] = 0
    read_bytes: Annotated[
        int, shown("Bytes read.", counter("fdcache_storage_read_bytes"), column="read", unit=Unit.BYTES)
    ] = 0
    read_seconds: Annotated[
        float, shown("Time spent reading, summed over the ranks.", counter("fdcache_storage_read_seconds"))
    ] = 0.0
    written_bytes: Annotated[
        int,
        shown("Bytes written.", counter("fdcache_storage_written_bytes"), column="written", unit=Unit.BYTES),
    ] = 0
    written_seconds: Annotated[
        float, shown("Time spent writing, summed over the ranks.", counter("fdcache_storage_written_seconds"))
    ] = 0.0
    misses: Annotated[
        int,
        shown(
            "Blocks that were gone when they were read.",
            counter("fdcache_storage_failed_blocks", _FAILED, reason="gone"),
        ),
    ] = 0
    errors: Annotated[
        int,
        shown(
            "Blocks lost to errors of the storage.",
            counter("fdcache_storage_failed_blocks", _FAILED, reason="error"),
            column="errors",
        ),
    ] = 0
    timeouts: Annotated[
        int,
        shown(
            "Blocks that took too long.", counter("fdcache_storage_failed_blocks", _FAILED, reason="timeout")
        ),
    ] = 0
    peer_gone: Annotated[
        int,
        shown(
            "Blocks whose remote node was gone.",
            counter("fdcache_storage_failed_blocks", _FAILED, reason="peer_gone"),
        ),
    ] = 0
    no_room: Annotated[
        int,
        shown(
            "Blocks that the storage had no room for.",
            counter("fdcache_storage_failed_blocks", _FAILED, reason="no_room"),
        ),
    ] = 0
    bad_slots: Annotated[
        int,
        shown(
            "Blocks in slots that cannot be read or written.",
            counter("fdcache_storage_failed_blocks", _FAILED, reason="bad_slot"),
        ),
    ] = 0


class StoredBlocks(msgspec.Struct):
    """Blocks in storage and on their way; None where other services store into the same place."""

    blocks: Annotated[
        int | None, shown("Blocks stored.", gauge("fdcache_storage_blocks"), column="blocks")
    ] = 0
    capacity_blocks: Annotated[
        int | None,
        shown("Blocks that there is room for.", gauge("fdcache_storage_capacity_blocks"), column="of"),
    ] = 0
    bytes: Annotated[
        int | None,
        shown(
            "Bytes of the blocks stored, on all ranks.",
            gauge("fdcache_storage_bytes"),
            column="bytes",
            unit=Unit.BYTES,
        ),
    ] = 0
    quarantined: Annotated[
        int,
        shown(
            "Slots that held a corrupt record, or cannot be read or written, and are not used again.",
            gauge("fdcache_storage_quarantined_blocks"),
            column="bad slots",
        ),
    ] = 0
    withheld: Annotated[
        int,
        shown(
            "Slots that the disk has no room for now.",
            gauge("fdcache_storage_withheld_blocks"),
            column="no room",
        ),
    ] = 0
    orphans: Annotated[
        int,
        shown(
            "Blocks that wait for a block above them to be stored again.",
            gauge("fdcache_storage_orphan_blocks"),
            column="orphans",
        ),
    ] = 0
    evictions: Annotated[int, shown("Blocks evicted.", counter("fdcache_storage_evicted_blocks"))] = 0
    queued_blocks: Annotated[
        int,
        shown("Blocks that wait to be written.", gauge("fdcache_storage_queued_blocks"), column="queued"),
    ] = 0
    reading_blocks: Annotated[
        int,
        shown(
            "Blocks being read into the host tier.", gauge("fdcache_storage_reading_blocks"), column="reading"
        ),
    ] = 0
    writing_blocks: Annotated[
        int, shown("Blocks being written.", gauge("fdcache_storage_writing_blocks"), column="writing")
    ] = 0


class NodeView(msgspec.Struct, kw_only=True):
    """Another node, as this service sees it, and what was read from its host tier over all ranks."""

    address: Annotated[str, shown("Address of the node.", column="node")]
    well: Annotated[
        bool,
        shown(
            "True unless the node has failed and is left out for a while.",
            gauge("fdcache_storage_node_up"),
            column="well",
            unit=Unit.FLAG,
        ),
    ]
    hits: Annotated[
        int, shown("Blocks read from it.", counter("fdcache_storage_node_hit_blocks"), column="hits")
    ] = 0
    read_bytes: Annotated[
        int,
        shown(
            "Bytes read from it.",
            counter("fdcache_storage_node_read_bytes"),
            column="read",
            unit=Unit.BYTES,
        ),
    ] = 0
    answers: Annotated[int, shown("Its answers with blocks.", counter("fdcache_storage_node_answers"))] = 0
    seconds: Annotated[
        float,
        shown("Time from question to answer, summed.", counter("fdcache_storage_node_answer_seconds")),
    ] = 0.0
    latency: Annotated[
        float, shown("Mean time of an answer with blocks.", column="latency", unit=Unit.SECONDS)
    ] = 0.0
    failures: Annotated[
        int,
        shown("Times that it has failed.", counter("fdcache_storage_node_failures"), column="failures"),
    ] = 0
    last_error: Annotated[str | None, shown("Its last failure, even if it is well again.")] = None


class NamespaceStorageView(StoredBlocks, kw_only=True):
    """The storage of one namespace. One that could not be opened has ``namespace``, ``state`` and ``error`` only."""

    namespace: Annotated[str, shown("Name of the namespace.", column="namespace")]
    model: Annotated[str, shown("Name of the model.", column="model")] = ""
    revision: Annotated[str, shown("Revision of the model.")] = ""
    ranks: Annotated[int, shown("Ranks of the model that hold bytes of their own.", column="ranks")] = 0
    state: Annotated[str, shown("One of ready, full, read_only and off.", column="state")]
    error: Annotated[str | None, shown("Last error of the storage.")] = None
    restored_blocks: Annotated[int, shown("Blocks that were stored before the service started.")] = 0
    store_bytes: Annotated[
        int | None,
        shown(
            "Bytes that all nodes store in the bucket or shared folder, as of this node's last look.",
            gauge("fdcache_storage_store_bytes"),
            unit=Unit.BYTES,
        ),
    ] = None
    store_objects: Annotated[
        int | None,
        shown(
            "Objects that all nodes store there, as of this node's last look.",
            gauge("fdcache_storage_store_objects"),
        ),
    ] = None
    removed_objects: Annotated[
        int,
        shown(
            "Objects that this node has removed there for want of room.",
            counter("fdcache_storage_removed_objects"),
        ),
    ] = 0
    erasures_queued: Annotated[
        int,
        shown("Resets that the files have not followed yet.", gauge("fdcache_storage_queued_erasures")),
    ] = 0
    totals: Annotated[StorageTotals | UnsetType, shown("Totals since the start.", inline=True)] = UNSET
    nodes: Annotated[list[NodeView], shown("The other nodes that host tiers are read from.")] = []


class LoadingView(msgspec.Struct):
    """Progress of loading the storage index."""

    active: Annotated[bool, shown("True while the index is loaded.", gauge("fdcache_storage_loading"))]
    done: Annotated[int, shown("Slots read.")]
    total: Annotated[int, shown("Slots to read.")]


class StorageView(StoredBlocks, kw_only=True):
    """The storage tier: the sums over its namespaces, and each of them."""

    connector: Annotated[str, shown("Name of the connector.")]
    state: Annotated[str, shown("Worst state of a namespace's storage.")]
    loading: LoadingView
    layouts: list[NamespaceStorageView]

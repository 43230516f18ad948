"""Records that answer commands about prefixes and quotas."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fdcache.service.wire.records import Unit, shown


class PrefixView(msgspec.Struct, kw_only=True):
    """A prefix: ``host`` of its ``blocks`` from the start on are in the host tier.

    Blocks of a model with groups of layers are pages: the records of all groups for the same tokens.
    """

    namespace: Annotated[str, shown("Name of the namespace.", column="namespace")]
    blocks: Annotated[int, shown("Blocks of the prefix.", column="blocks")]
    host: Annotated[int, shown("Leading blocks in the host tier.", column="host")]
    usable: Annotated[
        int,
        shown(
            "Leading blocks of the host tier after which an engine can go on: all, or those up to the last states.",
            column="usable",
        ),
    ]


class PinView(PrefixView, kw_only=True):
    """A pin: these blocks, and the states after the last that has some, are not evicted until its time is over.

    ``pin`` is None if nothing was pinned.
    """

    pin: Annotated[int | None, shown("Number of the pin.", column="pin")]
    last: Annotated[str, shown("Hash of the last block of the prefix.", column="last", unit=Unit.HASH)]
    pinned: Annotated[int, shown("Leading blocks pinned.", column="pinned")]
    over_budget: Annotated[
        int,
        shown("Blocks in the host tier that were not pinned, since as many as may be are.", column="over"),
    ] = 0
    seconds: Annotated[float, shown("Time left.", column="left", unit=Unit.SECONDS)] = 0.0


class UnpinView(msgspec.Struct):
    """Pins that were ended, and the blocks that they held."""

    pins: Annotated[int, shown("Pins ended.")]
    blocks: Annotated[int, shown("Blocks that they held.")]


class PrefetchView(PrefixView, kw_only=True):
    """A prefix that is read from storage into the host tier. Asked again, it tells how far the read is."""

    reading: Annotated[
        int | None, shown("Stored blocks behind those that are still to come. None: a store is being asked.")
    ]
    done: Annotated[bool, shown("True if nothing is being read.")]
    source: Annotated[str | None, shown("Node that was asked first.")] = None
    refused: Annotated[
        str | None, shown("Why the source did not give all. None: it did, or is still being read.")
    ] = None


class DeleteView(PrefixView, kw_only=True):
    """Blocks of a prefix that were deleted, with all that continue them. A dry run only counts the prefix."""

    dry_run: bool
    deleted_host: Annotated[int, shown("Blocks deleted from the host tier.")]
    deleted_storage: Annotated[int, shown("Blocks deleted from storage.")]


class MoveView(PrefixView, kw_only=True):
    """A prefix that is moved to storage. Asked again, it tells how far that is."""

    stored: Annotated[int, shown("Blocks that storage has.")]
    waiting: Annotated[int, shown("Blocks in the host tier that storage lacks.")]
    freed: Annotated[int, shown("Blocks that left the host tier.")]
    kept: Annotated[int, shown("Leading stored blocks that stay: they are in use, or others continue them.")]
    done: Annotated[bool, shown("True if the move is over.")]


class QuotaView(msgspec.Struct):
    """The share of each namespace that a tenant may have, until the service ends."""

    tenant: Annotated[str, shown("Name of the tenant.")]
    share: Annotated[float, shown("Its share from now on.", unit=Unit.SHARE)]
    before: Annotated[float, shown("Its share before.", unit=Unit.SHARE)]

"""Records of the clients of a running service: figures that engines report, and transfers in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from fdcache.service.wire.records import Unit, gauge, shown
from fdcache.tiers.reuse import ReuseReport
from fdcache.tiers.statistics import HandoverCount, HintFigures, LoadDecision


class ClientFigures(msgspec.Struct):
    """Figures that a client reports about itself. They are untrusted: each value may be anything."""

    plans_in_flight: Annotated[
        Any, shown("Plans whose reports are out.", gauge("fdcache_client_plans_in_flight"))
    ] = 0
    queued_backups: Annotated[
        Any,
        shown("Blocks that wait to be copied to the host.", gauge("fdcache_client_queued_backup_blocks")),
    ] = 0
    queued_stores: Annotated[
        Any,
        shown("Blocks that wait to be copied to storage.", gauge("fdcache_client_queued_store_blocks")),
    ] = 0
    live_requests: Annotated[
        Any, shown("Requests that hold blocks.", gauge("fdcache_client_live_requests"), column="requests")
    ] = 0
    sending_blocks: Annotated[
        Any, shown("Blocks that it hands over to peers.", gauge("fdcache_client_sending_blocks"))
    ] = 0
    fetching_blocks: Annotated[
        Any, shown("Blocks that it fetches from peers.", gauge("fdcache_client_fetching_blocks"))
    ] = 0
    held_blocks: Annotated[
        Any,
        shown("Slots of fetches that no request waits for any more.", gauge("fdcache_client_held_blocks")),
    ] = 0
    counters: dict[str, Any] | None = None
    device: dict[str, Any] | None = None
    loads: dict[str, Any] | None = None
    hints: dict[str, Any] | None = None
    handovers: list[Any] = []
    reuse: Any = None

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> ClientFigures:
        """Read what a client reported; empty where it makes no sense."""
        try:
            return msgspec.convert(figures, cls)
        except msgspec.ValidationError:
            return cls()

    def hit_tokens(self, tier: str) -> float:
        """Return the tokens of prompts that were found in ``device``, ``host`` or ``storage``."""
        return to_number((self.counters or {}).get(f"{tier}_hit_tokens"))

    @property
    def lookup_tokens(self) -> Any:
        """Tokens of prompts that were looked up."""
        return (self.counters or {}).get("lookup_tokens")

    def load_figure(self, name: str) -> float:
        """Return a total of ``LoadFigures``."""
        return to_number((self.loads or {}).get(name))

    def load_decisions(self) -> list[LoadDecision]:
        """Return the last decisions of load or recompute; none where they make no sense."""
        try:
            return msgspec.convert((self.loads or {}).get("recent", []), list[LoadDecision])
        except msgspec.ValidationError:
            return []

    def hint_figures(self) -> HintFigures:
        """Return what became of hints in its tiers; nothing where it makes no sense."""
        try:
            return msgspec.convert(self.hints or {}, HintFigures)
        except msgspec.ValidationError:
            return HintFigures()

    def handover_counts(self) -> list[HandoverCount]:
        """Return the hand-overs that have ended, each peer and result once; none where they make no sense."""
        try:
            counts = msgspec.convert(self.handovers, list[HandoverCount])
        except msgspec.ValidationError:
            return []
        return list({(each.direction, each.peer, each.result): each for each in counts}.values())

    def learned(self) -> dict[str, ReuseReport]:
        """Return what the client's tiers have learned of reuse; nothing where it makes no sense."""
        try:
            return msgspec.convert(self.reuse or {}, dict[str, ReuseReport])
        except msgspec.ValidationError:
            return {}

    def hit_shares(self) -> dict[str, float]:
        """Return the share of prompt tokens found in each tier; empty where the figures contradict each other."""
        asked = to_number(self.lookup_tokens)
        hits = {tier: self.hit_tokens(tier) for tier in HIT_TIERS}
        if asked <= 0 or min(hits.values()) < 0 or sum(hits.values()) > asked:
            return {}
        return {tier: tokens / asked for tier, tokens in hits.items()}


LOAD_CHOICES = ("whole", "part", "nothing")
"""How much of a cached prefix is loaded."""

HIT_TIERS = ("device", "host", "storage")
"""Tiers in which tokens of a prompt are found."""


class ClientView(msgspec.Struct):
    """One registered client. ``figures`` are its own, as of its last heartbeat, and may be anything."""

    session: Annotated[str, shown("Session, in hexadecimal.")]
    name: Annotated[str, shown("Name that the client gave.", column="client")]
    namespace: Annotated[str, shown("Name of its namespace.", column="namespace")] = ""
    pid: Annotated[int, shown("Process id of its scheduler.", column="pid")] = 0
    ranks: Annotated[list[int], shown("Ranks whose workers are attached.", column="ranks")] = []
    connected_seconds: Annotated[float, shown("Since it registered.", column="since", unit=Unit.SECONDS)] = (
        0.0
    )
    silent_seconds: Annotated[
        float,
        shown(
            "Since its last heartbeat.",
            gauge("fdcache_client_silent_seconds"),
            column="silent",
            unit=Unit.SECONDS,
        ),
    ] = 0.0
    silent: Annotated[bool, shown("True once its session timed out.")] = False
    stock: Annotated[
        int,
        shown("Slots that it may copy into.", gauge("fdcache_client_writable_slots"), column="slots"),
    ] = 0
    stock_bytes: Annotated[int, shown("Bytes of these slots.")] = 0
    runs: Annotated[
        int, shown("Pinned runs that it may load from.", gauge("fdcache_client_pinned_runs"), column="runs")
    ] = 0
    lookups: Annotated[int, shown("Paths that it looked up.", column="lookups")] = 0
    stored: Annotated[int, shown("Blocks that it stored.", column="stored")] = 0
    device_resets: Annotated[int, shown("Device resets that it was sent.")] = 0
    device_resets_applied: Annotated[int, shown("Device resets that it acknowledged.")] = 0
    figures: dict[str, Any] = {}


class CopiedView(msgspec.Struct):
    """Bytes copied in one direction, and the seconds that it took."""

    bytes: int
    seconds: float


class TransferView(msgspec.Struct):
    """Slots and pins of a client, its own queues, and its copies by direction since it registered.

    ``handovers`` to and from peer instances that have ended, as it says; ``held_blocks`` are slots of fetches that no
    request waits for any more.
    """

    client: Annotated[str, shown("Name of the client.", column="client")]
    writable_slots: Annotated[int, shown("Slots that it may copy into.", column="writable slots")] = 0
    pinned_runs: Annotated[int, shown("Pinned runs that it may load from.", column="pinned runs")] = 0
    plans_in_flight: Annotated[Any, shown("Plans in flight, as it says.", column="plans")] = 0
    queued_backups: Annotated[
        Any, shown("Blocks queued for the host, as it says.", column="queued backups")
    ] = 0
    sending_blocks: Any = 0
    fetching_blocks: Any = 0
    held_blocks: Any = 0
    copied: dict[str, CopiedView] = {}
    handovers: list[HandoverCount] = []


def to_number(value: Any) -> float:
    """Return a client's own figure as a float; 0 for what is no number, or too large for one."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    except OverflowError:
        return 0.0

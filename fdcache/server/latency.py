"""How long requests take."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache.node.histogram import Histogram


@dataclass(slots=True)
class Latencies:
    """A histogram for each kind of request."""

    kinds: dict[str, Histogram] = field(default_factory=dict)

    def observe(self, kind: str, seconds: float) -> None:
        """Count one request."""
        self.kinds.setdefault(kind, Histogram()).observe(seconds)

"""Histograms as Prometheus wants them: cumulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import HistogramMetricFamily

from fdcache.node.histogram import BOUNDS


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Mapping[str, Any]) -> None:
    """Add a ``Histogram``, given as plain values."""
    seen, buckets = 0, []
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram["counts"], strict=True):
        seen += count
        buckets.append((bound, seen))
    family.add_metric(labels, buckets, sum_value=histogram["total"])

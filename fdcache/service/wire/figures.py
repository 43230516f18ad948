"""Figures that a client says of itself, which may be anything."""

from __future__ import annotations

from typing import Any


def number(value: Any) -> float:
    """A figure to reckon with; 0 for what is no number, or too large for one."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    except OverflowError:
        return 0.0

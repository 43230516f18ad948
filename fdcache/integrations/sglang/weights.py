"""Notices that SGLang replaces the weights of its model: caches are told of flushes alone, and not why."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fdcache.errors import ConfigurationError

UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""The methods of SGLang's ``WeightUpdater`` that write weights: every way of replacing them calls one of these."""


@dataclass
class _Weights:
    """How often SGLang has begun to replace this process's weights, also at its last flush, and their name then."""

    number: int = 0
    flushed: int = 0
    version: str = ""

    def replaced(self) -> None:
        """Count an update."""
        self.number += 1

    def flush(self) -> None:
        """Record that SGLang's own pools have no page of former weights any more."""
        if self.flushed != self.number:
            from sglang.srt.runtime_context import get_serving

            self.flushed, self.version = self.number, str(get_serving().weight_version)


_weights = _Weights()
_noting: set[Callable[..., Any]] = set()


class KnownWeights:
    """The weights whose pages a door of SGLang has: those of the start, until they are renewed.

    SGLang's methods are wrapped in this process: they do what they did. Raises ``ConfigurationError`` if one of them is
    not there.
    """

    def __init__(self, server_args: Any) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        for name in UPDATES:
            _note_calls(WeightUpdater, name, _replaced)
        self._number = 0
        self._versions = {str(getattr(server_args, "weight_version", None))}
        self._lock = threading.Lock()

    @staticmethod
    def watch_flushes(controller: type) -> None:
        """Record the flushes of HiCache, whose storage is told of none."""
        _note_calls(controller, "reset", _flushed)

    @staticmethod
    def flushed() -> None:
        """Record a flush that the cache was told of."""
        _flushed()

    @property
    def are_loaded(self) -> bool:
        """False once SGLang has begun to replace them: its pools may have pages of these and of other weights."""
        return self._number == _weights.number

    def renew(self, take: Callable[[str | None], None]) -> bool:
        """Take the weights that are there now, if SGLang has flushed since; return True if they are known then.

        ``take`` is called with SGLang's name of them, or None if weights before had this name, too.
        """
        with self._lock:
            if not self.are_loaded and _weights.flushed == _weights.number:
                version = _weights.version
                take(None if version in self._versions else version)
                self._versions.add(version)
                self._number = _weights.number
            return self.are_loaded


def _replaced() -> None:
    _weights.replaced()


def _flushed() -> None:
    _weights.flush()


def _note_calls(owner: type, name: str, note: Callable[[], None]) -> None:
    call = getattr(owner, name, None)
    if call is None:
        raise ConfigurationError(
            f"SGLang's {owner.__name__} has no {name}: updates of weights would not be noticed; install a version of "
            "SGLang that is served"
        )
    if call in _noting:
        return

    @functools.wraps(call)
    def noted(*arguments: Any, **options: Any) -> Any:
        note()
        return call(*arguments, **options)

    _noting.add(noted)
    setattr(owner, name, noted)

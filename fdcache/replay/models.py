"""The stand-in for a model of several groups of layers: a pattern for each group, over the same device planes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from fdcache._core import PatternModel
from fdcache.groups import PageColumns
from fdcache.layout import KVLayout
from fdcache.replay.messages import Int32Array

_KEEP, _GROW, _VERIFY = 3, 4, 5


class Model(Protocol):
    """What a rank computes with; see ``PatternModel``."""

    def begin(self, sequence: int, tokens: Int32Array) -> None:
        """Set the tokens of a sequence."""

    def end(self, sequence: int) -> None:
        """Forget a sequence."""

    def prepare(self, segments: Int32Array, blocks: Int32Array, every: int) -> int:
        """Prepare a step; return how many blocks it will compare."""

    def run_layer(self, layer: int) -> list[tuple[int, int]]:
        """Compare, then write, one layer; return what differs as (segment, page of the sequence)."""


def make_model(arrays: Sequence[np.ndarray], layout: KVLayout, rank: int) -> Model:
    """Return the model of one rank over its device planes, of shape (device blocks, ...)."""
    planes = [array.reshape(array.shape[0], -1).view(np.uint8) for array in arrays]
    layers = np.array([plane.layer for plane in layout.planes], dtype=np.int32)
    salt = rank // layout.replicas
    if not layout.groups:
        return PatternModel(planes, layers, layout.total_layers, layout.block_size, salt)
    sizes = [group.block_size for group in layout.groups]
    models = [
        PatternModel(
            planes,
            layers,
            layout.total_layers,
            layout.block_size if group.is_state else sizes[at],
            salt * len(sizes) + at,
        )
        for at, group in enumerate(layout.groups)
    ]
    return GroupedModel(models, PageColumns(layout.groups, layout.block_size))


class GroupedModel:
    """The model of a layout with groups, each of which writes into blocks of its own.

    A row of ``blocks`` is a page: a block for each of ``columns``, -1 for one that the engine does not have. A state
    has the bytes of a block with all tokens of its page, and so follows from all tokens before its end.
    """

    def __init__(self, models: Sequence[PatternModel], columns: PageColumns) -> None:
        self._models = models
        self._columns = columns
        self._parts: list[tuple[PatternModel, slice]] = []
        for group, of_group in groupby(range(len(columns)), key=lambda at: columns.columns[at][0]):
            each = list(of_group)
            self._parts.append((models[group], slice(each[0], each[-1] + 1)))

    def begin(self, sequence: int, tokens: Int32Array) -> None:
        """Set the tokens of a sequence."""
        for model in self._models:
            model.begin(sequence, tokens)

    def end(self, sequence: int) -> None:
        """Forget a sequence."""
        for model in self._models:
            model.end(sequence)

    def prepare(self, segments: Int32Array, blocks: Int32Array, every: int) -> int:
        """Prepare a step; raise ValueError if a block is missing that the tokens to compute need."""
        rows = blocks.reshape(-1, len(self._columns))
        self._require_needed(segments, rows)
        comparisons = 0
        for model, part in self._parts:
            per_page = part.stop - part.start
            of_group = segments.copy()
            of_group[[_KEEP, _GROW, _VERIFY]] *= per_page
            comparisons += model.prepare(of_group, np.ascontiguousarray(rows[:, part]).reshape(-1), every)
        return comparisons

    def _require_needed(self, segments: Int32Array, rows: Int32Array) -> None:
        """Check the tables of the sequences that begin with pages they did not compute."""
        begin = 0
        for sequence, _, _, keep, grow, verify in segments.T.tolist():
            if verify and not keep:
                missing = self._columns.needed(verify) & (rows[begin : begin + verify] < 0)
                if missing.any():
                    page, column = (int(each[0]) for each in missing.nonzero())
                    raise ValueError(
                        f"sequence {sequence} needs column {column} of page {page}, and has no block"
                    )
            begin += grow

    def run_layer(self, layer: int) -> list[tuple[int, int]]:
        """Compare, then write, one layer; return the pages that differ."""
        differing: dict[tuple[int, int], None] = {}
        for model, part in self._parts:
            for segment, block in model.run_layer(layer):
                differing[segment, block // (part.stop - part.start)] = None
        return list(differing)

"""Messages between the scheduler and the ranks: one order per step, one result per rank, packed with msgpack."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache.metadata import (
    StorageScan,
    TransferPlan,
    TransferReport,
    decode_plan,
    decode_report,
    decode_scan,
    encode,
)
from fdcache.storage.connector import StorageStats

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepOrder:
    """One step: the plans to submit, then the tokens to compute.

    Attributes:
        segments: shape (6, n), with the rows sequence, start, end, keep, grow, verify of ``PatternModel.prepare``.
        blocks: new entries of all block tables, concatenated.
        begins: sequences that start with this step, with their tokens.
        ends: sequences that the ranks can forget.
    """

    plans: list[TransferPlan]
    segments: Int32Array
    blocks: Int32Array
    begins: list[tuple[int, Int32Array]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step on one rank.

    Attributes:
        verified: number of blocks compared.
        differing: (segment, block) pairs whose bytes differ.
        reports: reports of finished transfers.
        peak_rss_bytes: peak memory of the rank's process.
        scan: contents of the rank's storage; in its first result only.
        storage: counts of the storage so far.
    """

    verified: int
    differing: list[tuple[int, int]]
    reports: list[TransferReport]
    peak_rss_bytes: int
    scan: StorageScan | None = None
    storage: StorageStats | None = None


@dataclass(frozen=True, slots=True)
class Starting:
    """Progress of a rank's start: an activity, the amount done, the total."""

    activity: str
    done: int
    total: int


class _OrderWire(msgspec.Struct, frozen=True, array_like=True):
    plans: list[bytes]
    segments: bytes
    blocks: bytes
    begins: list[tuple[int, bytes]]
    ends: list[int]


class _ResultWire(msgspec.Struct, frozen=True, array_like=True):
    verified: int
    differing: list[tuple[int, int]]
    reports: list[bytes]
    peak_rss_bytes: int
    error: str | None = None
    scan: bytes | None = None
    storage: StorageStats | None = None
    starting: tuple[str, int, int] | None = None


_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(_OrderWire)
_result_decoder = msgspec.msgpack.Decoder(_ResultWire)


class RankError(Exception):
    """A rank failed to execute a step. The message is the rank's."""


def encode_order(order: StepOrder) -> bytes:
    """Pack an order with msgpack."""
    plans = [encode(plan) for plan in order.plans]
    begins = [(sequence, tokens.tobytes()) for sequence, tokens in order.begins]
    return _encoder.encode(
        _OrderWire(plans, order.segments.tobytes(), order.blocks.tobytes(), begins, order.ends)
    )


def decode_order(data: bytes) -> StepOrder:
    """Unpack an order. Raises ``msgspec.DecodeError`` for other messages."""
    wire = _order_decoder.decode(data)
    return StepOrder(
        plans=[decode_plan(plan) for plan in wire.plans],
        segments=np.frombuffer(wire.segments, dtype=np.int32).reshape(6, -1),
        blocks=np.frombuffer(wire.blocks, dtype=np.int32),
        begins=[(sequence, np.frombuffer(tokens, dtype=np.int32)) for sequence, tokens in wire.begins],
        ends=wire.ends,
    )


def encode_result(result: StepResult) -> bytes:
    """Pack a result with msgpack."""
    reports = [encode(report) for report in result.reports]
    wire = _ResultWire(
        result.verified,
        result.differing,
        reports,
        result.peak_rss_bytes,
        scan=None if result.scan is None else encode(result.scan),
        storage=result.storage,
    )
    return _encoder.encode(wire)


def encode_failure(message: str) -> bytes:
    """Pack the last answer of a rank that failed."""
    return _encoder.encode(_ResultWire(0, [], [], 0, message))


def encode_starting(activity: str, done: int, total: int) -> bytes:
    """Pack the progress of a rank's start."""
    return _encoder.encode(_ResultWire(0, [], [], 0, starting=(activity, done, total)))


def decode_result(data: bytes) -> StepResult | Starting:
    """Unpack a rank's message. Raises ``RankError`` if the rank failed."""
    wire = _result_decoder.decode(data)
    if wire.error is not None:
        raise RankError(wire.error)
    if wire.starting is not None:
        return Starting(*wire.starting)
    reports = [decode_report(report) for report in wire.reports]
    scan = None if wire.scan is None else decode_scan(wire.scan)
    return StepResult(wire.verified, wire.differing, reports, wire.peak_rss_bytes, scan, wire.storage)

"""Messages between a prefill and a decode rank, and their bytes (docs/transfer.md).

    data = encode(Envelope(mine.boot, theirs.boot), Renew("request-1", 1, received=3, read=2, lease_ms=2000))
    envelope, message = decode(data)

Times on the wire are durations, never points in time. A message says which boot it is for: one for a former process
at the same address is answered with ``Stranger`` and has no other effect.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

from fdcache.errors import ProtocolError
from fdcache.machine.decoding import MALFORMED
from fdcache.service.wire.liveness import Live
from fdcache.settings.kinds import printable

PROTOCOL_VERSION = 1
MAGIC = b"FDXT"
BOOT_BYTES = 16
NO_BOOT = bytes(BOOT_BYTES)
"""Addressee of a message to a peer whose boot is not known yet."""
MOST_BYTES = 16 << 20
"""Longest message that is read."""
MOST_NAME = 4096
"""Characters of the name of a transfer: both sides remember thousands of names."""
MOST_ATTEMPT = 2**63 - 1
MOST_WORDS = 1000
"""Characters that are taken of a peer's words, which log lines and reports show."""

_HEADER = struct.Struct("<4sHH16s16s")


class Envelope(NamedTuple):
    """Boot ids of the sender and of the process that the message is for."""

    sender: bytes
    target: bytes


def unsendable(transfer: str, attempt: int = 0) -> str | None:
    """Return why no message can have this name of a transfer and number of an attempt, None if one can."""
    if len(transfer) > MOST_NAME:
        return f"the name of the transfer has {len(transfer)} characters; give it one of at most {MOST_NAME}"
    if not transfer.isascii() and transfer.encode(errors="ignore").decode() != transfer:
        return f"the name of the transfer, {transfer[:MOST_WORDS]!a}, has characters that UTF-8 cannot encode"
    if not 0 <= attempt <= MOST_ATTEMPT:
        return f"attempt {attempt} is not a number from 0 to {MOST_ATTEMPT}"
    return None


Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Description of one rank of an instance, compared by both sides before any block is asked for.

    ``boot`` is new for every process at an ``address``. ``live`` proves to processes of the same ``machine`` that the
    process is gone. ``memory`` tells the connector of a peer how to reach this rank's planes.
    """

    boot: bytes
    address: Name
    role: Name
    connector: Name
    block_size: int
    tp_size: int
    rank: int
    planes: int
    draft_layers: int
    lookahead_tokens: int
    record_bytes: int
    fingerprint: bytes
    machine: Name
    live: Live | None
    memory: bytes
    peer_tp_size: int
    peer_fingerprint: bytes
    """Those that its peers have to have: its own, unless their tensor parallelism differs."""


class EndReason(IntEnum):
    """Why decode ends a transfer."""

    DONE = 0
    NOT_WANTED = 1
    """The blocks are not needed: refused, aborted, preempted, or given up after the deadline."""
    FAILED = 2
    """Some blocks did not arrive whole; decode computes them."""


_REASONS = frozenset(int(reason) for reason in EndReason)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages: an array of its type's number and its fields, in this order."""


class LinkHello(Message, frozen=True, array_like=True, tag=1):
    """Decode introduces itself; prefill answers with ``LinkWelcome`` or ``LinkRefused``."""

    side: Identity


class LinkWelcome(Message, frozen=True, array_like=True, tag=2):
    """Prefill accepts the peer."""

    side: Identity


class LinkRefused(Message, frozen=True, array_like=True, tag=3):
    """Prefill does not hand over to this peer: ``field`` differs."""

    field: str
    mine: str
    theirs: str


class AskForBlocks(Message, frozen=True, array_like=True, tag=4):
    """Decode wants the blocks of a transfer from ``first`` on; ``hashes`` are theirs, 32 bytes each.

    A higher ``attempt`` replaces a lower one. The source blocks are held for ``lease_ms`` after this message.
    """

    transfer: str
    attempt: int
    first: int
    hashes: bytes
    lease_ms: int


class BlocksGranted(Message, frozen=True, array_like=True, tag=5):
    """Prefill has the blocks, or will have them. Number 0 of the answers to an ``AskForBlocks``."""

    transfer: str
    attempt: int
    seq: int


class Ready(Message, frozen=True, array_like=True, tag=6):
    """Planes ``first_plane`` to ``last_plane`` of ``count`` blocks from ``first`` on can be read.

    ``places`` says where, in the connector's terms.
    """

    transfer: str
    attempt: int
    seq: int
    first: int
    count: int
    first_plane: int
    last_plane: int
    places: tuple[int, ...]


class Last(Message, frozen=True, array_like=True, tag=7):
    """All planes were announced: the blocks' hashes, and the sum of each block, 8 bytes each (little-endian)."""

    transfer: str
    attempt: int
    seq: int
    hashes: bytes
    sums: bytes


class Renew(Message, frozen=True, array_like=True, tag=8):
    """Decode still waits. It has the answers below ``received``, and has read those below ``read``."""

    transfer: str
    attempt: int
    received: int
    read: int
    lease_ms: int


class End(Message, frozen=True, array_like=True, tag=9):
    """Decode needs the source blocks no more."""

    transfer: str
    attempt: int
    reason: int


class Failed(Message, frozen=True, array_like=True, tag=10):
    """Prefill cannot hand over: it was aborted, the lease is over, or it does not know the transfer."""

    transfer: str
    attempt: int
    reason: str


class Stranger(Message, frozen=True, array_like=True, tag=11):
    """A message was for another process than this one, or this one does not know its sender."""

    target: bytes
    """Boot id that the message was for."""


AnyMessage = (
    LinkHello
    | LinkWelcome
    | LinkRefused
    | AskForBlocks
    | BlocksGranted
    | Ready
    | Last
    | Renew
    | End
    | Failed
    | Stranger
)
FromPrefill = BlocksGranted | Ready | Last | Failed
FromDecode = AskForBlocks | Renew | End

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(envelope: Envelope, message: AnyMessage) -> bytes:
    """Return a message with its header, as ``decode`` reads it."""
    header = _HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, envelope.sender, envelope.target)
    return header + _encoder.encode(message)


def decode(data: bytes) -> tuple[Envelope, AnyMessage]:
    """Read a message. Raises ``ProtocolError`` for anything else."""
    if not _HEADER.size < len(data) <= MOST_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; they have {_HEADER.size + 1} to {MOST_BYTES}")
    magic, version, _, sender, target = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("the message does not begin like one of a transfer")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol: the peer speaks version {version}, this process {PROTOCOL_VERSION}; "
            "run the same fdcache on both instances"
        )
    try:
        message = _decoder.decode(memoryview(data)[_HEADER.size :])
    except MALFORMED as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
    _check(message)
    return Envelope(sender, target), _shortened(message)


def _shortened(message: AnyMessage) -> AnyMessage:
    """Return a message with no more of a peer's words than fit into a log line."""
    if isinstance(message, Failed):
        return msgspec.structs.replace(message, reason=_cut(message.reason))
    if isinstance(message, LinkRefused):
        return LinkRefused(*map(_cut, msgspec.structs.astuple(message)))
    return message


def _cut(words: str) -> str:
    more = len(words) - MOST_WORDS
    return printable(words if more <= 0 else f"{words[:MOST_WORDS]} and {more} more characters")


def _check(message: AnyMessage) -> None:
    if isinstance(message, AskForBlocks | Last) and len(message.hashes) % 32:
        raise ProtocolError(f"hashes: {len(message.hashes)} bytes are not a multiple of 32")
    if isinstance(message, Last) and len(message.sums) * 4 != len(message.hashes):
        raise ProtocolError(f"sums: {len(message.sums)} bytes for {len(message.hashes) // 32} blocks")
    if isinstance(message, End) and message.reason not in _REASONS:
        raise ProtocolError(f"reason: {message.reason} is none of {sorted(_REASONS)}")
    if len(getattr(message, "transfer", "")) > MOST_NAME:
        raise ProtocolError(f"transfer: a name has at most {MOST_NAME} characters")
    numbers = [value for value in msgspec.structs.astuple(message) if isinstance(value, int)]
    if numbers and min(numbers) < 0:
        raise ProtocolError("a negative number")


_SAME = ("connector", "block_size", "planes", "draft_layers", "lookahead_tokens")


def difference(prefill: Identity, decode_side: Identity) -> LinkRefused | None:
    """Return the first field for which these two cannot hand over, None if they can."""
    if prefill.role == "decode":
        return LinkRefused("role", prefill.role, "prefill or mixed")
    if decode_side.role == "prefill":
        return LinkRefused("role", "decode or mixed", decode_side.role)
    for name in _SAME:
        mine, theirs = getattr(prefill, name), getattr(decode_side, name)
        if mine != theirs:
            shown = [each.hex() if isinstance(each, bytes) else str(each) for each in (mine, theirs)]
            return LinkRefused(name, *shown)
    return _unequal_ranks(prefill, decode_side)


def _unequal_ranks(prefill: Identity, decode_side: Identity) -> LinkRefused | None:
    """Return what differs of the ranks and their planes."""
    if prefill.peer_tp_size != decode_side.tp_size or decode_side.peer_tp_size != prefill.tp_size:
        return LinkRefused(
            "tp_size", *(f"{each.tp_size} for {each.peer_tp_size}" for each in (prefill, decode_side))
        )
    ratio = decode_side.tp_size / prefill.tp_size
    if not prefill.rank * ratio - 1 < decode_side.rank < (prefill.rank + 1) * ratio:
        return LinkRefused("rank", str(prefill.rank), str(decode_side.rank))
    if prefill.tp_size == decode_side.tp_size and prefill.record_bytes != decode_side.record_bytes:
        return LinkRefused("record_bytes", str(prefill.record_bytes), str(decode_side.record_bytes))
    if (
        prefill.peer_fingerprint != decode_side.fingerprint
        or decode_side.peer_fingerprint != prefill.fingerprint
    ):
        return LinkRefused("fingerprint", prefill.fingerprint.hex(), decode_side.peer_fingerprint.hex())
    return None

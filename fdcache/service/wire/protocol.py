"""Messages between a service and its clients, and their encoding."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache.errors import FdcacheError, ProtocolError
from fdcache.metadata import HashArray, Int32Array, UInt32Array, UInt64Array
from fdcache.service.wire.shared_memory import Geometry
from fdcache.settings.cache import PrefetchPolicy
from fdcache.tiers.traffic import Count, Traffic


class RefusalError(FdcacheError):
    """A request that is not carried out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


MAX_PATHS = 4096
MAX_BLOCKS = 131072
"""Most paths, and most blocks of all of them, in one look-up; also most blocks of any other message."""


class Live(msgspec.Struct, frozen=True):
    """How to tell whether a process is alive: its lock file, and its id in its own pid namespace.

    ``engine`` is the lock file of the scheduler process for which this one works; its own for a scheduler.
    """

    path: str
    engine: str
    pid: int
    pid_namespace: int
    start_time: int


# --- requests ----------------------------------------------------------------------------------------------


class FetchTerms(msgspec.Struct, frozen=True):
    """How long a client's requests wait for blocks that are read from storage.

    With the policy timeout: ``timeout`` seconds, and one more for every ``bandwidth`` bytes.
    """

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    timeout: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    bandwidth: Annotated[float, msgspec.Meta(gt=0)] = float(256 << 20)


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A scheduler process wants blocks of this layout. It has no copy under way in any earlier session."""

    layout: bytes
    live: Live
    name: str
    events: bool = False
    fetches: FetchTerms = FetchTerms()


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A worker process is going to copy for the session of the envelope."""

    rank: int
    live: Live


class Match(msgspec.Struct, frozen=True, tag="match"):
    """Look up paths: ``counts[i]`` hashes each, of which those before ``starts[i]`` are not asked for.

    ``fetches``, int64, are the client's own numbers of the requests for whose blocks storage may be read; 0: none.
    """

    counts: bytes
    starts: bytes
    hashes: bytes
    fetches: bytes = b""


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Begin to read what is stored of the path of request ``number``; its first ``start`` blocks are on the device."""

    number: int
    start: int
    hashes: bytes


class EndFetches(msgspec.Struct, frozen=True, tag="end_fetches"):
    """These requests have ended: nothing need be read for them, nor kept."""

    numbers: list[int]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Runs of earlier look-ups are used no more."""

    leases: list[int]


class Refill(msgspec.Struct, frozen=True, tag="refill"):
    """Slots to copy into are wanted."""

    count: int


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """The end of copies into granted slots, parents first; what was not ``copied`` is given back.

    ``tenants``: for each block below the root the 16 bytes of its tenant, in order; empty: nobody's.
    """

    slots: bytes
    parents: bytes
    hashes: bytes
    copied: bytes
    checksums: bytes
    tenants: bytes = b""


class Missed(msgspec.Struct, frozen=True, tag="missed"):
    """Look-ups that found nothing in the client's own reading of the table, and so were not asked.

    ``lookups`` whole paths were not asked. ``blocks[i]``, int32, are not there from the hash ``first[i]`` on.
    """

    lookups: Count
    first: bytes
    blocks: bytes


class LoadEnded(msgspec.Struct, frozen=True, tag="load_ended"):
    """What came of loads of blocks that are unverified, or that failed."""

    slots: bytes
    hashes: bytes
    copied: bytes


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The client is there; its own figures, a JSON object, for people to look at. ``resets``: those applied.

    Since the session began: ``traffic`` it copied, and how many look-ups ended at a block that it was still copying.
    """

    figures: bytes
    resets: int = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    in_flight_misses: Count = 0


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The client ends; no copy of its workers is under way."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A tool's question or command: a name and its arguments."""

    what: str
    arguments: dict[str, str | int | float | bool | list[str] | None] = {}


Request = (
    Register
    | Attach
    | Match
    | Prefetch
    | EndFetches
    | Release
    | Refill
    | Publish
    | Missed
    | LoadEnded
    | Heartbeat
    | Bye
    | Ask
)

# --- answers and notices -----------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The session is open."""

    session: int
    geometry: Geometry
    num_slots: int
    storage: bool = False


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The worker may map its extents and copy; ``fingerprint`` is that of the engine's present layout."""

    geometry: Geometry
    fingerprint: bytes


class Matched(msgspec.Struct, frozen=True, tag="matched"):
    """For each path a lease and how many blocks it pins; their slots and generations one after the other.

    ``fetched``, int32, has two numbers for each path: the first of these blocks that came from storage for the request,
    and the first behind those. ``states``, uint8, says what the service keeps for it: ``NOT_FETCHED`` nothing,
    ``FETCHED`` something until ``EndFetches``, ``FETCHING`` the same, and the look-up is to come again. Both are empty
    when no path has a number.
    """

    leases: list[int]
    counts: bytes
    slots: bytes
    generations: bytes
    unverified: bytes
    fetched: bytes = b""
    states: bytes = b""


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """Slots to copy into; fewer than were wanted, perhaps none, when there is no room."""

    slots: bytes
    generations: bytes
    num_slots: int


class Published(msgspec.Struct, frozen=True, tag="published"):
    """What became of each block: 0 stored, 1 there already, 2 without parent, 3 given back, 4 over quota."""

    hashes: bytes
    status: bytes


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a heartbeat: the figures of the client's layout, in the order of ``TIER_FIGURES``."""

    figures: list[int]
    device_resets: int = 0


class Events(msgspec.Struct, frozen=True, tag="events"):
    """What happened in the layout's tier: kinds (0 stored, 1 removed, 2 cleared, 3 lost), hashes, parents."""

    kinds: bytes
    hashes: bytes
    parents: bytes


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Slots of the stock from ``first`` on are wanted back: another layout is to have the memory."""

    first: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Done, with nothing more to say."""


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer to a tool, a JSON value."""

    value: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was not carried out. ``code`` is for programs, ``message`` for people."""

    code: str
    message: str


Answer = (
    Registered | Attached | Matched | Granted | Published | Alive | Events | Recall | Done | Told | Refused
)

NOT_FETCHED, FETCHED, FETCHING = range(3)

TIER_FIGURES = (
    "slots",
    "free",
    "writing",
    "ready",
    "pending",
    "evictable",
    "pins",
    "holds",
    "leases",
    "epoch",
    "evictions",
)


VERSION = 1
MAX_FRAME = 8 << 20
"""Most bytes of a message."""


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    """A request as it travels; the body is decoded once the version is known."""

    version: int
    session: int
    id: int
    body: msgspec.Raw


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    """An answer or a notice as it travels."""

    version: int
    id: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_request_frame = msgspec.msgpack.Decoder(RequestFrame)
_answer_frame = msgspec.msgpack.Decoder(AnswerFrame)
_request = msgspec.msgpack.Decoder(Request)
_answer = msgspec.msgpack.Decoder(Answer)


def encode_request(session: int, number: int, body: Request) -> bytes:
    """Pack a request."""
    return _encoder.encode((VERSION, session, number, body))


def encode_answer(number: int, body: Answer) -> bytes:
    """Pack an answer, or with number 0 a notice."""
    return _encoder.encode((VERSION, number, body))


def decode_request_frame(data: bytes) -> RequestFrame:
    """Unpack the outside of a request. Raises ``ProtocolError``."""
    try:
        return _request_frame.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from error


def decode_request(frame: RequestFrame) -> Request:
    """Unpack the body of a request. Raises ``ProtocolError`` for another version or a malformed body."""
    if frame.version != VERSION:
        raise ProtocolError(
            f"version {frame.version} is not {VERSION}, which is spoken here; upgrade one side"
        )
    try:
        request: Request = _request.decode(frame.body)
        return request
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed request: {error}") from error


def decode_answer(data: bytes) -> tuple[int, Answer]:
    """Unpack an answer: the number of its request, 0 for a notice. Raises ``ProtocolError``."""
    try:
        frame = _answer_frame.decode(data)
        if frame.version != VERSION:
            raise ProtocolError(
                f"the service speaks version {frame.version}, not {VERSION}; upgrade one side"
            )
        return frame.id, _answer.decode(frame.body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed answer: {error}") from error


def hashes_from(data: bytes, field: str = "hashes") -> HashArray:
    """Hashes, shape (n, 32). Raises ``ProtocolError`` naming the field."""
    if len(data) % 32 or len(data) > 32 * MAX_BLOCKS:
        raise ProtocolError(f"{field}: {len(data)} bytes are not up to {MAX_BLOCKS} hashes of 32 bytes")
    return np.frombuffer(data, np.uint8).reshape(-1, 32)


def int32_from(data: bytes, field: str, count: int | None = None) -> Int32Array:
    """An int32 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<i4"), count)


def int64_from(data: bytes, field: str, count: int | None = None) -> NDArray[np.int64]:
    """An int64 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<i8"), count)


def uint32_from(data: bytes, field: str, count: int | None = None) -> UInt32Array:
    """An uint32 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<u4"), count)


def uint64_from(data: bytes, field: str, count: int | None = None) -> UInt64Array:
    """An uint64 array. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("<u8"), count)


def uint8_from(data: bytes, field: str, count: int | None = None) -> NDArray[np.uint8]:
    """Bytes. Raises ``ProtocolError`` naming the field."""
    return _array(data, field, np.dtype("u1"), count)


def _array(data: bytes, field: str, dtype: np.dtype, count: int | None) -> NDArray:  # type: ignore[type-arg]
    if len(data) % dtype.itemsize or len(data) > dtype.itemsize * MAX_BLOCKS:
        raise ProtocolError(f"{field}: {len(data)} bytes are not up to {MAX_BLOCKS} items")
    if count is not None and len(data) != count * dtype.itemsize:
        raise ProtocolError(f"{field}: {len(data) // dtype.itemsize} items where {count} are needed")
    return np.frombuffer(data, dtype)


def number(value: Any) -> float:
    """A figure to reckon with; 0 for what is no number, or too large for one."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    except OverflowError:
        return 0.0

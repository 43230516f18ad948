"""Messages between a service and its clients, and their encoding: msgspec types in msgpack, versioned, limited in size.

A request is the array [version, session, id, body]; an answer is [version, id, body]. A notice is an answer that no
request asked for; its id is 0. Field names and tags are part of the format.
"""

from __future__ import annotations

import msgspec

from fdcache.errors import ProtocolError
from fdcache.hashing import TENANT_BYTES
from fdcache.hints import HintKind, HintStatus
from fdcache.machine.decoding import MALFORMED
from fdcache.service.wire.liveness import Live
from fdcache.service.wire.shared_memory import Geometry
from fdcache.tiers.fetches import FetchTerms
from fdcache.tiers.statistics import Count, ReadTotals, Traffic

VERSION = 8
MAX_FRAME = 8 << 20
"""Limit of a message in bytes."""
MAX_PATHS, MAX_BLOCKS = 4096, 131072
"""Limits of one look-up: paths, and blocks of all of them. ``MAX_BLOCKS`` also limits any other message."""

# --- requests -------------------------------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Register a scheduler process for the blocks of a layout. It has no copy in flight in any earlier session.

    ``forgotten``: as in the last ``Forgotten`` of this process, whichever service that was for.
    """

    layout: bytes
    live: Live
    name: str
    events: bool = False
    fetches: FetchTerms = FetchTerms()
    forgotten: Count = 0


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Announce a worker process that copies for the session of the envelope."""

    rank: int
    live: Live


class Match(msgspec.Struct, frozen=True, tag="match"):
    """Look up paths: ``counts[i]`` hashes each, of which those before ``starts[i]`` are not looked up.

    ``runs``, int64, holds the client's numbers for what is pinned of each path, new ones above 0. ``fetches``, int64,
    holds its numbers of the requests whose blocks may be read from storage; 0: none. ``requests``: their ids, for
    spans; empty if none are recorded.
    """

    runs: bytes
    counts: bytes
    starts: bytes
    hashes: bytes
    fetches: bytes = b""
    requests: list[str] = []


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Start to read the stored part of the path of request ``number``; its first ``start`` blocks are on the device.

    ``request``: its id, for spans; empty if none are recorded.
    """

    number: int
    start: int
    hashes: bytes
    request: str = ""


class FindStored(msgspec.Struct, frozen=True, tag="find_stored"):
    """Ask which of these blocks the storage has: states, of which a path may lack any."""

    hashes: bytes


class FindEnd(msgspec.Struct, frozen=True, tag="find_end"):
    """Ask after how many of these pages, more than ``first``, the storage has states."""

    hashes: bytes
    first: int


class EndFetches(msgspec.Struct, frozen=True, tag="end_fetches"):
    """End requests: stop reading for them and drop what was kept. ``keep``: what is being read is read to its end."""

    numbers: list[int]
    keep: bool = False


class Refill(msgspec.Struct, frozen=True, tag="refill"):
    """Ask for slots to copy into."""

    count: int


class DescribedPath(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one path, below the block ``parent``; that is empty for the first block of a prompt.

    ``items``: offset from the first token, length and name of each image or the like in them.
    """

    hashes: bytes
    tokens: bytes
    parent: bytes = b""
    tenant: str | None = None
    adapter: str | None = None
    items: list[tuple[int, int, str]] = []


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Tell a service with routers of blocks before they are published, and what came to and left the device.

    ``kinds`` and ``hashes``: of the device, in order, as in ``Events``; 2 clears what was told before, 3 is not sent.
    """

    paths: list[DescribedPath] = []
    kinds: bytes = b""
    hashes: bytes = b""


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Report finished copies into granted slots, parents first; slots that were not ``copied`` are given back.

    ``tenants`` holds 16 bytes for each block below the root, in order; empty when none of them has a tenant.
    """

    slots: bytes
    parents: bytes
    hashes: bytes
    copied: bytes
    checksums: bytes
    tenants: bytes = b""


class Missed(msgspec.Struct, frozen=True, tag="missed"):
    """Count look-ups that missed in the client's own view of the presence table and so were not sent.

    ``lookups`` whole paths were not sent. ``blocks[i]``, int32, blocks are missing from the hash ``first[i]`` on.
    ``sample``, uint64: the first 8 bytes of the hashes of all missing blocks, as far as they are less than ``below``.
    """

    lookups: Count
    first: bytes
    blocks: bytes
    sample: bytes = b""
    below: int = 0


class LoadEnded(msgspec.Struct, frozen=True, tag="load_ended"):
    """Report loads of unverified blocks, and loads that failed."""

    slots: bytes
    hashes: bytes
    copied: bytes


class HintGiven(msgspec.Struct, frozen=True):
    """A hint about blocks ``start`` to ``stop`` of a path; ``number`` is the client's. The rest is as in ``Hint``.

    ``whole``: it is about all of the blocks, not only those that nobody else has.
    """

    number: int
    kind: HintKind
    start: Count
    stop: Count
    seconds: float | None = None
    priority: int | None = None
    whole: bool = False


class Hints(msgspec.Struct, frozen=True, tag="hints"):
    """Tell what is known of the reuse of blocks of one path, in path order, by up to ``MOST_HINTS`` hints."""

    hashes: bytes
    hints: list[HintGiven]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Heartbeat of a client, with its own figures as a JSON object and the number of device ``resets`` it applied.

    Since the session began: the ``traffic`` it copied, and look-ups that ended at a block it was still copying.
    ``heard``: the number of the last ``Forget`` that arrived.
    """

    figures: bytes
    resets: int = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    in_flight_misses: Count = 0
    heard: Count = 0


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """Report that the device has lost what was deleted up to ``number``, and that none of it is being copied."""

    number: Count


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """End the session; none of its copies is in flight."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Question or command of a tool: a name and its arguments."""

    what: str
    arguments: dict[str, str | int | float | bool | list[str] | None] = {}


Request = (
    Register
    | Attach
    | Match
    | Prefetch
    | FindStored
    | FindEnd
    | EndFetches
    | Refill
    | Describe
    | Publish
    | Missed
    | LoadEnded
    | Hints
    | Heartbeat
    | Forgotten
    | Bye
    | Ask
)

# --- answers and notices --------------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The session is open; ``storage``: the service has a storage tier; ``notes``: blocks are to be described.

    ``ring``: path of the ring in which the client tells which runs it has pinned and unpinned.
    """

    session: int
    geometry: Geometry
    num_slots: int
    ring: str
    storage: bool = False
    notes: bool = False


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The worker may map its extents and copy; ``fingerprint`` is that of the engine's current layout."""

    geometry: Geometry
    fingerprint: bytes


class Matched(msgspec.Struct, frozen=True, tag="matched"):
    """A count of blocks pinned for each path; their slots and generations one after the other.

    ``runs`` has the numbers of the request, 0 for a path of which nothing is pinned.

    ``fetched``, int32, has two numbers for each path: the first of these blocks that storage delivered for the request,
    and the first behind those; while it is being fetched, those of its path that are still being read.
    ``states``, uint8, is ``NOT_FETCHED`` when the service keeps nothing for the request, ``FETCHED`` when it keeps
    something until ``EndFetches``, ``FETCHING`` when the look-up must be retried as well, ``FETCHING_LAST`` when in
    addition no reads will follow those in flight. Both are empty when no path has a number.
    """

    runs: bytes
    counts: bytes
    slots: bytes
    generations: bytes
    unverified: bytes
    fetched: bytes = b""
    states: bytes = b""


NOT_FETCHED, FETCHED, FETCHING, FETCHING_LAST = range(4)


class FoundStored(msgspec.Struct, frozen=True, tag="found_stored"):
    """``flags``, uint8: of each block asked for 1 if the storage has it or is writing it, else 0."""

    flags: bytes


class FoundEnd(msgspec.Struct, frozen=True, tag="found_end"):
    """``pages``: the most after which states are stored, 0 for none, and nothing while a store is asked."""

    pages: int | None


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """Slots to copy into; fewer than asked for, perhaps none, when there is no room."""

    slots: bytes
    generations: bytes
    num_slots: int


class Published(msgspec.Struct, frozen=True, tag="published"):
    """Result for each block: 0 stored, 1 already there, 2 no parent, 3 given back, 4 over quota."""

    hashes: bytes
    status: bytes


class HintResult(msgspec.Struct, frozen=True):
    """Outcome of the hint with a number; the fields are those of ``HintOutcome``."""

    number: int
    status: HintStatus
    blocks: int = 0
    lost: int = 0
    reason: str = ""


class Hinted(msgspec.Struct, frozen=True, tag="hinted"):
    """Outcomes of hints: of each as the answer to ``Hints``, and in a notice when the time of one is over."""

    results: list[HintResult]


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Answer to a heartbeat: the figures of the client's namespace, in the order of ``TierUsage``.

    ``reads``: those of its storage since that was opened, for whichever client.
    """

    figures: list[int]
    device_resets: int = 0
    reads: ReadTotals = ReadTotals()


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Events of the namespace's tier: kinds (0 stored, 1 removed, 2 cleared, 3 lost), hashes, parents."""

    kinds: bytes
    hashes: bytes
    parents: bytes


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Ask for the slots of the stock from ``first`` on: another namespace needs the memory."""

    first: int


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Ask to forget on the device what was deleted, up to the deletion with this ``number``.

    That are these blocks and all below them, and those of the tenants with these keys, 16 bytes each; or everything.
    """

    number: Count
    hashes: bytes = b""
    tenants: bytes = b""
    everything: bool = False

    @property
    def tenant_keys(self) -> list[bytes]:
        """The keys of the tenants."""
        return [self.tenants[at : at + TENANT_BYTES] for at in range(0, len(self.tenants), TENANT_BYTES)]


class DescribeAgain(msgspec.Struct, frozen=True, tag="describe_again"):
    """The service has dropped descriptions: what is stored from now on is to be described again."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""


class ToolAnswer(msgspec.Struct, frozen=True, tag="told"):
    """Answer to a tool, a JSON value, or a part of it if ``more`` parts follow with the same id."""

    value: bytes
    more: bool = False


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was not carried out. ``code`` is for programs, ``message`` for people."""

    code: str
    message: str


Answer = (
    Registered
    | Attached
    | Matched
    | FoundStored
    | FoundEnd
    | Granted
    | Published
    | Hinted
    | Alive
    | Events
    | Recall
    | Forget
    | DescribeAgain
    | Done
    | ToolAnswer
    | Refused
)


# --- encoding -------------------------------------------------------------------------------------------------


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    """Envelope of a request; its body is decoded once the version is known."""

    version: int
    session: int
    id: int
    body: msgspec.Raw


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    """Envelope of an answer or a notice."""

    version: int
    id: int
    body: msgspec.Raw


class _Tag(msgspec.Struct):
    """The name of a message, of which nothing else is decoded."""

    type: str


_encoder = msgspec.msgpack.Encoder()
_tag = msgspec.msgpack.Decoder(_Tag)
_request_frame = msgspec.msgpack.Decoder(RequestFrame)
_answer_frame = msgspec.msgpack.Decoder(AnswerFrame)
_request = msgspec.msgpack.Decoder(Request)
_answer = msgspec.msgpack.Decoder(Answer)


def encode_request(session: int, number: int, body: Request) -> bytes:
    """Return the bytes of a request of a session; answers repeat its number."""
    return _encoder.encode((VERSION, session, number, body))


def encode_answer(number: int, body: Answer) -> bytes:
    """Encode an answer, or with number 0 a notice."""
    return _encoder.encode((VERSION, number, body))


def decode_request_frame(data: bytes) -> RequestFrame:
    """Decode the envelope of a request. Raises ``ProtocolError``."""
    try:
        return _request_frame.decode(data)
    except MALFORMED as error:
        raise ProtocolError(f"not a request: {error}") from error


def is_question(frame: RequestFrame) -> bool:
    """Return True for the question of a tool; only its name is decoded, in a fraction of the time."""
    try:
        return _tag.decode(frame.body).type == "ask"
    except MALFORMED:
        return False


def decode_request(frame: RequestFrame) -> Request:
    """Decode the body of a request. Raises ``ProtocolError`` for another version or a malformed body."""
    if frame.version != VERSION:
        raise ProtocolError(
            f"the client speaks version {frame.version}, the service version {VERSION}; upgrade one side"
        )
    try:
        request: Request = _request.decode(frame.body)
        return request
    except MALFORMED as error:
        raise ProtocolError(f"malformed request: {error}") from error


def decode_answer(data: bytes) -> tuple[int, Answer]:
    """Decode an answer and the number of its request, 0 for a notice. Raises ``ProtocolError``."""
    try:
        frame = _answer_frame.decode(data)
        if frame.version != VERSION:
            raise ProtocolError(
                f"the service speaks version {frame.version}, the client version {VERSION}; upgrade one side"
            )
        return frame.id, _answer.decode(frame.body)
    except MALFORMED as error:
        raise ProtocolError(f"malformed answer: {error}") from error

"""Hints: what a client knows of the reuse of its request's blocks, and what became of it.

A request carries them in one of three forms, which ``read_hints`` takes from its extra fields::

    {"hints": [{"kind": "return", "seconds": 30}]}
    {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    {"kv_hints": {"protocol_version": "0.1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "kv.retain", "action_version": "1.0",
         "payload": {"directives": [{"start": 0, "end": 4096, "priority": 80, "duration": 300}]}}]}}
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, overload

import msgspec

from fdcache._core import HintKind as NativeKind
from fdcache.errors import HintError

MOST_HINTS = 16
"""Most hints of a request."""

LONGEST_ID = 256
"""Most characters of a hint's ``id``."""

LONGEST_SECONDS = 30 * 86_400.0
"""Longest time of a hint."""


class HintKind(StrEnum):
    """What a hint says of the blocks after their request has ended."""

    ONCE = "once"
    """They are not needed again: a prompt that was read once."""
    RELEASE = "release"
    """They are not needed any more: the session is over."""
    RETAIN = "retain"
    """They may be needed at any moment within some seconds."""
    RETURN = "return"
    """They will be needed after about some seconds."""
    PRIORITY = "priority"
    """They are worth more than others: 1 to 100."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A hint about the tokens from ``start`` to ``end`` of a request; None: to its end, output included.

    ``output``: about the output alone. ``seconds`` belongs to ``retain`` and ``return``, ``priority`` to ``priority``.
    Without a range a hint is about the blocks that no other request's path goes through. ``id`` is for the client, to
    know the outcome by. Raises ``HintError``.
    """

    kind: HintKind
    seconds: float | None = None
    priority: int | None = None
    start: int = 0
    end: int | None = None
    output: bool = False
    id: str = ""

    def __post_init__(self) -> None:
        timed = self.kind in (HintKind.RETAIN, HintKind.RETURN)
        if timed != (self.seconds is not None):
            raise HintError(f"hint {self.kind.value}: seconds is for retain and return, which need it")
        if (self.kind is HintKind.PRIORITY) != (self.priority is not None):
            raise HintError(f"hint {self.kind.value}: priority is for the kind priority, which needs it")
        if self.seconds is not None and not 0 < self.seconds <= LONGEST_SECONDS:
            raise HintError(
                f"hint seconds {self.seconds}: give more than 0 and at most {LONGEST_SECONDS:.0f}"
            )
        if self.priority is not None and not 1 <= self.priority <= 100:
            raise HintError(f"hint priority {self.priority}: give 1 to 100")
        if len(self.id) > LONGEST_ID:
            raise HintError(f"hint id {self.id[:16]!r}...: give at most {LONGEST_ID} characters")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise HintError(f"hint start {self.start}, end {self.end}: give tokens with 0 <= start < end")
        if self.output and (self.start or self.end is not None):
            raise HintError("hint output: it is about the output alone; leave start and end out")

    @classmethod
    def once(cls) -> Hint:
        """The blocks are not needed again."""
        return cls(kind=HintKind.ONCE)

    @classmethod
    def release(cls) -> Hint:
        """The session is over."""
        return cls(kind=HintKind.RELEASE)

    @classmethod
    def retain(cls, seconds: float) -> Hint:
        """The blocks may be needed until then."""
        return cls(kind=HintKind.RETAIN, seconds=seconds)

    @classmethod
    def returns(cls, seconds: float) -> Hint:
        """The next request of the session comes after about this time."""
        return cls(kind=HintKind.RETURN, seconds=seconds)

    @property
    def value(self) -> float:
        """Seconds or priority; 0.0 without either."""
        return float(self.seconds or self.priority or 0.0)

    @property
    def has_range(self) -> bool:
        """True if it is about a range of tokens."""
        return self.output or self.start > 0 or self.end is not None

    @property
    def keeps(self) -> bool:
        """True if blocks are worth more for it, at some time."""
        return self.kind not in (HintKind.ONCE, HintKind.RELEASE)

    @property
    def takes_room(self) -> bool:
        """True if it asks for room, whatever comes of it. When blocks return tells as well when they do not."""
        return self.keeps and self.kind is not HintKind.RETURN


class GivenHints(NamedTuple):
    """Hints of a request that has ended, and what each says of the records of its path, as ``Tier.hint`` takes it."""

    request_id: str
    hints: Sequence[Hint]
    said: Sequence[tuple[NativeKind, float, int, int, bool]]


class HintStatus(StrEnum):
    """What became of a hint."""

    TAKEN = "taken"
    """In force. A hint that keeps blocks has another outcome later."""
    SENT = "sent"
    """Passed on to the service, whose tiers answer it: its outcomes there come later."""
    KEPT = "kept"
    """Its blocks were there until they were used again, or for the whole time."""
    EVICTED_EARLY = "evicted_early"
    OVER_BUDGET = "over_budget"
    """As many blocks as may be kept for hints were kept already."""
    IGNORED = "ignored"
    """No tier's order of eviction learns: FDCACHE_EVICTION is not learned; or ``reason`` says why."""
    NO_BLOCK = "no_block"
    """No block of its own is cached."""
    REFUSED = "refused"
    """It is malformed, of an unknown type, or asks for what cannot be done: ``reason`` says which."""


EARLY_REASONS = ("room", "removed")
"""Why blocks that were to stay did not."""


class HintOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one hint of a request. ``blocks`` were concerned, ``lost`` of them were evicted early.

    ``reason`` says why it was refused, or blocks were evicted: ``room`` was needed and other blocks were worth more,
    or they were ``removed``: by a reset, a quota or an idle limit, or so long ago that nothing is known.

    ``by_service``: it is about the tiers of a service; a hint has an outcome for these and one for the engine's own.
    """

    request_id: str
    id: str = ""
    kind: HintKind | None = None
    status: HintStatus
    blocks: int = 0
    lost: int = 0
    reason: str = ""
    by_service: bool = False


class HintOutcomes(Sequence[HintOutcome]):
    """The outcomes of the hints of a request, each of which is made when it is asked for."""

    __slots__ = ("given",)

    def __init__(self, given: GivenHints) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given.hints)

    @overload
    def __getitem__(self, index: int) -> HintOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> list[HintOutcome]: ...
    def __getitem__(self, index: int | slice) -> HintOutcome | list[HintOutcome]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._outcome(range(len(self))[index])

    @abstractmethod
    def _outcome(self, index: int) -> HintOutcome:
        """Return the outcome of one hint."""


class SentHints(HintOutcomes):
    """The outcomes of hints for a service when they are given: SENT for all, or IGNORED for a ``reason``."""

    __slots__ = ("reason", "status")

    def __init__(self, given: GivenHints, reason: str = "") -> None:
        super().__init__(given)
        self.status = HintStatus.IGNORED if reason else HintStatus.SENT
        self.reason = reason

    def _outcome(self, index: int) -> HintOutcome:
        hint = self.given.hints[index]
        return HintOutcome(
            request_id=self.given.request_id,
            id=hint.id,
            kind=hint.kind,
            status=self.status,
            reason=self.reason,
            by_service=True,
        )


class _Wish(NamedTuple):
    """``kv.fetch``: the request's blocks are to be read from this node, which has that many of them."""

    source: str
    blocks: int


def _fetches_nothing(source: str) -> str:
    return "this engine reads from no node that a hint names"


def read_hints(
    request_id: str, extra: object, fetch: Callable[[str], str] = _fetches_nothing
) -> tuple[list[Hint], list[HintOutcome]]:
    """Return the hints in a request's extra fields, and the outcomes of those that are refused. Raises nothing.

    ``extra``: a mapping with any fields; anything else holds no hints. ``fetch``: begins to read the request's blocks
    from the node with an address, and returns why that cannot be, or nothing. It is called for the first ``kv.fetch``
    alone, which has its outcome among the others.
    """
    hints: list[Hint] = []
    outcomes: list[HintOutcome] = []
    named = ""
    for name, hint in _given(extra if isinstance(extra, Mapping) else {}):
        reason = hint if isinstance(hint, str) else ""
        if len(hints) == MOST_HINTS:
            reason = f"a request may have {MOST_HINTS} hints"
        if isinstance(hint, Hint) and not reason:
            hints.append(hint)
            continue
        if isinstance(hint, _Wish) and not reason:
            reason = f"kv.fetch: {named} was named already" if named else _prefixed(fetch(hint.source))
            named = named or hint.source
        outcomes.append(
            HintOutcome(
                request_id=request_id,
                id=name[:LONGEST_ID],
                status=HintStatus.REFUSED if reason else HintStatus.TAKEN,
                reason=reason,
                blocks=hint.blocks if isinstance(hint, _Wish) else 0,
            )
        )
        if len(outcomes) == MOST_HINTS:
            break
    return hints, outcomes


def _prefixed(reason: str) -> str:
    return f"kv.fetch: {reason}" if reason else ""


def _given(extra: Mapping[str, Any]) -> Iterator[tuple[str, Hint | _Wish | str]]:
    """Yield the id of each hint, and the hint or why it is refused."""
    if (plain := extra.get("hints")) is not None:
        for item in plain if isinstance(plain, list) else [plain]:
            name = item.get("id", "") if isinstance(item, dict) else ""
            yield str(name), _plain(item)
    if (control := extra.get("cache_control")) is not None:
        yield "cache_control", _cache_control(control)
    if (envelope := extra.get("kv_hints")) is not None:
        yield from _enveloped(envelope)


def _plain(item: Any) -> Hint | str:
    try:
        return msgspec.convert(item, Hint)
    except (msgspec.ValidationError, HintError) as error:
        return str(error)


def _cache_control(control: Any) -> Hint | str:
    """Read ``{"type": "ephemeral", "ttl": "5m"}``, as Anthropic's requests have it."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return "cache_control: the type is not 'ephemeral'"
    ttl = control.get("ttl", "5m")
    found = re.fullmatch(r"(\d{1,6})([smh])", ttl) if isinstance(ttl, str) else None
    if found is None:
        return f"cache_control: ttl {ttl!r} is not a time such as 5m or 1h"
    return _made(HintKind.RETAIN, seconds=float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]])


def _made(kind: HintKind, **fields: Any) -> Hint | str:
    try:
        return Hint(kind=kind, **fields)
    except HintError as error:
        return str(error)


# --- the envelope of engines -------------------------------------------------------------------------------


class _Directive(msgspec.Struct, forbid_unknown_fields=True):
    """A part of ``kv.retain``: priority 0 releases the range, a higher one keeps it, for a time if there is one."""

    priority: Annotated[int, msgspec.Meta(ge=0, le=100)]
    start: int = 0
    end: int | None = None
    duration: float | None = None
    covers_output: bool = False


class _Retain(msgspec.Struct):
    directives: Annotated[list[_Directive], msgspec.Meta(max_length=MOST_HINTS)]
    scope: str | None = None


class _Fetch(msgspec.Struct):
    """``kv.fetch`` 1.0: a peer has blocks of the request. Its tokens tell which: a router's hashes are its own."""

    source_control_endpoint: Annotated[str, msgspec.Meta(min_length=1)]
    block_hashes: Annotated[list[int], msgspec.Meta(min_length=1, max_length=1 << 20)]
    mode: str = "copy"
    no_retain: Any = msgspec.UNSET


class _Action(msgspec.Struct):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class _Envelope(msgspec.Struct):
    protocol_version: str
    message_id: str
    actions: list[_Action]


ENVELOPE_VERSION = "0"
"""Major version of the envelope."""

_OWN = "fdcache."
"""Own action types: this prefix and a ``HintKind``, with the fields of a ``Hint`` as payload."""


def _enveloped(given: Any) -> Iterator[tuple[str, Hint | _Wish | str]]:
    """Read the envelope of vLLM and SGLang, as their own type, as JSON or as a mapping."""
    try:
        envelope = msgspec.convert(given, _Envelope, from_attributes=True)
    except msgspec.ValidationError as error:
        yield "", f"kv_hints: {error}"
        return
    if envelope.protocol_version.partition(".")[0] != ENVELOPE_VERSION:
        version = envelope.protocol_version
        yield envelope.message_id, f"kv_hints: protocol version {version!r} is not {ENVELOPE_VERSION}.x"
        return
    if not envelope.actions:
        yield envelope.message_id, "kv_hints: actions: there is none"
    for action in envelope.actions:
        name = action.action_id
        kind = action.action_type.removeprefix(_OWN)
        if action.action_version.partition(".")[0] != "1":
            yield name, f"{action.action_type}: version {action.action_version!r} is not 1.x"
        elif action.action_type == "kv.retain":
            yield from ((name, hint) for hint in _retained(name, action.payload))
        elif action.action_type == "kv.fetch":
            yield name, _wished(action.payload)
        elif action.action_type.startswith(_OWN) and kind in list(HintKind):
            yield name, _plain({**action.payload, "kind": kind, "id": name})
        else:
            yield (
                name,
                f"{action.action_type}: unknown type; use kv.retain, kv.fetch or fdcache.{'|'.join(HintKind)}",
            )


def _wished(payload: Mapping[str, Any]) -> _Wish | str:
    """Return what is to be fetched, or what is wrong with it."""
    try:
        fetch = msgspec.convert(payload, _Fetch)
    except msgspec.ValidationError as error:
        return f"kv.fetch: {error}"
    if not all(0 <= each < 1 << 64 for each in fetch.block_hashes):
        return "kv.fetch: block_hashes are numbers of 64 bits"
    if fetch.mode != "copy" or fetch.no_retain is not msgspec.UNSET:
        return "kv.fetch: only the mode 'copy' without no_retain is known"
    return _Wish(fetch.source_control_endpoint, len(set(fetch.block_hashes)))


def _retained(name: str, payload: Mapping[str, Any]) -> Iterator[Hint | str]:
    try:
        retain = msgspec.convert(payload, _Retain)
    except msgspec.ValidationError as error:
        yield f"kv.retain: {error}"
        return
    if not retain.directives:
        yield "kv.retain: directives: there is none"
    for each in retain.directives:
        place = {"start": each.start, "end": each.end, "output": each.covers_output}
        if not each.priority:
            yield _made(HintKind.RELEASE, id=name, **place)
        elif each.duration is not None:
            yield _made(HintKind.RETAIN, id=name, seconds=each.duration, **place)
        else:
            yield _made(HintKind.PRIORITY, id=name, priority=each.priority, **place)

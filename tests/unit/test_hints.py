"""Hints: how a request carries them, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fdcache import _core
from fdcache.errors import HintError
from fdcache.hints import MOST_HINTS, Hint, HintKind, HintStatus, read_hints


def envelope(*actions: Any, version: str = "0.1") -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": version, "message_id": "m", "actions": list(actions)}}


def action(kind: str, payload: dict[str, Any], version: str = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def retain(**directive: Any) -> dict[str, Any]:
    return action("kv.retain", {"scope": None, "directives": [directive]})


def fetch(**changes: Any) -> dict[str, Any]:
    payload = {"source_control_endpoint": "tcp://host:5560", "block_hashes": [1, (1 << 64) - 1]}
    return action("kv.fetch", payload | changes)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"hints": [{"kind": "return", "seconds": 30, "id": "x"}]},
            Hint(kind=HintKind.RETURN, seconds=30, id="x"),
        ),
        ({"hints": {"kind": "once"}}, Hint.once()),
        ({"cache_control": {"type": "ephemeral"}}, Hint.retain(300)),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, Hint.retain(3600)),
        (envelope(retain(priority=80, duration=60)), Hint(kind=HintKind.RETAIN, seconds=60, id="a")),
        (
            envelope(retain(priority=80, start=64, end=128)),
            Hint(kind=HintKind.PRIORITY, priority=80, start=64, end=128, id="a"),
        ),
        (
            envelope(retain(priority=0, covers_output=True)),
            Hint(kind=HintKind.RELEASE, output=True, id="a"),
        ),
        (
            envelope(action("fdcache.return", {"seconds": 5.5})),
            Hint(kind=HintKind.RETURN, seconds=5.5, id="a"),
        ),
    ],
)
def test_every_form_of_a_hint_is_read(extra: dict[str, Any], expected: Hint) -> None:
    assert read_hints("r", extra) == ([expected], [])


def test_the_envelope_may_be_the_engine_s_own_type() -> None:
    typed = SimpleNamespace(
        protocol_version="0.1",
        message_id="m",
        actions=[SimpleNamespace(**retain(priority=1, duration=9.0))],
    )
    assert read_hints("r", {"kv_hints": typed}) == ([Hint(kind=HintKind.RETAIN, seconds=9, id="a")], [])


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"hints": [{"kind": "keep"}]}, "keep"),
        ({"hints": 7}, "object"),
        ({"hints": [{"kind": "retain"}]}, "seconds is for retain"),
        ({"hints": [{"kind": "once", "seconds": 3}]}, "seconds is for retain"),
        ({"hints": [{"kind": "retain", "seconds": 1e9}]}, "at most"),
        ({"hints": [{"kind": "priority", "priority": 101}]}, "1 to 100"),
        ({"hints": [{"kind": "once", "start": 9, "end": 9}]}, "0 <= start < end"),
        ({"hints": [{"kind": "once", "start": 9, "output": True}]}, "leave start and end out"),
        ({"cache_control": {"type": "persistent"}}, "not 'ephemeral'"),
        ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "such as 5m"),
        ({"kv_hints": "x"}, "kv_hints"),
        (envelope(retain(priority=1), version="1.0"), "protocol version '1.0'"),
        (envelope(action("kv.move", {})), "unknown type"),
        (envelope(action("kv.fetch", {})), "source_control_endpoint"),
        (envelope(fetch(block_hashes=[-1])), "64 bits"),
        (envelope(fetch(block_hashes=[1 << 64])), "64 bits"),
        (envelope(fetch(block_hashes=[])), "block_hashes"),
        (envelope(fetch(block_hashes=["a"])), "block_hashes"),
        (envelope(fetch(block_hashes=[True])), "block_hashes"),
        (envelope(fetch(block_hashes=None)), "block_hashes"),
        (envelope(fetch(source_control_endpoint="")), "source_control_endpoint"),
        (envelope(fetch(source_control_endpoint=None)), "source_control_endpoint"),
        (envelope(fetch(mode=None)), "mode"),
        (envelope(fetch(mode="move")), "mode 'copy'"),
        (envelope(fetch(no_retain=False)), "no_retain"),
        (envelope(fetch()), "kv.fetch: this engine reads from no node that a hint names"),
        (envelope(action("kv.retain", {}, "2.0")), "version '2.0'"),
        (envelope(retain(priority=101)), "kv.retain"),
        (envelope(retain(priority=5, extra=1)), "extra"),
        (envelope(action("kv.retain", {"directives": []})), "directives: there is none"),
        (envelope(), "actions: there is none"),
        (envelope(action("fdcache.once", {"seconds": 1})), "seconds is for retain"),
    ],
)
def test_what_is_wrong_is_refused_with_its_reason_and_raises_nothing(
    extra: dict[str, Any], reason: str
) -> None:
    hints, (refused,) = read_hints("r", extra)
    assert hints == []
    assert (refused.request_id, refused.status) == ("r", HintStatus.REFUSED)
    assert reason in refused.reason


def test_a_fetch_is_begun_and_answered() -> None:
    asked: list[str] = []

    def begun(source: str) -> str:
        asked.append(source)
        return ""

    hints, (taken,) = read_hints("r", envelope(fetch()), begun)
    assert (hints, asked) == ([], ["tcp://host:5560"])
    assert (taken.id, taken.status, taken.blocks, taken.reason) == ("a", HintStatus.TAKEN, 2, "")
    _, (refused,) = read_hints("r", envelope(fetch()), lambda source: f"{source}: no connection")
    assert (refused.status, refused.reason) == (
        HintStatus.REFUSED,
        "kv.fetch: tcp://host:5560: no connection",
    )
    other = fetch(source_control_endpoint="tcp://other:1")
    _, (_, second) = read_hints("r", envelope(fetch(), other), begun)
    assert asked == ["tcp://host:5560"] * 2, "one node is named for a request"
    assert (second.status, second.reason) == (
        HintStatus.REFUSED,
        "kv.fetch: tcp://host:5560 was named already",
    )


def test_one_wrong_hint_leaves_the_others_in_force() -> None:
    hints, refused = read_hints("r", {"hints": [{"kind": "once"}, {"kind": "?"}, {"kind": "release"}]})
    assert [hint.kind for hint in hints] == [HintKind.ONCE, HintKind.RELEASE]
    assert len(refused) == 1


def test_a_request_has_a_limited_number_of_hints() -> None:
    hints, refused = read_hints("r", {"hints": [{"kind": "once"}] * 1000})
    assert len(hints) == MOST_HINTS
    assert 0 < len(refused) <= MOST_HINTS
    assert "a request may have" in refused[0].reason


def test_a_request_without_hints_has_none() -> None:
    assert read_hints("r", None) == ([], [])
    assert read_hints("r", {"temperature": 1, "hints": None}) == ([], [])


@pytest.mark.parametrize("extra", ["hints", 5, [{"kind": "once"}]])
def test_fields_of_another_kind_hold_no_hints(extra: object) -> None:
    assert read_hints("r", extra) == ([], [])


def test_a_hint_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(HintError, match="priority"):
        Hint(kind=HintKind.PRIORITY)
    with pytest.raises(HintError, match="seconds"):
        Hint.retain(0)


@pytest.mark.parametrize(
    ("hint", "blocks"),
    [
        (Hint.once(), range(10)),
        (Hint(kind=HintKind.ONCE, start=65), range(2, 10)),
        (Hint(kind=HintKind.ONCE, end=127), range(1)),
        (Hint(kind=HintKind.ONCE, output=True), range(7, 10)),
    ],
)
def test_a_hint_is_about_the_whole_blocks_of_its_range(hint: Hint, blocks: range) -> None:
    ((_, _, start, stop, is_own),) = _core.read_hints([hint], 400, 64, 10, 1)
    assert range(start, stop) == blocks
    assert is_own == (not hint.has_range)
    ((_, _, first, last, _),) = _core.read_hints([hint], 400, 64, 10, 3)
    assert (first, last) == (3 * start, 3 * stop)


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (Hint.once(), (_core.HintKind.ONCE, 0.0)),
        (Hint.release(), (_core.HintKind.RELEASE, 0.0)),
        (Hint.retain(2.5), (_core.HintKind.RETAIN, 2.5)),
        (Hint.returns(60), (_core.HintKind.RETURN, 60.0)),
        (Hint(kind=HintKind.PRIORITY, priority=7), (_core.HintKind.PRIORITY, 7.0)),
    ],
)
def test_each_kind_of_hint_is_read(hint: Hint, said: tuple[object, float]) -> None:
    ((kind, value, *_),) = _core.read_hints([hint], 400, 64, 10, 1)
    assert (kind, value) == said

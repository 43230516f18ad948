"""Engines with FdcacheLinker one after the other, since one that ends takes all children of its process with it."""

from __future__ import annotations

from pathlib import Path

from tests.service_help import ServiceProcess
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush, linker_options, running_engine
from tests.sglang.passages import WHOLE, flip_all
from tests.sglang.test_linker import from_host


def test_a_restart_finds_in_storage_what_an_own_tier_has_stored(
    model: Path, prompts: list[list[int]], computed: list[Answer], tmp_path: Path
) -> None:
    options = linker_options(
        FDCACHE_HOST_MEMORY="16MiB",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(tmp_path / "disk"),
        FDCACHE_STORAGE_SIZE="32MiB",
    )
    longer = [*prompts[0][:WHOLE], *prompts[1][: 6 * PAGE], 7]
    with running_engine(model, **options) as first:
        assert ask(first, prompts[0]).equals(computed[0])
        expected = ask(first, longer)
        asked_until(first, longer, lambda answer: answer.cached.get("host") == 30 * PAGE)
    with running_engine(model, **options) as second:
        whole = asked_until(second, longer, lambda answer: answer.cached.get("host") == 30 * PAGE)
        assert whole.equals(expected)
        assert asked_until(second, prompts[0], from_host).equals(computed[0])


def test_flipped_bytes_are_refused_where_all_is_verified(
    model: Path, service: ServiceProcess, prompts: list[list[int]], computed: list[Answer]
) -> None:
    options = linker_options(FDCACHE_SERVER=service.address, FDCACHE_VERIFY="all")
    with running_engine(model, **options) as engine:
        asked_until(engine, prompts[0], from_host)
        service.ask("reset", tier="storage")
        flip_all(service)
        flush(engine)
        answer = ask(engine, prompts[0])
        assert answer.equals(computed[0])
        assert answer.cached.get("host", 0) < WHOLE
        assert asked_until(engine, prompts[0], from_host).equals(computed[0])


def test_wrong_bytes_are_noticed(model: Path, prompts: list[list[int]], computed: list[Answer]) -> None:
    """The control: an engine whose pages are loaded with the bytes of one of them answers otherwise."""
    options = linker_options("WrongLinker", "tests.sglang.linkers", FDCACHE_HOST_MEMORY="16MiB")
    with running_engine(model, **options) as engine:
        ask(engine, prompts[0])
        assert asked_until(engine, prompts[0], from_host).tokens != computed[0].tokens

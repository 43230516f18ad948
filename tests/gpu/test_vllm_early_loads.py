"""vLLM is told of a load while it is copied, and the step that uses it waits on the GPU. Skipped without vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: python -m tests.vllm.setup")

import torch

from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from tests.vllm_sides import BLOCK, BLOCKS, Engine, request

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PAGE = 4 << 20
LARGE = KVLayout.build(
    [PlaneSpec(PlaneKind.KEY, "uint8", (PAGE,))], model="m", revision="r", block_size=BLOCK, num_layers=2
)
LOADED = BLOCKS - 2
TOKENS = list(range(LOADED * BLOCK + 1))
TRIES = 20


def engine_of(**variables: str) -> Engine:
    given = {"FDCACHE_HOST_MEMORY": "512MiB", "FDCACHE_VERIFY": "storage"}
    engine = Engine(LARGE, "cuda", **(given | variables))
    engine.compute(request("first", TOKENS), list(range(BLOCKS - 1)), fill=7)
    engine.load(request("second", TOKENS), list(range(LOADED)))  # tells how fast the link is
    return engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = engine_of()
    yield made
    made.close()


def tell_early(engine: Engine, name: str) -> bool:
    """Load a prompt; return True if vLLM was told of it before the copies had ended."""
    for pages in engine.pages.values():
        pages.zero_()
    torch.cuda.synchronize()
    source = request(name, TOKENS)
    assert engine.side.matched(source, 0) == LOADED * BLOCK
    engine.side.allocated(source, (list(range(LOADED)),), LOADED * BLOCK)
    while name not in engine.step():
        pass
    return engine.worker.is_loading


def compute(engine: Engine, name: str, *, waits: bool = True) -> list[torch.Tensor]:
    """Compute the step that uses a load; return what its layers read."""
    source = request(name, TOKENS)
    made = engine.side.step(engine.admit(source, list(range(BLOCKS - 1)), LOADED * BLOCK))
    assert made.received == [name]
    if waits:
        engine.worker.submit(made)
    read = [pages[:LOADED].clone() for pages in engine.pages.values()]
    engine.worker.computed()
    torch.cuda.synchronize()
    engine.worker.poll()
    engine.side.finished(source, ([],))
    return read


def read_early(engine: Engine, *, waits: bool = True) -> list[torch.Tensor]:
    for number in range(TRIES):
        name = f"again-{number}"
        was_early = tell_early(engine, name)
        read = compute(engine, name, waits=waits)
        if was_early:
            return read
        assert all(bool((each == 7).all()) for each in read)
    pytest.fail(f"none of {TRIES} loads of {LOADED * 2 * PAGE >> 20} MiB was told before its end")


def test_the_step_of_a_load_that_was_told_early_reads_its_bytes(engine: Engine) -> None:
    assert all(bool((each == 7).all()) for each in read_early(engine))
    engine.settle()
    assert not engine.worker.is_loading
    early = engine.side._early
    assert early is not None
    assert not early._open
    assert not early.are_told


def test_a_step_that_does_not_wait_reads_other_bytes(engine: Engine) -> None:
    assert not all(bool((each == 7).all()) for each in read_early(engine, waits=False))


def test_loads_that_are_verified_are_told_at_their_end() -> None:
    engine = engine_of(FDCACHE_VERIFY="all")
    try:
        assert not any(tell_early(engine, f"verified-{number}") for number in range(TRIES))
    finally:
        engine.close()


def test_loads_that_are_told_early_do_not_overwrite_what_an_aborted_request_has_left(engine: Engine) -> None:
    for number in range(TRIES):
        name = f"aborted-{number}"
        if not tell_early(engine, name):
            continue
        engine.side.finished(request(name, TOKENS), ([],))
        other = request(f"other-{number}", list(range(1000, 1000 + BLOCK)))
        engine.side.matched(other, 0)
        engine.step(engine.admit(other, [0]), fill=9)
        torch.cuda.synchronize()
        engine.settle()
        assert engine.content(0) == {9}
        return
    pytest.fail("no load was told before its end")

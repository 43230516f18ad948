"""Dynamo's own indexer follows services and engines; what it answers is what the services have."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq

from fdcache.layout import KVLayout
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from tests.router.engine import router_engine
from tests.router.environments import interpreter
from tests.router.indexer import Found, Indexer, Prompt, free_port, in_service, indexer
from tests.service_engine import BLOCK, Engine, layout, ready_blocks
from tests.service_help import LocalService, ServiceProcess, local_service, next_line, spawned, until

pytestmark = pytest.mark.skipif(
    interpreter("dynamo") is None, reason="Dynamo's indexer is missing: run python -m tests.router.setup"
)


def settings(folder: Path, **others: str) -> dict[str, str]:
    return {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(folder),
        "FDCACHE_STORAGE_SIZE": "16MiB",
        "FDCACHE_KV_EVENTS": f"tcp://127.0.0.1:{free_port()}",
        "FDCACHE_KV_EVENTS_REPLAY": f"tcp://127.0.0.1:{free_port()}",
        **others,
    }


def make_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Prompts of several tenants that begin alike, branch and repeat."""
    dice = random.Random(seed)
    made: list[Prompt] = []
    for _ in range(count):
        tenant = dice.choice([None, "a", "b"])
        start = list(dice.choice(made).tokens[: BLOCK * dice.randrange(1, 6)]) if made else []
        tokens = start + [dice.randrange(1 << 20) for _ in range(BLOCK * dice.randrange(3, 9) + 1)]
        made.append(Prompt(tuple(tokens), tenant))
    return made


def everyone(prompts: list[Prompt]) -> list[Prompt]:
    """Every prompt of every tenant: also those that only another tenant has sent."""
    return [Prompt(each.tokens, tenant) for each in prompts for tenant in (None, "a", "b")]


def differences(router: Indexer, address: str, asked: list[Prompt]) -> list[tuple[Prompt, Found, Found]]:
    """Return prompts of which the router knows something else than the service has."""
    compared = ((each, router.ask(each), in_service(address, each)) for each in asked)
    return [each for each in compared if each[1] != each[2]]


def same(found: Found) -> Found:
    return found


def is_same(first: Callable[[], Found], second: Callable[[], Found]) -> bool:
    return first() == second()


def agree(router: Indexer, address: str, asked: list[Prompt]) -> None:
    """Wait for the router to know what the service has, for as long as it may take."""
    until(lambda: not differences(router, address, asked[-1:]), "the router knows the last prompt")
    until(lambda: not differences(router, address, asked), "the router knows every prompt")


@contextmanager
def spawned_engine(address: str) -> Iterator[subprocess.Popen[str]]:
    """Run an engine in a process of its own."""
    command = (sys.executable, "-m", "tests.router.engine", address)
    with spawned(*command, stdin=subprocess.PIPE) as engine:
        assert next_line(engine) == "ready\n"
        yield engine


def serve(engine: subprocess.Popen[str], some: list[Prompt]) -> None:
    assert engine.stdin is not None
    for each in some:
        engine.stdin.write(json.dumps([each.tokens, each.tenant]) + "\n")
        engine.stdin.flush()
        next_line(engine)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path, **settings(tmp_path / "disk", FDCACHE_HOST_MEMORY="4MiB")) as running:
        yield running


def events_at(service: LocalService) -> tuple[str, str]:
    chosen = service.server.settings.server
    return chosen.kv_events, chosen.kv_events_replay


def test_a_router_knows_what_each_tenant_has_in_each_tier(service: LocalService, tmp_path: Path) -> None:
    prompts = make_prompts(12)
    with indexer(tmp_path, events_at(service)[0]) as router:
        engine = router_engine(service.address)
        for each in prompts:
            engine.serve(list(each.tokens), each.tenant)
            engine.await_stock()
        until(lambda: service.ask("storage")["blocks"] == ready_blocks(service), "all blocks are stored")
        asked = everyone(prompts)
        agree(router, service.address, asked)
        on_device, host, stored = (sum(router.ask(each)[i] for each in asked) for i in range(3))
        assert 0 < on_device < host == stored
        service.ask("reset", tier="host")
        agree(router, service.address, asked)
        assert [sum(router.ask(each)[i] for each in asked) for i in range(3)] == [
            on_device,
            on_device,
            stored,
        ]
        with Client(service.address) as client:
            read = Prefix(prompts[0].tokens, tenant=prompts[0].tenant)
            until(lambda: Control(client).prefetch(read).done, "a prompt is read from storage")
        agree(router, service.address, asked)
        assert router.ask(prompts[0])[1] > router.ask(prompts[0])[0]
        service.ask("reset", tier="all")
        agree(router, service.address, asked)
        assert not any(router.ask(each)[2] for each in asked)
        engine.close()


@pytest.mark.parametrize("has_replay", [True, False], ids=["replay", "no replay"])
def test_a_router_that_comes_late_learns_all_blocks(
    service: LocalService, tmp_path: Path, has_replay: bool
) -> None:
    prompts, engine = make_prompts(6, seed=1), router_engine(service.address)
    for each in prompts:
        engine.serve(list(each.tokens), each.tenant)
        engine.await_stock()
    until(lambda: service.ask("storage")["blocks"] == ready_blocks(service), "all blocks are stored")
    address, replay = events_at(service)
    with indexer(tmp_path, f"tcp://127.0.0.1:{free_port()}") as router:
        router.follow(2, address, replay if has_replay else None)
        for each in everyone(prompts):
            expected = partial(in_service, service.address, each)
            until(partial(is_same, partial(router.ask, each, 2), expected), "it knows the blocks")
    engine.close()


def test_how_soon_a_router_knows_what_the_service_has(service: LocalService, tmp_path: Path) -> None:
    """Prints the times from the answer of the service to the same one of the indexer; docs/events.md has them."""
    prompts, late = make_prompts(12, seed=4), list[float]()
    engine = router_engine(service.address)
    with indexer(tmp_path, events_at(service)[0]) as router:
        for each in prompts:
            engine.serve(list(each.tokens), each.tenant)
            engine.await_stock()
            whole = len(each.tokens) // BLOCK * BLOCK
            expected = (whole, whole, whole)
            until(
                partial(is_same, partial(in_service, service.address, each), partial(same, expected)),
                "it is there",
            )
            began = time.monotonic()
            until(partial(is_same, partial(router.ask, each), partial(same, expected)), "the router knows it")
            late.append(time.monotonic() - began)
    late.sort()
    sys.stdout.write(
        f"known by the router after {late[len(late) // 2]:.3f} s in the median, {late[-1]:.3f} s at most\n"
    )
    engine.close()


def test_the_device_blocks_of_a_killed_engine_are_gone_and_those_of_others_stay(
    service: LocalService, tmp_path: Path
) -> None:
    shared, own = make_prompts(2, seed=3)
    other = router_engine(service.address)
    with indexer(tmp_path, events_at(service)[0]) as router, spawned_engine(service.address) as engine:
        serve(engine, [shared, own])
        other.serve(list(shared.tokens), shared.tenant)
        until(lambda: router.ask(own)[0] == len(own.tokens) // BLOCK * BLOCK, "the device is known")
        agree(router, service.address, [shared, own])
        engine.kill()
        engine.wait()
        until(lambda: router.ask(own)[0] == 0, "nothing is on the device of the killed engine")
        agree(router, service.address, [shared, own])
        assert router.ask(shared)[0] == len(shared.tokens) // BLOCK * BLOCK
        assert router.ask(own)[2] == len(own.tokens) // BLOCK * BLOCK
    other.close()


def revision(number: str) -> KVLayout:
    return dataclasses.replace(layout(), revision=number)


def test_a_router_follows_the_weights_that_engines_use(tmp_path: Path) -> None:
    """New weights, a roll back, and both at once, with the files of both in one folder, also after a restart."""
    variables = settings(tmp_path / "disk", FDCACHE_HOST_MEMORY="4MiB", FDCACHE_DISCARD="0")
    old, new = make_prompts(4, seed=5), make_prompts(4, seed=6)

    def stored(service: ServiceProcess, shape: KVLayout, prompts: list[Prompt]) -> Engine:
        engine = router_engine(service.address, shape)
        for each in prompts:
            engine.serve(list(each.tokens), each.tenant)
            engine.await_stock()
        return engine

    def knows(router: Indexer, there: list[Prompt], gone: list[Prompt]) -> Callable[[], bool]:
        def is_so() -> bool:
            found = [router.ask(each)[2] for each in there]
            return found == [len(each.tokens) // BLOCK * BLOCK for each in there] and not any(
                router.ask(each)[2] for each in gone
            )

        return is_so

    with ServiceProcess(tmp_path / "s", **variables) as service:
        service.start()
        with indexer(tmp_path, variables["FDCACHE_KV_EVENTS"]) as router:
            engine = stored(service, revision("1"), old)
            until(knows(router, old, new), "the first weights' blocks are known")
            engine.close()
            until(knows(router, old, new), "also without an engine")
            engine = stored(service, revision("2"), new)
            until(knows(router, new, old), "of the second weights alone: no engine can read the others")
            again = stored(service, revision("1"), old[:1])
            until(knows(router, old + new, []), "both, while engines of both run")
            engine.close()
            until(knows(router, old, new), "a roll back")
            until(lambda: not service.ask("storage")["queued_blocks"], "all is stored")
            service.kill()
            service.start()
            until(lambda: service.ask("stats")["state"] == "ready", "it is back")
            until(knows(router, old, new), "the engine's own after a restart")
            again.close()
            engine = stored(service, revision("2"), new[:1])
            until(knows(router, new, old), "the others again")
            engine.close()


def test_layouts_in_use_side_by_side_are_told_apart_by_a_service_each(tmp_path: Path) -> None:
    """Of one service the indexer knows by layout what devices have, and of host and storage the better of both."""
    (old,), (new,) = make_prompts(1, seed=5), make_prompts(1, seed=6)
    whole = {each: len(each.tokens) // BLOCK * BLOCK for each in (old, new)}

    def stored(service: LocalService, number: str, prompt: Prompt) -> Engine:
        engine = router_engine(service.address, revision(number))
        engine.serve(list(prompt.tokens), prompt.tenant)
        return engine

    with ExitStack() as opened:
        services = [
            opened.enter_context(local_service(tmp_path / name, **settings(tmp_path / f"{name}-disk")))
            for name in ("both", "first", "second")
        ]
        both, first, second = services
        for engine in (
            stored(both, "1", old),
            stored(both, "2", new),
            stored(first, "1", old),
            stored(second, "2", new),
        ):
            opened.callback(engine.close)
        addresses = [events_at(service)[0] for service in services]
        router = opened.enter_context(indexer(tmp_path, *addresses))
        until(lambda: [router.ask(old)[2], router.ask(new)[2]] == [whole[old], whole[new]], "one: both")
        apart = [(old, 2, whole[old]), (new, 3, whole[new]), (old, 3, 0), (new, 2, 0)]
        until(lambda: all(router.ask(each, worker)[2] == has for each, worker, has in apart), "each its own")
        of_old, of_new = (router.query(each)["1"] for each in (old, new))
        assert set(of_old) == {"longest_matched", "gpu", "dp", "cpu", "disk"}, "ranks are in dp alone"
        (rank_of_old,), (rank_of_new,) = of_old["dp"], of_new["dp"]
        assert rank_of_old != rank_of_new


@pytest.mark.slow
def test_two_engines_and_a_service_are_killed_and_the_router_stays_true(tmp_path: Path) -> None:
    prompts = make_prompts(30, seed=2)
    asked = everyone(prompts)
    variables = settings(
        tmp_path / "disk",
        FDCACHE_HOST_MEMORY="1MiB",
        FDCACHE_STORAGE_SIZE="4MiB",
        FDCACHE_DISCARD="0",
    )
    with ServiceProcess(tmp_path / "s", **variables) as service:
        service.start()
        with (
            indexer(tmp_path, variables["FDCACHE_KV_EVENTS"]) as router,
            spawned_engine(service.address) as first,
            spawned_engine(service.address) as second,
        ):

            def is_quiet() -> bool:
                layouts = service.ask("storage")["layouts"]
                return not any(each["queued_blocks"] or each["writing_blocks"] for each in layouts)

            def check() -> None:
                """Nothing changes any more: the router knows what the service has. Prints how soon."""
                until(is_quiet, "nothing is being written")
                began = time.monotonic()
                until(lambda: not differences(router, service.address, asked), "the router knows all")
                sys.stdout.write(
                    f"{len(asked)} answers are the same, asked of both, after {time.monotonic() - began:.3f} s\n"
                )

            for turn in range(2):
                serve(first, prompts[turn::4])
                serve(second, prompts[turn + 1 :: 4])
            check()
            assert any(router.ask(each)[1] for each in asked)
            first.kill()
            first.wait()
            serve(second, prompts[:10])
            check()
            service.kill()
            service.start()
            until(lambda: service.ask("stats")["state"] in ("ready", "recovering"), "it is back")
            check()
            assert any(router.ask(each)[1] for each in asked), "what storage has is told after a restart"
            until(lambda: any(router.ask(each)[0] for each in asked), "an idle engine's device is told again")
            check()
            second.kill()
            second.wait()
            check()


def test_blocks_that_are_told_without_tokens_are_no_blocks(tmp_path: Path) -> None:
    """Why SGLang's pages are told with their tokens: hashes alone do not do, even of blocks known with them."""
    prompt, other = (Prompt(make_prompts(1, seed)[0].tokens) for seed in (1, 2))
    blocks = len(prompt.tokens) // BLOCK
    hashes, known, nothing = list(range(1, blocks + 1)), prompt.tokens[: blocks * BLOCK], (0, 0, 0)
    numbers = itertools.count(1)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        address = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"

        def tell(*events: list[object]) -> None:
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            publisher.send_multipart([b"", next(numbers).to_bytes(8, "big"), payload])

        def stored(medium: str, tokens: tuple[int, ...], names: list[int]) -> list[object]:
            return ["BlockStored", names, None, tokens, BLOCK, None, medium]

        with indexer(tmp_path, address) as router:

            def is_known() -> bool:
                tell(stored("GPU", known, hashes))  # again until it has subscribed
                return router.ask(prompt) == (len(known),) * 3

            until(is_known, "the indexer knows blocks of the device")
            without = stored("CPU_PINNED", (), hashes)
            tell(without, ["BlockRemoved", hashes, "GPU"], without)
            tell(stored("GPU", other.tokens[:BLOCK], [1000]))
            until(lambda: router.ask(other)[0] == BLOCK, "what came afterwards is known")
            assert router.ask(prompt) == nothing
            tell(stored("CPU_PINNED", known, hashes))
            until(lambda: router.ask(prompt) == (0, len(known), len(known)), "with tokens they are known")

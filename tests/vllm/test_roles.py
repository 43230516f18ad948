"""Prefill and decode in two engines of vLLM, which hand blocks over as vLLM's own routers ask them to."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import TransferNotFoundError
from fdcache.integrations.vllm.handover import ASKED_OF_PREFILL
from fdcache.transfer.nixl import find_nixl
from tests.service_help import until
from tests.vllm.engine import BLOCK_SIZE, connector_config, make_model, make_tokenizer
from tests.vllm.served import Server, completion, free_port, running, start_engine

try:
    find_nixl()
except TransferNotFoundError:
    pytest.skip(
        "vLLM's memory on a CPU is read through NIXL, which is not installed", allow_module_level=True
    )

pytestmark = pytest.mark.timeout(1800)  # five starts of a server, each a minute on a slow machine
_LENGTHS = (200, 100, 96, 40, 17, 16, 5)
"""Prompts whose last block is full and not, of one block, and shorter."""


def transfer_of(role: str, **settings: object) -> dict[str, Any]:
    """Return ``kv_transfer_config`` for one role."""
    given = {"FDCACHE_HOST_MEMORY": "16MiB", "FDCACHE_TRANSFER": "rdma", **settings}
    return connector_config(**given) | {"kv_role": role}  # type: ignore[arg-type]


def prompts_of(seed: int) -> list[list[int]]:
    chosen = random.Random(seed)
    return [[chosen.randrange(3, 500) for _ in range(length)] for length in _LENGTHS]


class Pair:
    """A prefill and a decode engine, and what a router does with both. ``alone`` has no connector.

    ``ranks``: those of prefill and of decode.
    """

    def __init__(self, model: Path, logs: Path, ranks: tuple[int, int] = (1, 1), **options: Any) -> None:
        self.model, self.logs, self._options = model, logs, options
        self._ranks = dict(zip(("kv_producer", "kv_consumer"), ranks, strict=True))
        self.prefill, self.decode = self.start("kv_producer"), self.start("kv_consumer")
        self.alone = start_engine(model, logs / "alone.log", None, **options)

    def start(self, role: str, port: int | None = None) -> Server:
        """Start an engine."""
        log = self.logs / f"{role}-{free_port()}.log"
        own, (peers,) = self._ranks[role], (count for name, count in self._ranks.items() if name != role)
        options: dict[str, Any] = {**self._options, **({} if port is None else {"port": port})}
        if own > 1:
            options |= {"tensor-parallel-size": own, "distributed-executor-backend": "mp"}
        settings = {} if own == peers else {"FDCACHE_TRANSFER_PEER_RANKS": str(peers)}
        return start_engine(self.model, log, transfer_of(role, **settings), **options)

    def parameters(self, prompt: list[int]) -> dict[str, Any] | None:
        """Compute a prompt at prefill; return the parameters for decode."""
        body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self.prefill.post("/v1/completions", {**body, "kv_transfer_params": ASKED_OF_PREFILL})
        parameters: dict[str, Any] | None = answer.get("kv_transfer_params")
        return parameters

    def route(self, prompt: list[int], num_tokens: int = 8) -> list[int]:
        """Return the tokens of decode."""
        return self.decode.tokens(prompt, num_tokens, kv_transfer_params=self.parameters(prompt))

    def at_once(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the tokens of decode for prompts that are routed at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.route(prompt, num_tokens), prompts))

    @property
    def is_clean(self) -> bool:
        """True if no engine holds a block for a peer."""
        return all(
            not each.counter("vllm:fdcache_plans_in_flight") and not each.counter("vllm:kv_cache_usage_perc")
            for each in (self.prefill, self.decode)
        )


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    make_tokenizer(model)
    made = Pair(model, tmp_path_factory.mktemp("servers"))
    try:
        with running(made.prefill, made.decode, made.alone):
            yield made
    finally:
        made.prefill.kill()
        made.decode.kill()


def test_tokens_are_those_of_one_engine_and_the_prompt_is_computed_once(pair: Pair) -> None:
    computed = pair.decode.counter("vllm:fdcache_blocks_fetched_total")
    for prompt in prompts_of(1):
        parameters = pair.parameters(prompt)
        assert (parameters is not None) == (len(prompt) > BLOCK_SIZE)
        assert pair.decode.tokens(prompt, kv_transfer_params=parameters) == pair.alone.tokens(prompt)
    fetched = sum(-(-length // BLOCK_SIZE) for length in _LENGTHS if length > BLOCK_SIZE)
    until(lambda: pair.decode.counter("vllm:fdcache_blocks_fetched_total") - computed == fetched, "blocks")
    assert pair.decode.counter("vllm:fdcache_loads_failed_total") == 0
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_parameters_are_those_of_the_protocol(pair: Pair) -> None:
    parameters = pair.parameters(prompts_of(2)[1])
    assert parameters is not None
    assert parameters["do_remote_prefill"] is True
    assert parameters["do_remote_decode"] is False
    assert len(parameters["remote_block_ids"][0]) == -(-_LENGTHS[1] // BLOCK_SIZE)
    named = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size", "pp_size")
    assert all(parameters[name] is not None for name in named)
    pair.decode.tokens(prompts_of(2)[1], kv_transfer_params=parameters)
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_many_at_once_and_prompts_that_share_a_beginning(pair: Pair) -> None:
    """More than the engines have room for at a time; some blocks are on decode's device, some on its host."""
    base = prompts_of(3)[0]
    prompts = [base[: 32 * (n % 6)] + prompt for n, prompt in enumerate(prompts_of(4) * 2)]
    assert pair.at_once(prompts, 24) == [pair.alone.tokens(each, 24) for each in prompts]
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_what_decode_never_asks_for_or_gives_up_is_freed(pair: Pair) -> None:
    """A second decode finds the hand-over ended, and computes. So does one whose prompt is another."""
    first, second = prompts_of(5)[:2]
    parameters = pair.parameters(first)
    for _ in range(2):
        assert pair.decode.tokens(first, kv_transfer_params=parameters) == pair.alone.tokens(first)
    assert pair.decode.tokens(second, kv_transfer_params=pair.parameters(first)) == pair.alone.tokens(second)
    strange = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    assert pair.decode.tokens(second[1:], kv_transfer_params=strange) == pair.alone.tokens(second[1:])
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_requests_that_decode_preempts_are_computed_or_loaded_from_its_own_tiers(pair: Pair) -> None:
    """Four requests at a time, that grow to 68 blocks of 60."""
    chosen = random.Random(9)
    prompts = [[chosen.randrange(3, 500) for _ in range(200)] for _ in range(6)]
    before = pair.decode.counter("vllm:num_preemptions_total")
    answers = pair.at_once(prompts, 70)
    assert answers == [pair.alone.tokens(each, 70) for each in prompts]
    assert pair.decode.counter("vllm:num_preemptions_total") > before
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_a_request_whose_client_goes_while_it_waits_leaves_nothing(pair: Pair) -> None:
    prompt = prompts_of(10)[0]
    parameters = pair.parameters(prompt)
    os.killpg(pair.prefill.process.pid, signal.SIGSTOP)
    try:
        body = completion(prompt, 8, kv_transfer_params=parameters)
        with pytest.raises(OSError):
            pair.decode.post("/v1/completions", body, timeout=3.0)
    finally:
        os.killpg(pair.prefill.process.pid, signal.SIGCONT)
    until(lambda: pair.is_clean, "the end of every hand-over")
    assert pair.route(prompt[1:]) == pair.alone.tokens(prompt[1:])
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_either_may_be_killed_in_the_middle(pair: Pair) -> None:
    """Prefill dies while decode waits for it, then decode while prefill holds blocks for it."""
    prompts = prompts_of(6)
    parameters = pair.parameters(prompts[0])
    os.killpg(pair.prefill.process.pid, signal.SIGSTOP)
    answers: list[list[int]] = []
    waiting = threading.Thread(
        target=lambda: answers.append(pair.decode.tokens(prompts[0], kv_transfer_params=parameters))
    )
    waiting.start()
    until(lambda: pair.decode.counter("vllm:num_requests_waiting") > 0, "a request that waits for prefill")
    pair.prefill.kill()
    waiting.join()
    assert answers == [pair.alone.tokens(prompts[0])]
    assert pair.decode.tokens(prompts[0][1:], kv_transfer_params=parameters) == pair.alone.tokens(
        prompts[0][1:]
    )

    pair.prefill = pair.start("kv_producer")
    pair.prefill.wait()
    assert pair.route(prompts[1]) == pair.alone.tokens(prompts[1])
    parameters = pair.parameters(prompts[2])
    pair.decode.kill()
    pair.decode = pair.start("kv_consumer")
    pair.decode.wait()
    assert pair.decode.tokens(prompts[2], kv_transfer_params=parameters) == pair.alone.tokens(prompts[2])
    assert pair.route(prompts[3]) == pair.alone.tokens(prompts[3])
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_decode_may_be_asked_before_prefill_has_begun(pair: Pair) -> None:
    told = pair.parameters(prompts_of(13)[1])
    assert told is not None
    pair.decode.tokens(prompts_of(13)[1], kv_transfer_params=told)
    before = pair.decode.counter("vllm:fdcache_blocks_fetched_total")
    prompts = prompts_of(14)
    for number, prompt in enumerate(prompts):
        name = {"transfer_id": f"named-{number}"}
        waits = {"do_remote_prefill": True, "remote_addresses": told["remote_addresses"], **name}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(pair.decode.tokens, prompt, kv_transfer_params=waits)
            body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            asked = {**ASKED_OF_PREFILL, **name}
            pair.prefill.post("/v1/completions", {**body, "kv_transfer_params": asked})
            assert answer.result() == pair.alone.tokens(prompt)
    fetched = sum(-(-length // BLOCK_SIZE) for length in _LENGTHS if length > BLOCK_SIZE)
    until(lambda: pair.decode.counter("vllm:fdcache_blocks_fetched_total") - before == fetched, "blocks")
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_the_router_of_the_examples_routes_both(pair: Pair, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "examples.openai_router", "--port", str(port)]
    command += [
        f"--prefill=http://127.0.0.1:{pair.prefill.port}",
        f"--decode=http://127.0.0.1:{pair.decode.port}",
    ]
    router = Server(command, port, tmp_path / "router.log")
    before = pair.decode.counter("vllm:fdcache_blocks_fetched_total")
    with running(router):
        for prompt in prompts_of(8):
            assert router.tokens(prompt) == pair.alone.tokens(prompt)
    until(lambda: pair.decode.counter("vllm:fdcache_blocks_fetched_total") > before, "blocks from prefill")
    until(lambda: pair.is_clean, "the end of every hand-over")


def test_vllms_own_proxy_routes_both(pair: Pair, tmp_path: Path) -> None:
    """``TOY_PROXY`` names the file ``toy_proxy_server.py`` of vLLM's repository; its wheel has none."""
    proxy = os.environ.get("TOY_PROXY")
    if proxy is None or not Path(proxy).is_file():
        pytest.skip("TOY_PROXY names no toy_proxy_server.py")
    port = free_port()
    command = [sys.executable, proxy, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(pair.prefill.port)]
    command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(pair.decode.port)]
    router = Server(command, port, tmp_path / "proxy.log", health="/healthcheck")
    before = pair.decode.counter("vllm:fdcache_blocks_fetched_total")
    with running(router):
        for prompt in prompts_of(7):
            assert router.tokens(prompt) == pair.alone.tokens(prompt)
    until(lambda: pair.decode.counter("vllm:fdcache_blocks_fetched_total") > before, "blocks from prefill")
    until(lambda: pair.is_clean, "the end of every hand-over")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1)], ids=["2:2", "1:2", "2:1"])
def test_ranks_of_each_engine_hand_over_their_parts(
    ranks: tuple[int, int], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unequal numbers of ranks each reads the heads that it has."""
    if len(set(ranks)) > 1:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    pair = Pair(make_tokenizer(model), tmp_path, ranks)
    with running(pair.prefill, pair.decode, pair.alone):
        for prompt in prompts_of(11)[:4]:
            parameters = pair.parameters(prompt)
            assert parameters is not None
            assert len(parameters["remote_addresses"]) == ranks[0]
            assert pair.decode.tokens(prompt, kv_transfer_params=parameters) == pair.alone.tokens(prompt)
        blocks = sum(-(-length // BLOCK_SIZE) for length in _LENGTHS[:4])
        until(lambda: pair.decode.counter("vllm:fdcache_blocks_fetched_total") >= blocks, "blocks")
        assert pair.decode.counter("vllm:fdcache_loads_failed_total") == 0
        until(lambda: pair.is_clean, "the end of every hand-over")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)], ids=["1:1", "1:2", "2:1"])
def test_layers_of_several_kinds_are_handed_over(
    ranks: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention and windows, which begin and end everywhere in a block."""
    if len(set(ranks)) > 1:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    # The first step of an engine with two ranks takes long on a busy machine: longer than prefill holds a prompt.
    monkeypatch.setenv("FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS", "300")
    monkeypatch.setenv("FDCACHE_TRANSFER_TIMEOUT", "200")
    layers = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    model = make_model(tmp_path / "model", num_layers=len(layers), layer_types=layers, sliding_window=40)
    options: dict[str, Any] = {"num-gpu-blocks-override": 120}
    pair = Pair(make_tokenizer(model), tmp_path, ranks, **options)
    with running(pair.prefill, pair.decode, pair.alone):
        chosen = random.Random(12)
        for length in (200, 112, 97, 96, 88, 87, 71, 41, 40, 17, 5):
            prompt = [chosen.randrange(3, 500) for _ in range(length)]
            before = pair.decode.counter("vllm:fdcache_blocks_fetched_total")
            parameters = pair.parameters(prompt)
            assert (parameters is not None) == (length > BLOCK_SIZE + 1)
            answer = pair.decode.tokens(prompt, kv_transfer_params=parameters)
            assert answer == pair.alone.tokens(prompt)
            if parameters is not None:
                _until_fetched(pair, before)
        assert pair.decode.counter("vllm:fdcache_loads_failed_total") == 0
        until(lambda: pair.is_clean, "the end of every hand-over")


def _until_fetched(pair: Pair, before: float) -> None:
    until(lambda: pair.decode.counter("vllm:fdcache_blocks_fetched_total") > before, "blocks")

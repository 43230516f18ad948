"""Prompts that go to decode chunk by chunk, while prefill computes the next: vLLM's scheduler, bytes of a stand-in.

A router that has named the hand-over asks both engines at once.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="the stand-in for the model needs a newer version of vLLM"
)

from fdcache.errors import TransferNotFoundError
from fdcache.integrations.vllm.handover import ADDRESSES, ASKED_OF_PREFILL, TRANSFER_ID
from fdcache.transfer.nixl import find_nixl
from tests.service_help import until
from tests.vllm.test_handed_families import Pair, running

try:
    find_nixl()
except TransferNotFoundError:
    pytest.skip(
        "vLLM's memory on a CPU is read through NIXL, which is not installed", allow_module_level=True
    )

_CHUNK, _BLOCK = 128, 16


class AtOnce(Pair):
    """A prefill and a decode engine that are asked together."""

    def __init__(self, model: Path, **of_prefill: Any) -> None:
        super().__init__("Llama", model, **of_prefill)
        worker: Any = self.prefill.worker._worker
        self._addresses = [worker.address]

    def ask(self, name: str, prompt: list[int], num_tokens: int = 8) -> None:
        """Ask decode, then prefill."""
        named = {TRANSFER_ID: f"of.{name}"}
        waits = {"do_remote_prefill": True, ADDRESSES: self._addresses, **named}
        self.decode.add(name, prompt, num_tokens, waits)
        self.prefill.add(name, prompt, 1, {**ASKED_OF_PREFILL, **named})

    @property
    def read_blocks(self) -> int:
        """Blocks that have come to decode."""
        worker: Any = self.decode.worker._worker
        controller = worker._controller
        return int(controller.transfer_stats().connector.read_bytes // controller.layout.payload_bytes)

    def until_read(self, blocks: int) -> None:
        """Step decode alone until so many blocks have come."""

        def has_come() -> bool:
            self.decode.step()
            return self.read_blocks >= blocks

        until(has_come, f"{blocks} blocks at decode")

    def is_right(self, name: str, prompt: list[int], num_tokens: int = 8) -> bool:
        """Compare an answer of decode with that of its own computing."""
        alone = f"alone.{name}"
        self.decode.scheduler.reset_prefix_cache()
        self.decode.add(alone, prompt, num_tokens)
        self.settle()
        return self.decode.answers[name][-num_tokens:] == self.decode.answers[alone][-num_tokens:]


def prompt_of(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, 500) for _ in range(length)]


def test_decode_has_each_chunk_before_prefill_computes_the_next(model: Path) -> None:
    with running(AtOnce(model)) as pair:
        prompt, before = prompt_of(1, 3 * _CHUNK + 50), 0
        pair.ask("r", prompt)
        for chunk in range(1, 4):
            pair.prefill.step()
            pair.until_read(chunk * _CHUNK // _BLOCK)
            assert pair.read_blocks > before, "a chunk"
            before = pair.read_blocks
            assert "r" not in pair.prefill.parameters
            assert "r" not in pair.decode.answers
        pair.settle()
        assert pair.prefill.parameters["r"] is not None
        assert pair.is_right("r", prompt)
        assert pair.fetched == -(-len(prompt) // _BLOCK)
        assert pair.decode.manager.get_stats().counters.loads_failed == 0
        assert pair.prefill.wrong == pair.decode.wrong == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_client_that_goes_between_two_chunks(side: str, model: Path) -> None:
    with running(AtOnce(model)) as pair:
        prompt = prompt_of(2, 3 * _CHUNK + 50)
        pair.ask("r", prompt)
        pair.prefill.step()
        pair.until_read(_CHUNK // _BLOCK)
        getattr(pair, side).abort("r")
        for number in range(3):  # others take the blocks
            pair.prefill.add(f"other.{number}", prompt_of(20 + number, 120), 4)
        pair.settle()
        if side == "prefill":
            assert pair.is_right("r", prompt)
        assert pair.prefill.wrong == pair.decode.wrong == 0


def test_prefill_that_preempts_a_prompt_between_two_chunks(model: Path) -> None:
    """Decode is told, and computes the prompt; prefill computes it again for nobody, and holds nothing."""
    with running(AtOnce(model)) as pair:
        prompt = prompt_of(3, 3 * _CHUNK + 50)
        pair.ask("r", prompt)
        pair.prefill.step()
        pair.until_read(_CHUNK // _BLOCK)
        scheduler, request = pair.prefill.scheduler, pair.prefill.requests["r"]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        pair.settle()
        assert pair.is_right("r", prompt)
        assert pair.decode.manager.get_stats().counters.loads_failed == 1
        assert pair.prefill.parameters["r"] is None
        assert pair.prefill.wrong == pair.decode.wrong == 0


def test_a_prompt_that_is_preempted_before_decode_asks_is_handed_over_at_its_end(model: Path) -> None:
    with running(AtOnce(model)) as pair:
        prompt, named = prompt_of(4, 3 * _CHUNK + 50), {TRANSFER_ID: "of.r"}
        pair.prefill.add("r", prompt, 1, {**ASKED_OF_PREFILL, **named})
        pair.prefill.step()
        scheduler, request = pair.prefill.scheduler, pair.prefill.requests["r"]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        pair.until(lambda: "r" in pair.prefill.parameters)
        parameters = pair.prefill.parameters["r"]
        assert parameters is not None
        pair.decode.add("r", prompt, 8, parameters)
        pair.settle()
        assert pair.fetched == -(-len(prompt) // _BLOCK)
        assert pair.is_right("r", prompt)
        assert pair.prefill.wrong == pair.decode.wrong == 0


def test_a_crowd_with_preemptions_and_clients_that_go(model: Path) -> None:
    """Prompts and replies of prefill need more blocks than it has; every fourth client goes, of either engine."""
    with running(AtOnce(model, num_blocks=36)) as pair:
        chosen = random.Random(5)
        prompts: dict[str, list[int]] = {}
        given: dict[str, Any] = {}
        for number in range(36):
            name = f"r.{number}"
            prompts[name] = prompt_of(100 + number, chosen.choice((40, 128, 200, 300, 420)))
            pair.ask(name, prompts[name], 6)
            pair.prefill.add(f"own.{number}", prompt_of(200 + number, 100), 60)
            for _ in range(chosen.randrange(6)):
                pair.prefill.step()
                pair.decode.step()
            if number % 4 == 3:
                gone = f"r.{chosen.randrange(number + 1)}"
                given[gone] = side = chosen.choice((pair.prefill, pair.decode))
                side.abort(gone)
        pair.settle()
        assert pair.prefill.preemptions > 0
        assert pair.fetched > 100
        assert pair.prefill.wrong == pair.decode.wrong == 0
        for name, prompt in prompts.items():
            if given.get(name) is not pair.decode:
                assert pair.is_right(name, prompt, 6), name
        assert pair.decode.manager.get_stats().counters.blocks_corrupt_from_peer == 0

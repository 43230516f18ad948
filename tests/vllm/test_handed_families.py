"""Every kind of layers that vLLM groups, handed over from one engine to another; a stand-in checks the bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

from fdcache.errors import TransferNotFoundError
from fdcache.integrations.vllm.handover import ASKED_OF_PREFILL
from fdcache.transfer.nixl import find_nixl
from tests.service_help import until
from tests.vllm.stand_in import StandIn
from tests.vllm.test_families import FAMILIES, conversations, flip_loaded, size_of, swap_loaded

try:
    find_nixl()
except TransferNotFoundError:
    pytest.skip(
        "vLLM's memory on a CPU is read through NIXL, which is not installed", allow_module_level=True
    )

_HANDED = ["Llama", "Gemma 4", "gpt-oss", "MiMo-V2", "Llama 4", "Qwen3-Next", "Jamba", "GLM-5 Flash", "Mamba"]


class Pair:
    """A prefill and a decode engine of one family, which step in turns. ``of_prefill``: options of that one alone."""

    def __init__(
        self,
        family: str,
        model: Path,
        broken: Callable[[StandIn, Any], None] | None = None,
        ranks: int = 1,
        **of_prefill: Any,
    ) -> None:
        specs, _, room = FAMILIES[family]
        options: dict[str, Any] = {"FDCACHE_HOST_MEMORY": "64MiB", "FDCACHE_TRANSFER": "rdma"}
        options |= {"num_blocks": 2 * room, "block_size": size_of(specs), "ranks": ranks}
        self.prefill = StandIn(model, specs, role="kv_producer", **options | of_prefill)
        self.decode = StandIn(model, specs, role="kv_consumer", broken=broken, **options)

    @property
    def fetched(self) -> int:
        """Blocks that decode has fetched."""
        return sum(
            each.blocks for each in self.decode.manager.get_stats().handovers if each.direction == "fetch"
        )

    def until(self, condition: Callable[[], object]) -> None:
        """Step both engines until something is true."""

        def stepped() -> bool:
            self.prefill.step()
            self.decode.step()
            return bool(condition())

        until(stepped, "two engines")

    def route(self, name: str, prompt: list[int], num_tokens: int = 8) -> dict[str, Any] | None:
        """Compute a prompt at prefill; let decode go on from it. Return the parameters that decode was given."""
        self.prefill.add(name, prompt, 1, ASKED_OF_PREFILL)
        self.until(lambda: name in self.prefill.parameters)
        parameters = self.prefill.parameters[name]
        self.decode.add(name, prompt, num_tokens, parameters)
        return parameters

    def settle(self) -> None:
        """Step until nothing is computed, copied or held."""
        self.until(
            lambda: (
                not any(
                    each.scheduler.has_requests() or each.connector.has_pending_push_work()
                    for each in (self.prefill, self.decode)
                )
            )
        )


PairT = TypeVar("PairT", bound=Pair)


@contextmanager
def running(pair: PairT) -> Iterator[PairT]:
    """End both engines, of which nothing may be left."""
    yield pair
    pair.settle()
    for each in (pair.prefill, pair.decode):
        assert each.scheduler.kv_cache_manager.usage == 0
        each.close()


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts that end everywhere in a page and a window, and continue others."""
    chosen = random.Random(seed)
    lengths = (200, 161, 160, 129, 128, 97, 96, 87, 81, 71, 65, 64, 40, 33, 17, 5)
    return [[chosen.randrange(3, 500) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("family", "ranks"), [*((family, 1) for family in _HANDED), ("Kimi Linear", 2), ("GLM-5 Flash", 2)]
)
def test_decode_goes_on_from_what_prefill_has_computed(family: str, ranks: int, model: Path) -> None:
    """The prompt is computed once, but for its last token where a layer cannot go back by one.

    With two ranks each has states of its own beside latents that both have alike.
    """
    with running(Pair(family, model, ranks=ranks)) as pair:
        for number, prompt in enumerate(prompts_of(1)):
            before, name = pair.fetched, f"r.{number}"
            parameters = pair.route(name, prompt)
            pair.settle()
            assert (pair.fetched > before) == (parameters is not None)
            if len(prompt) > 40:
                assert parameters is not None
            alone = f"alone.{number}"
            pair.decode.add(alone, prompt)
            pair.settle()
            assert pair.decode.answers[name] == pair.decode.answers[alone]
        assert pair.prefill.wrong == pair.decode.wrong == 0
        assert pair.decode.manager.get_stats().counters.loads_failed == 0


@pytest.mark.parametrize("family", _HANDED)
def test_many_at_once_that_continue_others(family: str, model: Path) -> None:
    """Some pages are on decode's device, some on its host, the rest at prefill."""
    with running(Pair(family, model)) as pair:
        prompts = conversations(3)
        for number, prompt in enumerate(prompts):
            pair.route(f"r.{number}", prompt, 24)
        pair.settle()
        for number, prompt in enumerate(prompts):
            pair.decode.add(f"again.{number}", prompt, 24)
        pair.settle()
        assert pair.prefill.wrong == pair.decode.wrong == 0
        assert pair.fetched > 10
        for number in range(len(prompts)):
            assert pair.decode.answers[f"r.{number}"][-24:] == pair.decode.answers[f"again.{number}"][-24:]
        assert pair.decode.manager.get_stats().counters.loads_failed == 0


@pytest.mark.parametrize(("family", "broken"), [("Gemma 4", swap_loaded), ("Jamba", flip_loaded)])
def test_blocks_that_arrive_wrong_are_noticed(
    family: str, broken: Callable[[StandIn, Any], None], model: Path
) -> None:
    """The control: the stand-in sees that bytes which were fetched are not those of prefill."""
    with running(Pair(family, model, broken)) as pair:
        for number, prompt in enumerate(prompts_of(2)[:4]):
            pair.route(f"r.{number}", prompt)
        pair.settle()
        assert pair.decode.wrong


@pytest.mark.parametrize("family", ["Llama", "Gemma 4", "Jamba"])
def test_what_does_not_come_is_computed_and_what_is_not_wanted_is_freed(family: str, model: Path) -> None:
    """Prefill's address leads nowhere; another request's blocks; a request that is aborted at either side."""
    with running(Pair(family, model)) as pair:
        first, second, third, fourth = prompts_of(3)[:4]
        lost = pair.route("other", first)
        assert lost is not None
        pair.decode.add("lost", second, 8, lost | {"remote_addresses": ["ipc:///tmp/no-such-peer"]})
        pair.decode.add("other prompt", third, 8, lost)
        pair.settle()
        pair.route("gone", fourth)
        pair.decode.abort("gone")
        pair.prefill.add("cut", second, 1, ASKED_OF_PREFILL)
        pair.prefill.step()
        pair.prefill.abort("cut")
        pair.settle()
        assert pair.prefill.wrong == pair.decode.wrong == 0
        assert {"lost", "other prompt"} <= pair.decode.answers.keys()

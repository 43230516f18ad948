"""Right tokens: hits compared with hits that have the same split of cached and computed tokens.

Recomputing a prompt in pieces of other lengths changes the last bits of its KV, and near ties between tokens with
them. So a hit from the host is compared with the hit from the device that the same engine gave before, and a prompt
that is computed from some block on with one whose first blocks another prompt of the same length has left on the
device: these were computed by the same kernels in the same shapes.
"""

from __future__ import annotations

from typing import Any

from benchmarks.vllm.driver import Driver, Tokens
from benchmarks.vllm.faults import made
from benchmarks.vllm.shapes import BLOCK, Load

REPLIES = 12
SEED, OTHER = 700_000, 710_000


def length_of(load: Load) -> int:
    """Return the length of the prompt: not a multiple of the block size, and computed in one step on any shape."""
    length = min(load.single_length, 1009)
    return length - 3 if length % BLOCK == 0 else length


def prompt_of(driver: Driver, load: Load, same_blocks: int | None = None, round_: int = 0) -> Tokens:
    """Return the prompt; with ``same_blocks`` one that has only these first blocks in common with it."""
    length = length_of(load)
    prompt = driver.prompt(SEED + round_, length)
    if same_blocks is None:
        return prompt
    head = same_blocks * BLOCK
    return prompt[:head] + driver.prompt(OTHER + round_, length - head)


async def follow(driver: Driver, load: Load, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Carry out orders one after the other; return tokens, logprobs and cached tokens of each request.

    ``{"ask": label, "same_blocks": n or null}`` sends a request, ``{"settle": true}`` lets copies end, ``{"forget":
    true}`` drops the device's prefixes.
    """
    found = []
    for order in orders:
        if "ask" in order:
            prompt = prompt_of(driver, load, order.get("same_blocks"))
            answer = await driver.ask(prompt, REPLIES, logprobs=5)
            chosen = [step[token] for step, token in zip(answer.logprobs, answer.tokens, strict=True)]
            found.append(
                {
                    "label": order["ask"],
                    "tokens": answer.tokens,
                    "logprobs": chosen,
                    "cached": answer.cached,
                    "has_fault": made(),
                    "ttft_ms": round(answer.ttft_ms, 2),
                }
            )
        elif order.get("forget"):
            await driver.forget_device(load.settle_s)
        else:
            await driver.settle(4 * load.settle_s)
    return found

"""An engine in a process of its own: it serves the prompts that it reads, one in a line, and prints a line for each."""

from __future__ import annotations

import json
import sys

from fdcache.layout import KVLayout
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings
from tests.service_engine import Engine


def router_engine(address: str, shape: KVLayout | None = None) -> Engine:
    """Return an engine that waits for no read from storage."""
    terms = StorageTierSettings(prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    return Engine(address, shape, device_blocks=64, fetches=terms)


def tell(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    engine = router_engine(sys.argv[1])
    tell("ready")
    for line in sys.stdin:
        tokens, tenant = json.loads(line)
        found, _ = engine.serve(tokens, tenant)
        engine.await_stock()
        tell(str(found))
    engine.close()

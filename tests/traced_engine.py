"""An engine whose settings are those of the environment: it stores a prompt, loses it, and has it read from storage.

FDCACHE_SERVER=... FDCACHE_TRACES=otlp python -m tests.traced_engine
"""

from __future__ import annotations

import os

from fdcache.manager import CacheManager, MatchStatus, Request
from fdcache.service.client.connection import Client
from tests.service_engine import PROMPT, Engine, layout
from tests.service_help import until

OTHER = list(range(900, 953))


def main() -> None:
    CacheManager.from_settings(layout()).close()
    address = os.environ["FDCACHE_SERVER"]
    engine = Engine(address, device_blocks=14)
    with Client(address) as client:
        engine.serve(PROMPT)
        until(lambda: client.ask("storage")["blocks"] == 10, "the prompt is in storage")
        engine.serve(OTHER)  # the device has no room for both
        client.ask("reset", tier="host")
        waiting = Request("waits", PROMPT)
        engine.manager.begin([waiting])

        def is_matched() -> bool:
            (found,) = engine.manager.match_prefix([waiting])
            return found.status is MatchStatus.MATCHED

        until(is_matched, "the prompt is read from storage")
        (allocation,) = engine.manager.allocate_device_blocks([(waiting, len(PROMPT))])
        assert allocation.ok
        engine.carry_out(engine.manager.take_plans())
        engine.manager.finish([waiting])
    engine.close()


if __name__ == "__main__":
    main()

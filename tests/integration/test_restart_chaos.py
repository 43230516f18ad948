"""Services that end and start again in every way, with other sizes, below live engines: no wrong byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.seeds import budget
from tests.service_engine import Engine, layout, ready_blocks
from tests.service_help import ServiceProcess, until

SIZES = ("1MiB", "2MiB", "3MiB", "4MiB")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(budget(10)))
def test_engines_load_what_they_stored_from_whichever_service(tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"restarts {seed}")
    prompts = [list(range(1000 * i, 1000 * i + 4 * rng.randrange(5, 25) + 1)) for i in range(1, 31)]
    with ServiceProcess(tmp_path / "s", FDCACHE_DISCARD="0", FDCACHE_HOST_MEMORY="4MiB") as service:
        service.start()
        engines = [Engine(service.address, layout(ranks=ranks), rpc_timeout=1.0) for ranks in (1, 2)]
        found = 0
        for _ in range(8):
            for prompt in rng.sample(prompts, 12):
                found += rng.choice(engines).serve(prompt)[0]  # which compares the bytes of what it loads
            if rng.random() < 0.5:
                service.kill()
            else:
                assert service.terminate() == 0
            if rng.random() < 0.5:
                for engine in engines:
                    engine.serve(rng.choice(prompts))
            service._settings["FDCACHE_HOST_MEMORY"] = rng.choice(SIZES)
            service.start()
            until(lambda: service.ask("stats")["state"] == "ready", "the engines are back")
            assert service.ask("integrity") == []
        assert found > 0
        assert ready_blocks(service) > 0
        for engine in engines:
            engine.close()
        service._settings["FDCACHE_DISCARD"] = "1"
        assert service.terminate() == 0

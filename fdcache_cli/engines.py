"""Engines that fdcache serves: what is installed of them, and the line that starts each with its settings."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fdcache.service.server.machine_findings import Finding, installed_version


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine: its distributions on the index, the releases that the tests run, and how it is started."""

    name: str
    title: str
    distributions: tuple[str, ...]
    tested: tuple[str, ...]
    command: str

    @property
    def version(self) -> str | None:
        """Version installed in this environment, None without one."""
        return next(filter(None, map(installed_version, self.distributions)), None)

    def start(self, file: Path, model: str) -> str:
        """Return the line that starts the engine with the settings in ``file``."""
        return (
            f"FDCACHE_ENV_FILE={shlex.quote(str(file))} {self.command.replace('MODEL', shlex.quote(model))}"
        )


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            "vLLM",
            ("vllm",),
            ("0.26.0", "0.33.0"),
            "vllm serve MODEL --kv-transfer-config "
            """'{"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}'""",
        ),
        Engine(
            "sglang",
            "SGLang",
            ("sglang",),
            ("0.5.23",),
            "sglang serve --model-path MODEL --enable-unified-cache-external-linker "
            "--unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config "
            """'{"linker": "FdcacheLinker", "linker_module_path": "fdcache.integrations.sglang.linker"}'""",
        ),
        Engine(
            "fastdeploy",
            "FastDeploy",
            ("fastdeploy-gpu", "fastdeploy-cpu", "fastdeploy"),
            (),
            "FD_PLUGINS=fdcache ENABLE_V1_KVCACHE_MANAGER=1 "
            "python -m fastdeploy.entrypoints.openai.api_server --model MODEL",
        ),
        Engine(
            "own", "your engine", ("paddlepaddle-gpu", "paddlepaddle"), ("2.6.2", "3.3.1"), "python MODEL"
        ),
    )
}
"""By name; ``own`` stands for an engine that embeds fdcache, and MODEL for its program there."""


def installed_engine() -> Engine:
    """Return the serving engine of this environment; an own one if there is none."""
    served = [engine for engine in ENGINES.values() if engine.name != "own" and engine.version]
    return served[0] if len(served) == 1 else ENGINES["own"]


def examine_engines() -> list[Finding]:
    """Return the engines and frameworks of this environment, with hints at releases that are not tested."""
    found = [_examined(engine, version) for engine in ENGINES.values() if (version := engine.version)]
    if not found:
        hint = "install fdcache into your engine's environment; `fdcache serve` and `fdcache replay` need no engine"
        return [Finding("engine", "none in this environment", hint=hint)]
    return [*found, *_plugins()]


def _examined(engine: Engine, version: str) -> Finding:
    name = next(each for each in engine.distributions if installed_version(each))
    hint = None
    if engine.tested and _number(version) < _number(engine.tested[0]):
        hint = (
            f"fdcache is tested from {name} {engine.tested[0]} on; pip install '{name}>={engine.tested[0]}'"
        )
    elif engine.tested and _number(version) > _number(engine.tested[-1]):
        hint = f"the newest that fdcache is tested with is {engine.tested[-1]}"
    return Finding("engine", f"{name} {version}", hint=hint)


def _plugins() -> Iterator[Finding]:
    """Yield the variables that keep an installed engine from loading fdcache."""
    if ENGINES["vllm"].version and "fdcache" not in (
        chosen := os.environ.get("VLLM_PLUGINS", "fdcache")
    ).split(","):
        problem = f"vLLM loads only the plug-ins that it names; VLLM_PLUGINS={chosen},fdcache".replace(
            "=,", "="
        )
        yield Finding("vLLM plug-ins", chosen, problem)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))

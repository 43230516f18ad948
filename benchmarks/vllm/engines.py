"""The engines that are compared: vLLM without a connector, with its own, with LMCache, and with fdcache."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm.shapes import Shape

NONE, OURS = "none", "fdcache"
FAULTY = {"fdcache-failing": "FailingConnector", "fdcache-spoiling": "SpoilingConnector"}
"""Engines with a fault on purpose."""
GIB = 1 << 30

LEAST = "least"
_DMA = {"FDCACHE_SWAP_METHOD": "dma"}
CONTROLS = {
    LEAST: {},
    f"{LEAST}-dma": _DMA,
    f"{OURS}-dma": _DMA,
    f"{OURS}-kernel": {"FDCACHE_SWAP_METHOD": "kernel", "FDCACHE_SWAP_SM_BUDGET": "2"},
}
"""Engines that tell what costs what, with their settings: the least that a connector can do, and other ways to copy."""


@dataclass(frozen=True)
class Engine:
    """What an engine process gets: vLLM's ``kv_transfer_config`` and variables of the environment."""

    name: str
    connector: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Where engines keep what outlives them, and how much host memory each of them may use."""

    folder: Path
    host_bytes: int
    fdcache: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Address of the service."""
        return f"ipc://{self.folder}/fdcache.sock"

    def storage(self, engine: str) -> Path:
        """Return the folder of an engine's storage."""
        folder = self.folder / f"storage-{engine}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _native(connector: str, places: Places, **extra: Any) -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": places.host_bytes, **extra}
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _fdcache(name: str, places: Places, module: str, connector: str, **variables: str) -> Engine:
    config = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_module_path": module}
    environment = {"FDCACHE_WRITE_POLICY": "write_through", **variables, **places.fdcache}
    return Engine(name, config, environment)


def make(name: str, places: Places, *, has_states: bool = False) -> Engine:
    """Return an engine by its name, for a model with layers that keep states if ``has_states``."""
    module, connector = "fdcache.integrations.vllm", "FdcacheConnector"
    if has_states:
        module, connector = "benchmarks.vllm.grouped", "GroupedConnector"
    own = {"FDCACHE_HOST_MEMORY": str(places.host_bytes), **CONTROLS.get(name, {})}
    if name.startswith(LEAST):
        return _fdcache(name, places, "benchmarks.vllm.least", "LeastConnector", **own)
    if name == "fdcache-service":
        return _fdcache(name, places, module, connector, FDCACHE_SERVER=places.address)
    if name == "fdcache-storage":
        own |= {
            "FDCACHE_STORAGE": "local",
            "FDCACHE_STORAGE_SIZE": str(places.host_bytes),
            "FDCACHE_STORAGE_DIR": str(places.storage(name)),
        }
    if name in FAULTY:
        module, connector = "benchmarks.vllm.faults", FAULTY[name]
    if name.startswith(OURS):
        return _fdcache(name, places, module, connector, **own)
    return _other(name, places)


def _other(name: str, places: Places) -> Engine:
    if name not in {*BESIDE, *RESTARTED}:
        raise ValueError(f"there is no engine {name!r}")
    if name == NONE:
        return Engine(name)
    if name == "lmcache":
        environment = {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{places.host_bytes / GIB:g}",
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_TRACK_USAGE": "false",
        }
        return Engine(name, {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, environment)
    if name.startswith("simple"):
        lazy = name == "simple-lazy"
        return Engine(name, _native("SimpleCPUOffloadConnector", places, lazy_offload=lazy))
    extra: dict[str, Any] = {"offload_prompt_only": False}
    if name == "tiering":
        tier = {"type": "fs", "root_dir": str(places.storage(name))}
        # With blocks of replies, vLLM 0.26 ends with a KeyError: a request's last blocks come after its state has gone.
        extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    return Engine(name, _native("OffloadingConnector", places, **extra))


BESIDE = (NONE, "offloading", "simple", "simple-lazy", "lmcache", OURS, "fdcache-service")
"""Engines of the loads, in the order of tables."""

RESTARTED = ("tiering", "fdcache-storage")
"""Engines whose storage is read after a restart."""


def needs(name: str) -> str | None:
    """Return why an engine cannot run with the packages of this interpreter, None if it can."""
    package = {"lmcache": "lmcache", NONE: "vllm"}.get(name)
    if name.startswith((OURS, LEAST)):
        package = "fdcache.integrations.vllm"
    if package is None:
        return None
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    return None if found else f"{package} cannot be imported"


NEEDS_GPU = {
    "lmcache": "LMCache has no connector for a CPU: it would compute everything, after a wait for each request"
}
"""Engines that start on a CPU and cache nothing there."""


def probe(
    python: str, variables: dict[str, str], folder: Path, device: str = "cuda"
) -> dict[str, str | None]:
    """Return why engines cannot run in another interpreter, as ``needs``; raise ``StartError`` if it does not run."""
    command = [
        python,
        "-c",
        "import json; from benchmarks.vllm import engines as e; print(json.dumps(e.all_needs()))",
    ]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"{python}: {(done.stderr.splitlines() or ['no output'])[-1]}")
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    if device == "cpu":
        found |= {name: why for name, why in NEEDS_GPU.items() if not found[name]}
    return found


def all_needs() -> dict[str, str | None]:
    """Return what every engine needs and is not there."""
    return {name: needs(name) for name in (*BESIDE, *RESTARTED, *CONTROLS)}


def arguments(
    shape: Shape, model: Path, *, device: str, eager: bool, compiled: bool = True
) -> dict[str, Any]:
    """Return the arguments of ``AsyncEngineArgs``, the same for every engine of a shape."""
    common = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": shape.dtype,
        "max_model_len": shape.longest,
        "num_gpu_blocks_override": shape.device_blocks,
        "max_num_batched_tokens": shape.batch_tokens,
        "max_num_seqs": min(64, shape.batch_tokens),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        **shape.options,
    }
    if device == "cpu":
        return common | {
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 28,
            "compilation_config": {"custom_ops": ["none"]},
        }
    graphs: dict[str, Any] = {"enforce_eager": True}
    if not eager:
        graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
        if not compiled:
            graphs["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL"}
    # No share of the device: several engines may be on it, and none of them takes the others' memory for its own.
    memory = {"kv_cache_memory_bytes": shape.device_bytes, "gpu_memory_utilization": 0.1}
    return common | graphs | memory | {"attention_backend": "TRITON_MLA" if shape.latent else "FLASH_ATTN"}


def environment(device: str, home: Path) -> dict[str, str]:
    """Return the variables that every engine process gets, with caches that all of them share."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(home / "compiled"),
        "TRITON_CACHE_DIR": str(home / "triton"),
    }
    if device == "cpu":
        one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return common | one_thread | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return common


class StartError(Exception):
    """A process has not started; the message has its last line."""


@contextmanager
def service(places: Places, log: Path, variables: dict[str, str]) -> Iterator[int]:
    """Run a service of fdcache's for the length of the context; yield its process id."""
    command = [sys.executable, "-m", "fdcache_cli.main", "serve", "--socket", places.address, "--http", "off"]
    command += ["--host-memory", str(places.host_bytes), "--discard"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        socket = Path(places.address.removeprefix("ipc://"))
        for _ in range(1200):
            if socket.exists():
                break
            if process.poll() is not None:
                raise StartError((log.read_text().splitlines() or ["no output"])[-1])
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        else:
            raise StartError("no socket after 120 s")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

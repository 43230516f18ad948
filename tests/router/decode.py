"""Decode messages with a consumer's own types: run by the Python of its environment, without fdcache.

    python tests/router/decode.py vllm|sglang FILE

FILE has JSON: a list of payloads in hexadecimal. Prints a list of events for each, with the name of its type.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """Return the module of the events. SGLang's is loaded alone: its package needs torch, and two of its modules."""
    if name == "vllm":
        from vllm.distributed import kv_events

        return kv_events
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    for other, wanted in {"runtime_context": "get_parallel", "utils.network": "NetworkAddress"}.items():
        module = types.ModuleType(f"sglang.srt.{other}")
        setattr(module, wanted, None)
        sys.modules[f"sglang.srt.{other}"] = module
    path = Path(package.submodule_search_locations[0]) / "srt/disaggregation/kv_events.py"
    spec = importlib.util.spec_from_file_location("kv_events", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    import msgspec

    events = load(sys.argv[1])
    decoder = msgspec.msgpack.Decoder(events.KVEventBatch)
    batches = [decoder.decode(bytes.fromhex(text)) for text in json.loads(Path(sys.argv[2]).read_text())]
    told = [
        [{"is": type(event).__name__} | msgspec.structs.asdict(event) for event in batch.events]
        for batch in batches
    ]
    sys.stdout.buffer.write(msgspec.json.encode(told))

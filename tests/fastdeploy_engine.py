"""An engine in FastDeploy's place in a process of its own, configured by the environment alone.

It serves one prompt twice and prints the settings and the hits as one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fdcache.devices.cpu import CpuDevice
from fdcache.integrations.fastdeploy import CacheController, CacheManager
from fdcache.layout import KVLayout
from tests.fastdeploy_help import BLOCK, fd_config, fd_request
from tests.service_help import until


def allocate(layout: KVLayout, num_blocks: int) -> Sequence[Any]:
    """Allocate NumPy tensors, so that the process starts quickly."""
    return [np.zeros((num_blocks, plane.nbytes), np.uint8) for plane in layout.planes]


def serve(manager: CacheManager, controller: CacheController, name: str) -> dict[str, int]:
    """Serve the prompt; return the blocks found by tier."""
    request = fd_request(name, prompt=[*range(4 * BLOCK), 99])
    manager.match_prefix(request)
    match = request._match_result
    manager.allocate_gpu_blocks(request, 5 - match.matched_device_nums)
    copy(manager, controller)
    request.output_token_ids.append(1)
    manager.check_and_add_pending_backup()
    manager.request_finish(request)
    copy(manager, controller)
    return {"device": match.matched_device_nums, "host": match.matched_host_nums}


def copy(manager: CacheManager, controller: CacheController) -> None:
    """Run a step's copies to their end."""
    while plans := manager.issue_pending_backup_to_batch_request():
        controller.submit_swap_tasks(plans)
        manager.apply(controller.core.wait_reports(timeout=60))


def main() -> None:
    config = fd_config(total_block_num=32, num_cpu_blocks=0)
    manager = CacheManager(config)
    controller = CacheController(config, 0, 0, device=CpuDevice(), allocate=allocate)
    planes = controller.initialize_kv_cache(None, 32)
    if scan := controller.initialize_storage():
        manager.core.restore_storage([scan])
    core, transfer = manager.core, controller.core.settings
    if core.settings.server:
        until(lambda: core._host.index.room >= 4, "slots are granted")  # type: ignore[union-attr]
    found = [serve(manager, controller, name) for name in ("first", "second")]
    storage = controller.core.storage_stats()
    json.dump(
        {
            "found": found,
            "host_hit_tokens": core.get_stats().counters.host_hit_tokens,
            "server": core.host_cache.server,
            "write_policy": core.settings.write_policy,
            "device_blocks": [core.num_device_blocks, len(planes[0])],
            "host_blocks": core.num_host_blocks,
            "storage": storage and storage.name,
            "drain_timeout": transfer.drain_timeout,
            "plan_timeout": core.settings.plan_timeout,
            "event_buffer": core.settings.event_buffer,
            "verify": transfer.verify,
        },
        sys.stdout,
    )
    controller.shutdown()
    core.close()


if __name__ == "__main__":
    main()

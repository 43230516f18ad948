"""The connector for models of several groups of layers, in versions of vLLM for which it declares none.

There vLLM does not tell a connector which blocks have states, so ``install`` has it do so, and a load that fails ends
the engine: this is for measuring alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def _connector() -> type[Any]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    from fdcache.integrations.vllm import FdcacheConnector

    if issubclass(FdcacheConnector, SupportsHMA):
        return FdcacheConnector

    class GroupedConnector(FdcacheConnector, SupportsHMA):  # type: ignore[misc]
        """Lets vLLM keep several groups."""

    return GroupedConnector


def install() -> None:
    """Have vLLM's scheduler tell a connector of the states at the end of each step, as versions since 0.33 do."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    if "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__:
        return
    build = Scheduler._build_kv_connector_meta

    def told(self: Any, connector: Any, output: Any) -> Any:
        found = {
            name: list(_states(self, name, count)) for name, count in output.num_scheduled_tokens.items()
        }
        output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=found)
        try:
            return build(self, connector, output)
        finally:
            del output.kv_connector_block_state

    Scheduler._build_kv_connector_meta = told


def _states(scheduler: Any, request_id: str, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield the group, the block and the tokens of each state at the end of a step, if it is the end of a block."""
    end = scheduler.requests[request_id].num_computed_tokens + num_tokens
    tables = scheduler.kv_cache_manager.get_block_ids(request_id)
    for number, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        size = group.kv_cache_spec.block_size
        if type(group.kv_cache_spec).__name__ == "MambaSpec" and not end % size:
            yield number, tables[number][end // size - 1], end


def __getattr__(name: str) -> Any:
    if name != "GroupedConnector":
        raise AttributeError(name)
    return _connector()

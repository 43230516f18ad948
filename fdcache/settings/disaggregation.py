"""Prefill and decode on separate instances."""

from fdcache.settings.kinds import Flag, Integer, WholeSeconds
from fdcache.settings.variable import Group, OldType, variable


class DisaggregationSettings(Group):
    """The hand-over from prefill to decode."""

    changeable: Flag = variable(
        "FD_PD_CHANGEABLE", False, "Let a split deployment become a centralised one.", old=OldType.TEXT
    )
    cache_task: Flag = variable(
        "FD_ENABLE_CACHE_TASK",
        False,
        "Let the decode side keep requests that wait for preallocation.",
        old=OldType.TEXT,
    )
    max_prefetch: Integer = variable(
        "FD_EP_MAX_PREFETCH_TASK_NUM", 8, "Most requests prefetched ahead.", old=OldType.INT, ge=0
    )
    keep_asking_decode: Flag = variable(
        "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES",
        True,
        "Let prefill keep asking decode for room.",
        old=OldType.INT,
    )
    eager_rdma: Flag = variable(
        "FD_ENABLE_PD_RDMA_EAGER_CONNECT", False, "Connect RDMA early.", old=OldType.BOOL
    )
    wait_decode: WholeSeconds = variable(
        "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS",
        30,
        "How long prefill waits for room on the decode side.",
        old=OldType.INT,
        ge=0,
        unit="s",
        live=True,
    )
    reorder: Flag = variable(
        "FD_PD_REORDER", False, "Reorder requests between prefill and decode.", old=OldType.INT
    )

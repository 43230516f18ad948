"""What the scheduler side is told: tiers, write policy, deadlines."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class WritePolicy(StrEnum):
    """When a device block is copied to the host tier."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class EvictionPolicy(StrEnum):
    """The order in which unpinned blocks leave a full tier."""

    LRU = "lru"


class CacheSettings(BaseModel):
    """Settings of ``CacheManager``. It reads no environment; whoever builds it says where values come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_blocks: int = Field(gt=0, description="Blocks of the device tier.")
    host_memory: int = Field(
        default=0, ge=0, description="Bytes of host memory per rank; 0 turns the tier off."
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse blocks between requests.")
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_through_threshold: int = Field(
        default=2, ge=1, description="Hits after which write_through_selective backs a block up."
    )
    clean_reserve: int = Field(
        default=64, ge=0, description="Blocks next to be evicted that write_back keeps backed up in advance."
    )
    eviction: EvictionPolicy = EvictionPolicy.LRU
    defer_timeout: float = Field(
        default=1.0, ge=0, description="Seconds a match waits for another request's copy of the same block."
    )
    plan_timeout: float = Field(
        default=30.0, gt=0, description="Seconds until an unreported plan is overdue."
    )
    event_buffer: int = Field(
        default=0, ge=0, description="Most tier events kept for take_events(); 0 is off."
    )

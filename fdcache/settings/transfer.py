"""What the worker side is told: how blocks are copied."""

from pydantic import BaseModel, ConfigDict, Field


class TransferSettings(BaseModel):
    """Settings of ``CacheController``. It reads no environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_group_layers: int = Field(default=1, ge=1, description="Layers in the first group of a load.")
    group_layers: int = Field(default=4, ge=1, description="Layers in each later group of a load.")
    copy_threads: int = Field(default=1, ge=1, le=64, description="CPU copy threads per direction.")
    layer_timeout: float = Field(default=30.0, gt=0, description="Seconds wait_for_layer waits by default.")
    drain_timeout: float = Field(
        default=30.0, gt=0, description="Seconds shutdown waits for copies in flight."
    )

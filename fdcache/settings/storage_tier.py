"""The storage tier: what keeps blocks beyond the process, and how long anybody waits for it."""

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Integer, Seconds, Size, Text
from fdcache.settings.variable import Group, Place, variable


class FsyncPolicy(StrEnum):
    """When written blocks are made to survive power loss; all of them survive the end of the process."""

    NEVER = "never"
    INTERVAL = "interval"
    ALWAYS = "always"


class PrefetchPolicy(StrEnum):
    """How long a request waits for blocks that are being read from storage."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class StorageTierSettings(Group):
    """Settings of the storage tier, for the scheduler and the workers alike."""

    used_in = (Place.STORAGE,)

    connector: Text = variable(
        "FDCACHE_STORAGE",
        "none",
        "What keeps blocks: none, local, mooncake, attnstore, or the name of an installed connector.",
    )
    directory: FilePath = variable(
        "FDCACHE_STORAGE_DIR", Path("/var/lib/fdcache"), "The folder of the local storage's files."
    )
    size: Size = variable(
        "FDCACHE_STORAGE_SIZE",
        64 * 2**30,
        "The most bytes of local storage for each rank and model.",
        ge=4096,
        unit="bytes",
    )
    fsync: FsyncPolicy = variable(
        "FDCACHE_STORAGE_FSYNC",
        FsyncPolicy.INTERVAL,
        "When written blocks are made to survive power loss; a killed process loses none either way.",
    )
    fsync_interval: Seconds = variable(
        "FDCACHE_STORAGE_FSYNC_INTERVAL",
        5.0,
        "The time between syncs of the policy interval.",
        gt=0,
        unit="s",
    )
    threads: Integer = variable(
        "FDCACHE_STORAGE_THREADS",
        16,
        "Requests to the local storage in flight at once, for each rank.",
        ge=1,
        le=256,
        unit="threads",
    )
    retry_after: Seconds = variable(
        "FDCACHE_STORAGE_RETRY", 5.0, "How long a failed storage is left alone.", ge=0, unit="s"
    )
    timeout: Seconds = variable(
        "FDCACHE_STORAGE_TIMEOUT",
        10.0,
        "How long after its start one read or write begins no further block.",
        gt=0,
        unit="s",
    )
    prefetch_policy: PrefetchPolicy = variable(
        "FDCACHE_PREFETCH_POLICY",
        PrefetchPolicy.TIMEOUT,
        "How long a request waits for blocks being read: not at all, until the end, or within a budget.",
    )
    prefetch_timeout: Seconds = variable(
        "FDCACHE_PREFETCH_TIMEOUT", 0.5, "What the budget of the policy timeout begins with.", ge=0, unit="s"
    )
    prefetch_bandwidth: Size = variable(
        "FDCACHE_PREFETCH_BANDWIDTH",
        256 * 2**20,
        "Bytes a second that the budget reckons with beyond that.",
        gt=0,
        unit="bytes/s",
    )
    write_blocks: Integer = variable(
        "FDCACHE_STORAGE_WRITE_BLOCKS",
        256,
        "Most blocks on their way to storage at once; more wait or are dropped.",
        ge=1,
        unit="blocks",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a storage tier."""
        return self.connector.lower() not in ("", "none")

"""The exception family. Every error names what was wrong, where, and what to do about it.

Failures of the data path (a load that failed, a pool that is full) are values, not exceptions; what stands
here is raised for a caller's mistake or for a machine that cannot do what was asked.
"""


class FdcacheError(Exception):
    """The base of every error that fdcache raises on purpose."""


class ConfigurationError(FdcacheError):
    """A setting is missing, malformed or contradicts another."""


class LayoutError(FdcacheError, ValueError):
    """A KV layout field is out of range or inconsistent with another."""


class UnsupportedLayoutError(LayoutError):
    """A layout that fdcache does not support yet, such as sliding-window or hybrid cache groups."""


class HashingError(FdcacheError, ValueError):
    """Tokens or extra keys that cannot be hashed."""


class RequestStateError(FdcacheError):
    """A call that the request's state does not admit, such as committing a finished request."""


class UnsupportedCallError(FdcacheError, NotImplementedError):
    """A call that fdcache refuses on purpose; the message says what to call instead."""


class StaleLeaseError(FdcacheError):
    """A lease from before a reset was asked to match, reserve or commit."""


class IntegrityError(FdcacheError):
    """An invariant of a tier does not hold; the message says which."""


class PlanError(FdcacheError, ValueError):
    """A transfer plan that a worker cannot carry out: slots out of range, unequal lengths, no such layer."""


class CacheNotReadyError(FdcacheError):
    """A worker call that needs device or host memory which is not there yet."""


class HostMemoryError(FdcacheError, MemoryError):
    """Host memory that was asked for is not there; the message says what would fit."""


class TensorError(FdcacheError, ValueError):
    """A tensor that is not a plane of the layout: wrong device, shape, bytes or strides."""


class StreamError(FdcacheError, ValueError):
    """A stream that cannot be used here: of another device, or being captured into a graph."""


class DeviceError(FdcacheError):
    """No such device, or none at all; the message says what there is."""


class KernelError(DeviceError):
    """The swap kernels cannot be compiled or loaded for a GPU; the message says why and has the remedy."""


class DeviceLostError(DeviceError):
    """The device failed for good; the process must be started anew."""


class TransferTimeoutError(FdcacheError, TimeoutError):
    """Copies in flight did not end within the caller's timeout; nothing that they touch was freed."""


class TaskCancelledError(FdcacheError):
    """The result of a cancelled task was asked for."""


class ForkedProcessError(FdcacheError):
    """An object that owns threads or memory was used in a forked child; start workers with 'spawn'."""


class LayerSwapTimeoutError(FdcacheError, TimeoutError):
    """A layer's load did not end within the caller's timeout."""


class TraceError(FdcacheError, ValueError):
    """A trace line that cannot be read; the message names file, line and field."""


class ReplayError(FdcacheError):
    """A replay that cannot go on: a rank that failed or died, or requests that can make no progress."""


class ReplayOptionError(ConfigurationError, ValueError):
    """A replay option that this machine or another option does not admit: ``option`` and ``reason``."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class StorageError(FdcacheError):
    """The storage tier cannot do what was asked; engines go on without it."""


class StorageFormatError(StorageError):
    """A storage file of another program, version, layout or rank, or one whose superblock is damaged."""


class StorageBusyError(StorageError):
    """Another process has the storage file open for writing."""


class StorageFullError(StorageError, OSError):
    """No room on the file system, or a quota or file size limit is reached; the tier goes on in what it has."""


class StorageReadOnlyError(StorageError, OSError):
    """The file system or its permissions do not allow writing; the tier reads but does not write."""


class StorageGoneError(StorageError, OSError):
    """The storage file or its mount is not there any more; the tier is off until it is back."""


class StorageDeviceError(StorageError, OSError):
    """The device failed at slot headers or at several records; the tier is off until it answers again."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage did not answer within the deadline."""


class ConnectorNotFoundError(StorageError, ConfigurationError):
    """No connector of the configured name; the message says what to install."""


class ServiceError(FdcacheError):
    """Something between a service and its clients."""


class ServiceUnavailableError(ServiceError):
    """No service answered in time."""


class ProtocolError(ServiceError):
    """A message that cannot be understood, or that breaks a limit."""


class RefusedError(ServiceError):
    """The service refused a request: ``code`` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServiceRunningError(ServiceError):
    """Another service serves this address, or holds this arena; the message has its process id."""

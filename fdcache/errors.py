"""The exception hierarchy.

    from fdcache import CacheManager, FdcacheError

    try:
        manager = CacheManager.from_settings(layout)
    except FdcacheError as error:
        sys.exit(f"error: {error}")

* FdcacheError
  * ConfigurationError
    * SettingsError (in fdcache.settings)
    * ReplayOptionError
    * ConnectorNotFoundError (also a StorageError)
  * LayoutError
    * UnsupportedLayoutError
  * HashingError
  * HintError
  * RequestStateError
  * UnsupportedCallError
  * StaleLeaseError
  * IntegrityError
  * PlanError
  * CacheNotReadyError
  * HostMemoryError
  * TensorError
  * StreamError
  * DeviceError
    * KernelError
    * DeviceLostError
  * TransferTimeoutError
  * TaskCancelledError
  * ForkedProcessError
  * LayerSwapTimeoutError
  * TraceError
  * ReplayError
  * StorageError
    * StorageFormatError
    * StorageBusyError
    * StorageFullError
    * StorageReadOnlyError
    * StorageGoneError
    * StorageDeviceError
  * TransferError
    * TransferNotFoundError (also a ConfigurationError)
  * ServiceError
    * ServiceUnavailableError
    * ProtocolError
    * RefusedError
    * ServiceRunningError

Every message says what is wrong, where, and the remedy. Failures on the data path, such as a failed load or a full
pool, are values and not exceptions.
"""


class FdcacheError(Exception):
    """Base class of every error that fdcache raises on purpose."""


class ConfigurationError(FdcacheError):
    """A setting is missing, malformed or conflicts with another."""


class LayoutError(FdcacheError, ValueError):
    """A field of a KV layout is out of range or inconsistent with another."""


class UnsupportedLayoutError(LayoutError):
    """The layout is not supported yet, such as state-space layers, or several groups of layers where one is served."""


class HashingError(FdcacheError, ValueError):
    """Tokens or extra keys cannot be hashed."""


class HintError(FdcacheError, ValueError):
    """A hint about the reuse of blocks contradicts itself."""


class RequestStateError(FdcacheError):
    """The request's state does not allow the call, such as committing a finished request."""


class UnsupportedCallError(FdcacheError, NotImplementedError):
    """The call is refused on purpose; the message names the call to use instead."""


class StaleLeaseError(FdcacheError):
    """A lease from before a reset was used to match, reserve or commit."""


class IntegrityError(FdcacheError):
    """An invariant of a tier is violated; the message names it."""


class PlanError(FdcacheError, ValueError):
    """A worker cannot execute a plan: slots out of range, unequal lengths, unknown layer."""


class CacheNotReadyError(FdcacheError):
    """A worker call needs device or host memory that is not allocated yet."""


class HostMemoryError(FdcacheError, MemoryError):
    """Host memory cannot be allocated; the message says what would fit."""


class TensorError(FdcacheError, ValueError):
    """A tensor is not a plane of the layout: wrong device, shape, bytes or strides."""


class StreamError(FdcacheError, ValueError):
    """A stream cannot be used: it belongs to another device or is being captured into a graph."""


class DeviceError(FdcacheError):
    """There is no such device; the message lists the devices."""


class KernelError(DeviceError):
    """The swap kernels cannot be compiled or loaded for a GPU; the message gives reason and remedy."""


class DeviceLostError(DeviceError):
    """The device failed permanently; restart the process."""


class TransferTimeoutError(FdcacheError, TimeoutError):
    """Copies in flight did not end within the caller's timeout. Their memory stays allocated."""


class TaskCancelledError(FdcacheError):
    """A cancelled task has no result."""


class ForkedProcessError(FdcacheError):
    """An object with threads or memory was used in a forked child; start workers with 'spawn'."""


class LayerSwapTimeoutError(FdcacheError, TimeoutError):
    """A layer's load did not end within the caller's timeout."""


class TraceError(FdcacheError, ValueError):
    """A trace line cannot be read; the message names file, line and field."""


class ReplayError(FdcacheError):
    """A replay cannot continue: a rank failed or died, or no request can make progress."""


class ReplayOptionError(ConfigurationError, ValueError):
    """A replay option conflicts with the machine or another option, named by ``option`` and ``reason``."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class StorageError(FdcacheError):
    """The storage tier cannot do what was asked; engines continue without it."""


class StorageFormatError(StorageError):
    """A storage file has another program, version, layout or rank, or a damaged superblock."""


class StorageBusyError(StorageError):
    """Another process has the storage file open for writing."""


class StorageFullError(StorageError, OSError):
    """File system, quota or file size limit is exhausted; the tier continues within the space that it has."""


class StorageReadOnlyError(StorageError, OSError):
    """File system or permissions do not allow writing; the tier only reads."""


class StorageGoneError(StorageError, OSError):
    """The storage file or its mount is gone; the tier is off until it is back."""


class StorageDeviceError(StorageError, OSError):
    """The device failed at slot headers or at several records; the tier is off until it responds again."""


class ConnectorNotFoundError(StorageError, ConfigurationError):
    """There is no connector of the configured name; the message says what to install."""


class TransferError(FdcacheError):
    """Blocks cannot be handed over between instances; engines compute them instead."""


class TransferNotFoundError(TransferError, ConfigurationError):
    """There is no transfer connector of the configured name; the message says what to install."""


class ServiceError(FdcacheError):
    """Base class of errors between a service and its clients."""


class ServiceUnavailableError(ServiceError):
    """No service responded in time."""


class ProtocolError(ServiceError):
    """A message cannot be decoded or exceeds a limit."""


class RefusedError(ServiceError):
    """The service refuses a request, in its process and its client's: ``code`` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServiceRunningError(ServiceError):
    """Another service uses this address or arena; the message has its process id."""

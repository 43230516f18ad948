"""The engine's own cache manager, for what fdcache does not replace."""

from fdcache.settings.kinds import FilePathOrNone, Flag, Integer, WholeSeconds
from fdcache.settings.variable import Group, OldType, Place, variable


class EngineCacheSettings(Group):
    """The engine's own cache manager."""

    v1_manager: Flag = variable(
        "ENABLE_V1_KVCACHE_MANAGER",
        False,
        "Use cache manager v1.",
        old=OldType.INT,
        used_in=(Place.FASTDEPLOY,),
    )
    parameters: FilePathOrNone = variable(
        "FD_CACHE_PARAMS",
        None,
        "The folder of KV quantisation parameters.",
        old=OldType.TEXT,
        old_default="none",
    )
    clear_swap_space: Flag = variable(
        "FD_ENABLE_SWAP_SPACE_CLEARING",
        False,
        "Free the host cache when weights are cleared.",
        old=OldType.INT,
        used_in=(Place.FASTDEPLOY,),
    )
    exit_timeout: WholeSeconds = variable(
        "FD_CACHE_PROC_EXIT_TIMEOUT",
        600,
        "How long the old cache process may take to end.",
        old=OldType.INT,
        ge=0,
        unit="s",
        used_in=(Place.SERVE, Place.CONTROLLER),
    )
    error_limit: Integer = variable(
        "FD_CACHE_PROC_ERROR_COUNT",
        10,
        "Errors after which the old cache process gives up.",
        old=OldType.INT,
        ge=0,
    )
    head_wise: Flag = variable(
        "FD_HEAD_WISE_KV_CACHE",
        False,
        "Manage KV blocks per attention head.",
        old=OldType.INT,
        undeclared=True,
    )

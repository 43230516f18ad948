"""Storage that the engine itself reads and writes."""

from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, Secret, Url
from fdcache.settings.variable import Group, OldType, Place, variable


class StorageSettings(Group):
    """File storage and the object store of features."""

    file_directory: FilePath = variable(
        "FILE_BACKEND_STORAGE_DIR",
        Path("/tmp/fastdeploy"),
        "The folder of the file storage backend.",
        old=OldType.TEXT,
        used_in=(Place.STORAGE,),
    )
    bos_access_key: Secret | None = variable(
        "ENCODE_FEATURE_BOS_AK", None, "The access key of the object store.", old=OldType.TEXT
    )
    bos_secret_key: Secret | None = variable(
        "ENCODE_FEATURE_BOS_SK", None, "The secret key of the object store.", old=OldType.TEXT
    )
    bos_endpoint: Url | None = variable(
        "ENCODE_FEATURE_ENDPOINT", None, "The address of the object store.", old=OldType.TEXT
    )
    attention_store_only_flush: Flag = variable(
        "FD_AS_ONLY_FLUSH",
        False,
        "Only write to AttentionStore, never read from it.",
        old=OldType.BOOL,
        undeclared=True,
    )

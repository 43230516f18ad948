"""Where further settings come from."""

from fdcache.settings.kinds import FilePath
from fdcache.settings.variable import Group, Place, variable


class FileSettings(Group):
    """Sources beside the environment. Both are read from the environment alone."""

    used_in = (Place.EVERYWHERE,)

    env_file: FilePath | None = variable(
        "FDCACHE_ENV_FILE", None, "A dotenv file with settings; no other is ever read."
    )
    secrets_directory: FilePath | None = variable(
        "FDCACHE_SECRETS_DIR", None, "A folder whose files are named after variables and hold their values."
    )

"""What is reported about the installation, and to whom."""

from pathlib import Path

from fdcache.settings.kinds import Flag, HomePath, Text, Url
from fdcache.settings.variable import Group, OldType, variable


class UsageSettings(Group):
    """Usage reports and the user folder."""

    do_not_track: Flag = variable("DO_NOT_TRACK", False, "Send no usage report.", old=OldType.BOOL)
    server: Url | None = variable(
        "FD_USAGE_STATS_SERVER",
        None,
        "The address that usage reports are sent to; none sends nothing.",
        old=OldType.TEXT,
        old_default="",
    )
    source: Text = variable(
        "FD_USAGE_SOURCE", "Unknown", "The label of this installation in usage reports.", old=OldType.TEXT
    )
    config_root: HomePath = variable(
        "FD_CONFIG_ROOT",
        Path("~/.config/fastdeploy"),
        "The folder of per-user configuration.",
        old=OldType.TEXT,
    )

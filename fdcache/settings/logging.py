"""What the engine writes to its logs and console."""

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, Integer
from fdcache.settings.variable import Group, OldType, Place, variable


class LogLevel(StrEnum):
    """How much is logged."""

    INFO = "INFO"
    DEBUG = "DEBUG"


class LoggingSettings(Group):
    """Log folder, level and detail."""

    directory: FilePath = variable(
        "FD_LOG_DIR",
        Path("log"),
        "The folder that log files are written to.",
        old=OldType.TEXT,
        used_in=(Place.SERVE, Place.INIT),
    )
    level: LogLevel | None = variable(
        "FD_LOG_LEVEL",
        None,
        "The log level; when set it overrides FD_DEBUG.",
        old=OldType.TEXT,
        used_in=(Place.SERVE,),
    )
    debug: Flag = variable(
        "FD_DEBUG",
        False,
        "Log at debug level.",
        old=OldType.INT,
        used_in=(Place.SERVE,),
    )
    requests: Flag = variable("FD_LOG_REQUESTS", True, "Log each request.", old=OldType.INT, live=True)
    requests_detail: Integer = variable(
        "FD_LOG_REQUESTS_LEVEL",
        2,
        "How much of a request is logged, 0 the least.",
        old=OldType.INT,
        ge=0,
        le=3,
        live=True,
    )
    requests_max_length: Integer = variable(
        "FD_LOG_MAX_LEN",
        2048,
        "The length at which texts in request logs are cut.",
        old=OldType.INT,
        ge=0,
        unit="characters",
        live=True,
    )
    backup_count: Integer = variable(
        "FD_LOG_BACKUP_COUNT",
        7,
        "How long log files are kept.",
        old=OldType.TEXT,
        ge=0,
        unit="days",
        used_in=(Place.SERVE,),
    )
    console_metrics: Flag = variable(
        "FD_CONSOLE_SCHEDULER_METRICS",
        True,
        "Print a line per scheduled batch on the console.",
        old=OldType.BOOL,
    )
    console_decode_interval: Integer = variable(
        "FD_CONSOLE_DECODE_LOG_INTERVAL",
        5,
        "Decode steps per console line.",
        old=OldType.INT,
        ge=1,
        unit="steps",
    )

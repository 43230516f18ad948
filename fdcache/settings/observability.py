"""What the engine writes to its logs and console."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, HomePath, Integer, Milliseconds, Secret, Text, Url
from fdcache.settings.variable import Component, EngineChoice, Group, OldType, variable


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
        used_in=(Component.SERVE, Component.INIT),
    )
    level: LogLevel | None = variable(
        "FD_LOG_LEVEL",
        None,
        "The log level; when set it overrides FD_DEBUG.",
        old=OldType.TEXT,
        used_in=(Component.SERVE,),
    )
    debug: Flag = variable(
        "FD_DEBUG",
        False,
        "Log at debug level.",
        old=OldType.INT,
        used_in=(Component.SERVE,),
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
        used_in=(Component.SERVE,),
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


class TraceMode(EngineChoice):
    """Which traces are taken."""

    OFF = "off"
    LOCAL = "local"
    OTEL = "otel"
    ALL = "all"


class TracingSettings(Group):
    """Tracing switches and the exporter."""

    mode: TraceMode = variable("FD_TRACE", TraceMode.OFF, "Which traces the engine takes.", old=OldType.TEXT)
    enabled: Flag = variable(
        "TRACES_ENABLE", False, "Export OpenTelemetry traces.", old=OldType.TEXT, old_flag=("false", "true")
    )
    service_name: Text = variable(
        "FD_SERVICE_NAME", "FastDeploy", "The service name in traces.", old=OldType.TEXT
    )
    host_name: Text = variable("FD_HOST_NAME", "localhost", "The host name in traces.", old=OldType.TEXT)
    exporter: Text = variable(
        "TRACES_EXPORTER", "console", "The trace exporter, such as console or otlp.", old=OldType.TEXT
    )
    endpoint: Url | None = variable(
        "EXPORTER_OTLP_ENDPOINT", None, "The address that traces are sent to.", old=OldType.TEXT
    )
    headers: Secret | None = variable(
        "EXPORTER_OTLP_HEADERS",
        None,
        "Headers sent with traces, which usually hold a token.",
        old=OldType.TEXT,
    )
    job_id: Text | None = variable("FD_JOB_ID", None, "The job id in traces.", old=OldType.TEXT)
    export_delay: Milliseconds = variable(
        "FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS",
        500,
        "The time between two exports of traces.",
        old=OldType.INT,
        ge=1,
        unit="ms",
    )
    export_batch: Integer = variable(
        "FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE",
        64,
        "Most spans in one export.",
        old=OldType.INT,
        ge=1,
        unit="spans",
    )


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

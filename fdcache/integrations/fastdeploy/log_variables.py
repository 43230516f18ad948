"""Settings of logs, traces and usage reports, of the engine and of `fdcache serve`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from fdcache.settings.kinds import FilePath, Flag, HomePath, Integer, Milliseconds, Secret, Text, Url
from fdcache.settings.variable import Component, EngineChoice, Group, OldType, variable


class LogLevel(StrEnum):
    """What FastDeploy writes into its logs."""

    INFO = "INFO"
    DEBUG = "DEBUG"


class LoggingSettings(Group):
    """Log folder, level and detail."""

    directory: FilePath = variable(
        "FD_LOG_DIR",
        Path("log"),
        "Folder of log files.",
        old=OldType.TEXT,
        used_in=(Component.SERVE, Component.INIT, Component.MANAGER, Component.CONTROLLER),
        acts="the folder of log files of `fdcache serve` and of engines, if it is set",
    )
    level: LogLevel | None = variable(
        "FD_LOG_LEVEL",
        None,
        "Log level, which overrides FD_DEBUG.",
        old=OldType.TEXT,
        used_in=(Component.SERVE, Component.MANAGER, Component.CONTROLLER),
        acts="the level of the log of `fdcache serve` and of engines",
    )
    debug: Flag = variable(
        "FD_DEBUG",
        False,
        "Log at debug level.",
        old=OldType.INT,
        used_in=(Component.SERVE, Component.MANAGER, Component.CONTROLLER),
        acts="1: debug level in `fdcache serve` and in engines, if `FD_LOG_LEVEL` is not set",
    )
    requests: Flag = variable("FD_LOG_REQUESTS", True, "Log each request.", old=OldType.INT, live=True)
    requests_detail: Integer = variable(
        "FD_LOG_REQUESTS_LEVEL",
        2,
        "Detail of request logs, from 0 (least) to 3.",
        old=OldType.INT,
        ge=0,
        le=3,
        live=True,
    )
    requests_max_length: Integer = variable(
        "FD_LOG_MAX_LEN",
        2048,
        "Maximum length of texts in request logs.",
        old=OldType.INT,
        ge=0,
        unit="characters",
        live=True,
    )
    backup_count: Integer = variable(
        "FD_LOG_BACKUP_COUNT",
        7,
        "Days for which log files are kept.",
        old=OldType.TEXT,
        ge=0,
        unit="days",
        used_in=(Component.SERVE, Component.MANAGER, Component.CONTROLLER),
        acts="days for which `fdcache serve` and engines keep log files",
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
    """Traces to record."""

    OFF = "off"
    LOCAL = "local"
    OTEL = "otel"
    ALL = "all"


class TracingSettings(Group):
    """Tracing switches and the exporter."""

    mode: TraceMode = variable("FD_TRACE", TraceMode.OFF, "Traces that the engine records.", old=OldType.TEXT)
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
        "EXPORTER_OTLP_ENDPOINT", None, "Address to which traces are exported.", old=OldType.TEXT
    )
    headers: Secret | None = variable(
        "EXPORTER_OTLP_HEADERS",
        None,
        "Headers sent with traces; they usually contain a token.",
        old=OldType.TEXT,
    )
    job_id: Text | None = variable("FD_JOB_ID", None, "The job id in traces.", old=OldType.TEXT)
    export_delay: Milliseconds = variable(
        "FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS",
        500,
        "Time between exports of traces.",
        old=OldType.INT,
        ge=1,
        unit="ms",
    )
    export_batch: Integer = variable(
        "FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE",
        64,
        "Maximum number of spans in one export.",
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
        "Address for usage reports. Unset, none is sent.",
        old=OldType.TEXT,
        old_default="",
    )
    source: Text = variable(
        "FD_USAGE_SOURCE", "Unknown", "The label of this installation in usage reports.", old=OldType.TEXT
    )
    config_root: HomePath = variable(
        "FD_CONFIG_ROOT",
        Path("~/.config/fastdeploy"),
        "Folder of per-user configuration.",
        old=OldType.TEXT,
    )

"""Where traces go."""

from fdcache.settings.kinds import Flag, Integer, Milliseconds, Secret, Text, Url
from fdcache.settings.variable import EngineChoice, Group, OldType, variable


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

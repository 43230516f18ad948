"""Log lines of the service: text on a terminal, JSON elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path

from fdcache.errors import ConfigurationError
from fdcache.settings import Settings, Source
from fdcache.settings.parsing import printable
from fdcache.settings.server import LogFormat


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, and the traceback if there is one."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """One line of text each; a name in it cannot begin another, or write over the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, without the traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)


def _log_file(directory: Path, backup_count: int) -> TimedRotatingFileHandler:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return TimedRotatingFileHandler(directory / "fdcache-serve.log", when="D", backupCount=backup_count)
    except OSError as error:
        raise ConfigurationError(
            f"FD_LOG_DIR: {directory} cannot be written: {error.strerror}; choose another folder"
        ) from error


def configure(settings: Settings) -> None:
    """Log to standard error, and to a file by day where ``FD_LOG_DIR`` is set.

    Raises ``ConfigurationError`` when the file cannot be written.
    """
    chosen = settings.server.log_format
    as_text = sys.stderr.isatty() if chosen is LogFormat.AUTO else chosen is LogFormat.TEXT
    formatter = TextFormatter("%(asctime)s %(levelname)s %(message)s") if as_text else JsonFormatter()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if settings.source("FD_LOG_DIR") is not Source.DEFAULT:
        directory = settings.logging.directory
        handlers.append(_log_file(directory, settings.logging.backup_count))
    logger = logging.getLogger("fdcache")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    level = settings.logging.level
    debug = level == "DEBUG" or (level is None and settings.logging.debug)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False

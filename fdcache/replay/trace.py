"""Mooncake trace format: one JSON object per line, prompts as ids of blocks, of 512 tokens unless told otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from fdcache.errors import TraceError
from fdcache.machine.decoding import MALFORMED
from fdcache.replay.workloads import OUTPUT_STREAMS, WorkItem

TRACE_BLOCK_TOKENS = 512
_LONGEST_LINE = 64 << 20

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_TraceId = Annotated[int, msgspec.Meta(ge=0, lt=OUTPUT_STREAMS)]


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace; other fields of the line are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Natural
    hash_ids: Annotated[list[_TraceId], msgspec.Meta(min_length=1)]


_decoder = msgspec.json.Decoder(TraceLine)
_FIELD_IN_PATH = re.compile(r"at `\$\.(\w+)")
_FIELD_MISSING = re.compile(r"missing required field `(\w+)`")


def read_trace(
    path: Path, limit: int | None = None, id_tokens: int = TRACE_BLOCK_TOKENS
) -> Iterator[WorkItem]:
    """Iterate over the requests of a Mooncake JSONL file; blank lines are skipped.

    A prompt longer than its ``hash_ids`` cover (``id_tokens`` each) is clipped; ``clipped_tokens`` counts the rest.
    Raises ``TraceError`` naming file, line and field for an invalid line, and for a file that cannot be opened, or that
    has no request.
    """
    try:
        with path.open("rb") as lines:
            index = 0
            for number, text in enumerate(iter(partial(lines.readline, _LONGEST_LINE + 1), b""), start=1):
                if index == limit:
                    return
                if len(text) > _LONGEST_LINE:
                    wrong = f"it has more than {_LONGEST_LINE >> 20} MiB"
                    raise TraceError(f"{path}, line {number}, field the whole line: {wrong}")
                if text.strip():
                    yield _item(index, _decode(text, path, number), id_tokens)
                    index += 1
    except OSError as error:
        raise TraceError(f"{path}: the trace cannot be read: {error.strerror or error}") from error
    if not index:
        raise TraceError(f"{path}: the trace has no request, so that nothing would be checked")


def _decode(text: bytes, path: Path, number: int) -> TraceLine:
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError as error:
        found = _FIELD_IN_PATH.search(str(error)) or _FIELD_MISSING.search(str(error))
        field = found.group(1) if found else "the whole line"
        raise TraceError(f"{path}, line {number}, field {field}: {error}") from error
    except MALFORMED as error:
        raise TraceError(
            f"{path}, line {number}, field the whole line: not a JSON object: {error}"
        ) from error


def _item(index: int, line: TraceLine, id_tokens: int) -> WorkItem:
    streams = np.array(line.hash_ids, dtype=np.uint64)
    length = min(line.input_length, len(streams) * id_tokens)
    used = -(-length // id_tokens)
    lengths = np.full(used, id_tokens, dtype=np.int64)
    lengths[-1] = length - (used - 1) * id_tokens
    return WorkItem(
        index=index,
        timestamp_ms=line.timestamp,
        streams=streams[:used],
        lengths=lengths,
        output_stream=OUTPUT_STREAMS + index,
        output_length=line.output_length,
        clipped_tokens=line.input_length - length,
    )

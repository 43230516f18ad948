"""OpenAPI schemas of answers, which are those of the records that a service sends."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMAS = "#/components/schemas/{name}"


def returns(view: Any, description: str) -> dict[int | str, dict[str, Any]]:
    """Describe an answer by the schema of its record, which ``_Api`` adds to the components."""
    (schema,), _ = msgspec.json.schema_components([view], ref_template=SCHEMAS)
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}}

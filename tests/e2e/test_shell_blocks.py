"""Every shell block of README and guides runs here, or its page says why it does not: ``<!-- not run: REASON -->``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import FDCACHE

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
COMMAND = re.compile(
    r"^(?:\$ |[A-Z0-9_]+=\S+ |\.venv/bin/)*(?:fdcache|make|python|pip|git|curl|docker|vllm)\b", re.M
)
SMALLER = {"64GiB": "32MiB", "32GiB..1TiB/x2": "1MiB..2MiB/x2"}


def shell_blocks() -> Iterator[tuple[str, str, str | None]]:
    """Yield page, text and the reason why it is not run, None if it is."""
    for page in PAGES:
        for found in FENCE.finditer((ROOT / page).read_text()):
            is_shell = found["kind"] in ("sh", "bash", "console")
            if is_shell or (not found["kind"] and COMMAND.search(found["text"])):
                yield page, found["text"], found["why"]


RUN = [(page, text) for page, text, why in shell_blocks() if why is None]


def test_most_blocks_of_commands_are_found() -> None:
    assert len(list(shell_blocks())) > 25
    assert len(RUN) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), RUN, ids=[f"{page}-{text[:30].strip()}" for page, text in RUN])
def test_a_block_of_commands_runs_as_it_is_shown(page: str, text: str, tmp_path: Path) -> None:
    lengths = (
        {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [i % 3, i]} for i in range(8)
    )
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lengths))
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    script = re.sub(r"^\$ ", "", text, flags=re.M).replace(".venv/bin/", "")
    with tempfile.TemporaryDirectory(prefix="fdcache-blocks-", dir="/dev/shm") as arena:
        environ = {
            "PATH": f"{Path(FDCACHE).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "FDCACHE_RUNTIME_DIR": str(tmp_path / "run"),
            "FDCACHE_ARENA_DIR": arena,
            "FDCACHE_HTTP_ADDRESS": "off",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

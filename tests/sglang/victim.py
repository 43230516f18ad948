"""An engine in a process of its own, which tests kill: it answers prompts once and waits.

    python -m tests.sglang.victim MODEL OPTIONS PROMPTS

The last two are JSON. Prints the processes of the engine and the answers as JSON in one line.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from tests.sglang.engine import ask, running_engine


def main(model: str, options: str, prompts: str) -> None:
    """Run it until it is killed."""
    with running_engine(Path(model), **json.loads(options)) as engine:
        answers = [ask(engine, prompt) for prompt in json.loads(prompts)]
        sys.stdout.write(json.dumps({"pids": engine.get_all_child_pids(), "answers": answers}) + "\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:4])

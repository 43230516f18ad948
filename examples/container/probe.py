"""Check the health of an HTTP address with the standard library alone; exit 0 if it answers 2xx.

    python probe.py URL [KEY_FILE]

The first key of KEY_FILE is sent as a bearer token.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 3.0


def probe(url: str, key_file: str | None = None) -> bool:
    """Return True if the address answers with success within the timeout."""
    request = urllib.request.Request(url)
    if key_file is not None:
        key = Path(key_file).read_text().strip().partition(",")[0]
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return bool(200 <= answer.status < 300)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as reason:
        print(f"{url}: {reason}", file=sys.stderr)
        return False


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: probe.py URL [KEY_FILE]")
    sys.exit(0 if probe(*sys.argv[1:]) else 1)

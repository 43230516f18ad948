"""Example programs. Run them from the root of the repository: ``python -m examples.paddle_engine``."""

import sys
from pathlib import Path

# Prefer an installed fdcache to the source directory fdcache/, which has no compiled core.
_HERE = Path(__file__).parent.parent
if sys.path and Path(sys.path[0] or ".").resolve() == _HERE.resolve():
    sys.path.append(sys.path.pop(0))

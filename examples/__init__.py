"""Programs that show how fdcache is used. Run them from here: ``python -m examples.paddle_engine``."""

import sys
from pathlib import Path

# Beside the sources, an installed fdcache comes first: the folder fdcache/ has no compiled core of its own.
_HERE = Path(__file__).parent.parent
if sys.path and Path(sys.path[0] or ".").resolve() == _HERE.resolve():
    sys.path.append(sys.path.pop(0))

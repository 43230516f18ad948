"""The calls of the driver that stands in, for tests in Python."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def _declare(name: str, *arguments: Any, result: Any = None) -> Any:
    function = getattr(_driver, name)
    function.argtypes, function.restype = arguments, result
    return function


_driver = ctypes.CDLL("libcuda.so.1")
_handle, _size, _int, _unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint

visible = _declare("stand_in_visible", result=_int)
gpu = _declare("stand_in_gpu", _int, result=_int)
know = _declare("stand_in_know", _handle, _size, _int)
forget = _declare("stand_in_forget", _handle)
share = _declare("stand_in_share", _handle, _int)
owner = _declare("stand_in_owner", _handle, result=_int)
new_stream = _declare("stand_in_stream", _int, result=_handle)
end_stream = _declare("stand_in_end_stream", _handle)
synchronize = _declare("stand_in_synchronize", _handle)
synchronize_all = _declare("stand_in_synchronize_all")
copy = _declare("stand_in_copy", _handle, _handle, _size, _handle, _size, _size, _size)
pause = _declare("stand_in_pause", _handle, _unsigned)
trap = _declare("stand_in_trap", _handle)
kernel = _declare("stand_in_kernel", _int, _unsigned, result=_handle)

_declare("stand_in_delay", _unsigned, _unsigned)(*map(int, os.environ.get("STAND_IN_DELAYS", "0 0").split()))

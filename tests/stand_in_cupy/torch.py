"""Torch would take the driver that stands in for a whole one, so to these processes it is not there."""

raise ModuleNotFoundError("the driver that stands in serves CuPy alone", name="torch")

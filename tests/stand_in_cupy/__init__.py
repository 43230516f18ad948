"""In ``PYTHONPATH`` this folder gives a process a CuPy whose GPU is ``tests/native/stand_in_driver.cpp``."""

"""Agreed between a service and its clients: addresses, messages, shared memory, liveness of processes."""

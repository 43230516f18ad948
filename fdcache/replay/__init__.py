"""Workloads in, engine-like traffic through the real manager and controller, a report out."""

"""Replay of workloads: engine-like traffic through the real manager and controllers, and a report."""

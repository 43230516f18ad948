"""Limits and facilities of the machine: memory, huge pages, folders, process exit."""

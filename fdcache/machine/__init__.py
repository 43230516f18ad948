"""The machine: memory limits, huge pages, NUMA nodes, the user's session, process exit."""

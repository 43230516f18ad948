"""The storage tier: connectors to where blocks outlive the process."""

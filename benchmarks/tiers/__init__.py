"""The native tier: its operations, evictions, what two tiers hold together, and the runs of slots that it gives."""

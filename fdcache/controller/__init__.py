"""The worker side: transfers, layer counters, the host arena."""

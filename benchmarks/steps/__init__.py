"""The engine's own threads: requests, waits and plans on the scheduler's, submissions on a worker's."""

"""The service: one arena and one host tier for all engines of a node."""

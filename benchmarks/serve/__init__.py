"""A service of a node: engines and look-ups, long questions of tools, and what tenants can tell of each other."""

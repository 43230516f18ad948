"""Services of several nodes, each with its engine, that share what they store: ``fdcache replay --nodes``."""

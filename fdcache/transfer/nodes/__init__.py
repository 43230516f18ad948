"""Host tiers of other nodes as storage: ``FDCACHE_STORAGE=nodes``."""

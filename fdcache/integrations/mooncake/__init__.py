"""Storage in Mooncake Store: ``FDCACHE_STORAGE=mooncake``."""

"""Time to first token from each tier, and what the cache costs decoding and traffic without reuse; see ``__main__``."""

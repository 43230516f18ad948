"""Time to first token from each tier, and the cost of the cache for decodes and new prompts; see ``__main__``."""

"""fdcache: the KV-cache layer of an LLM serving engine."""

__version__ = "0.1.0"

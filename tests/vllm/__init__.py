"""Tests against vLLM's own engine, run on a CPU: ``make test-vllm``."""

"""vLLM's engine with each of its KV connectors, measured in one run."""

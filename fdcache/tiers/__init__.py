"""The tiers of the cache: pools of blocks in device memory, host memory and storage."""

"""Hand-overs from a prefill to a decode instance: between processes, and between GPUs."""

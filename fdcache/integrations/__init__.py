"""Integrations with other systems: FastDeploy, Mooncake Store, Paddle and vLLM."""

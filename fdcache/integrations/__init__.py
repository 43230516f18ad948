"""Integrations with other systems: Paddle and FastDeploy."""

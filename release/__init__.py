"""Distributions of a release: `make dist`."""

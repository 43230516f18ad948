"""Consumers of events: routers' own packages, in environments of their own, told by real engines and services."""

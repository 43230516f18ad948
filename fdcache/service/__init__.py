"""One warm cache for all engines of a node: its protocol, its clients and its server."""

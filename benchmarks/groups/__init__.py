"""Models of several kinds of layers: prompts from the host, and the positions whose states are stored."""

"""The typed settings: one description of everything configurable."""

"""The command line: one module per command, nothing but presentation."""

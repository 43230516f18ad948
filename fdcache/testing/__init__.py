"""Test suites that every connector must pass, for packages that bring one; they need pytest."""

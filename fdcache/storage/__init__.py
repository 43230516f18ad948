"""Storage connectors: blocks in a local file or in a store that several engines share."""

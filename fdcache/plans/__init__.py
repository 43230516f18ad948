"""Transfer plans: lists of blocks, orders and the ledger of plans in flight."""

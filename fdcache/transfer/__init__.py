"""Hand-over of blocks between instances: decode reads what prefill computes, while it is computed."""

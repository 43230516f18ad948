"""Hand-over of blocks between instances: a decode instance reads what a prefill instance computes, as it is computed."""

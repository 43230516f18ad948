"""Block copies between a GPU and host memory."""

"""What the processes of a node share with its service: messages, extents of memory, proofs of life."""

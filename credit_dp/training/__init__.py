"""Training: loss, optimiser, checkpoints, logs and the loop that joins them."""

"""Training: model and optimizer of a run, its loss, checkpoints and logs, and the training loop."""

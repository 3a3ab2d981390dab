"""Plans a converted model on tensors without data: heights, bands, and what its code computes."""

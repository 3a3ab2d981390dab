"""Plans a converted model on tensors without data: heights, bands, and an audit of its code."""

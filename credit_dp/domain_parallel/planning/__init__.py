"""What a converted model does to rows, found on tensors without data before it runs."""

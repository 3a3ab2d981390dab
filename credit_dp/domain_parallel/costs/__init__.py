"""What a sharded model computes, keeps and sends, counted without ranks, data or memory."""

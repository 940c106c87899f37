"""Attention on the CPU in torch operations: pieces (what work there is), masking, scores, forward,
backward, and flash, torch's own fused kernel where it serves."""

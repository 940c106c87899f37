"""Attention on the CPU in torch operations: pieces (what work there is), scores, forward, backward."""

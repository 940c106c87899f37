"""The backward pass on a Hopper card against cuDNN and FlashAttention-2, and a training step.

Files have the names of those of forward, one folder up, and hold what differs: `rows`, `peers`,
`check` (of dq, dk and dv), `suite`, `goals` and `render`.
"""

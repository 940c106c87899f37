"""Attention for Hopper (sm_90a) in Gluon, Triton's lower-level language."""

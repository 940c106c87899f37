"""Kernels, a package per language; a kernel language is imported nowhere else."""

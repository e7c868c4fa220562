"""Pallas kernels for NVIDIA GPUs, lowered by Triton."""

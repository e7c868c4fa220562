"""Pallas kernels for TPUs, lowered by Mosaic."""

"""Paged attention kernels: arrays in, arrays out."""

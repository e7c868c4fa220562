"""Descriptions of GPUs, as XLA's compiler takes them in place of a device."""

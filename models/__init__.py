"""Flax decoders, checkpoint loading and tokenizers (installed as jpaged_models)."""

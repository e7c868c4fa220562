"""Errors a checkpoint or its configuration can cause. All are ``ValueError``s."""


class ConfigError(ValueError):
    """A model configuration that is incomplete, contradictory, or of a kind not served here."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or does not fit its configuration."""

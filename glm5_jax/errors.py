"""The errors that a user meets. Each carries one line: expected, found, where, what to do."""


class ConfigError(ValueError):
    """A config.json that does not describe a model of this family."""


class CheckpointError(ValueError):
    """A checkpoint whose files, tensors or ledger are not what they should be."""


class TraceError(ValueError):
    """A trace that is not as its format says, or that cannot be compared with another."""

"""Checkpoints on disk: layouts, reader, audit, binding, conversion, restoring."""

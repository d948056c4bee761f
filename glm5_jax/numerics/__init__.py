"""Comparing numbers: traces, planted mistakes, and the transformers oracle that judges."""

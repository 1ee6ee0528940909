"""Grouping of decode batches by prefix, and attention over a selection."""

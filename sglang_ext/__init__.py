"""Sparse attention for shared prefixes, as a plugin of stock SGLang."""

__version__ = "0.1.0"

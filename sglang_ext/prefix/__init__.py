"""From a prompt to its index: directory and residency."""

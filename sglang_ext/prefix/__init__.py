"""From a prompt to its index: the store as a process sees it, residency, requests, indexes of suffixes."""

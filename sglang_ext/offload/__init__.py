"""KV of indexed prefixes in host memory: where it lies, which requests have it in front, and how they attend it."""

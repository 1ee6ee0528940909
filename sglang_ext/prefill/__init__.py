"""What a prefill leaves behind: recorded queries, and the indexes built from them."""

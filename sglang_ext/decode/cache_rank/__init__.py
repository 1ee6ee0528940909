"""A cache rank: a process with a GPU of its own that names the candidates of the next step (`cache_device`).

The paper is AsyncSpade. A step's queries go to the cache rank, what it names comes back while the next step begins, and
the inference rank's GPU has one launch less to run behind each step. The inference rank never needs it: a step whose
answer does not come takes the candidates of the step before, and one soon after names its own.
"""

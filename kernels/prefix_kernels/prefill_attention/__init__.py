"""Exact attention of the query rows of a prefill: over their requests' own slots, then over pieces of what lies before.

`Reference` says what is computed; `runner.PrefillAttention` is the Triton form, with the same methods. It is not
imported here.
"""

from prefix_kernels.prefill_attention.reference import Reference, Span, State

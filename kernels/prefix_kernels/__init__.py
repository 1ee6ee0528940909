"""Operations of sparse decoding behind a shared prefix, in torch and Triton.

`types` holds the values that operations exchange. The docstrings of the torch references are the algorithms. A planned
operation (`GroupedAttention`, `AnchorSelection`) makes its device buffers once, writes its tables in `plan()` and
launches Triton kernels in `run()`.
"""

from prefix_kernels.types import PagedKV, Selection

"""Operations of sparse decoding behind a shared prefix: torch (later also Triton), nothing else.

`prefix_kernels.types` holds the values that operations exchange, `prefix_kernels.ops` re-exports every
operation. Each operation is a package `<op>/{api,reference}.py`: `api` validates and dispatches, `reference`
is pure torch, computes in fp32 and its docstring is the algorithm.
"""

from prefix_kernels.types import AttnState, PagedKV, Selection

__all__ = ["AttnState", "PagedKV", "Selection"]

"""The arrays of an index: what they must be, how they are cut per KV head, and layers built at once.

*Checked once.* An index is data from outside: right checksums say that nobody changed it since it was written, not that
it fits. So each array is looked at when it is loaded, and before one is stored. A spec knows its own arrays: `forms`
says what each of them must be, `check` looks at what a range cannot say. Whoever takes an index in asks `check_forms`
before a byte of the arrays is read, then `check_layer`.

*Cut per head.* The store keeps arrays per KV head, selectors read them joined. Most have num_kv_heads as their leading
dimension. Where heads differ in size (AB-Sparse's block sizes per head) an array is *ragged*: the rows of all heads
stand one after the other, without padding, and `row_indptr` [num_kv_heads + 1] int32 holds where each head's rows begin
(AB-Sparse, 3.4). A ragged array is known by its name: the part after the last dot begins with `ragged_`. All ragged
arrays with the same part before the last dot share the `row_indptr` with that part. The pieces of a head carry no
`row_indptr`: their lengths say the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

RAGGED = "ragged_"
ROW_INDPTR = "row_indptr"
LARGEST = float(1 << 17)
"""What a stored number may reach: twice the largest of fp16, so that no score of finite queries leaves fp32."""
TOKENS_AT_ONCE = 1 << 17
"""Tokens, over all layers of a batch, that are built at once: device memory as for one layer of so long a prefix."""


class IndexSize(NamedTuple):
    """Of what an index was built: tokens of the prefix, channels of a key."""

    prefix_len: int
    head_dim: int


class Form(NamedTuple):
    """What an array of one KV head must be.

    Attributes:
        dtype: as numpy names it.
        shape: None for a length that other values say, the same for all arrays of the head that have one.
        least, most: of its values, which are finite then; None: any value is one.
    """

    dtype: str
    shape: tuple[int | None, ...]
    least: float | None = None
    most: float | None = None

    def fits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether an array is of this dtype and shape."""
        same = len(shape) == len(self.shape) and dtype == self.dtype
        return same and all(n == m or (m is None and n > 0) for n, m in zip(shape, self.shape, strict=True))


def low_bit_forms(name: str, rows: int, channels: int, bits: int) -> dict[str, Form]:
    """Of a `LowBitTensor` whose parts are named after it."""
    return {
        f"{name}_packed": Form("uint8", (rows, channels * bits // 8)),
        f"{name}_scale": Form("float32", (channels,), 0.0, LARGEST),
        f"{name}_zero": Form("float32", (channels,), -LARGEST, LARGEST),
    }


class ContentError(ValueError):
    """Arrays that are not those of the spec, or whose values cannot be.

    Attributes:
        what, expected, found: parts of the message.
    """

    def __init__(self, what: str, expected: object, found: object) -> None:
        self.what, self.expected, self.found = what, str(expected), str(found)
        super().__init__(f"{what}: expected {expected}, got {found}; build the index again")


class Checked(Protocol):
    """A spec, as far as its arrays are concerned: see `base.IndexSpec`."""

    def forms(self, size: IndexSize) -> dict[str, Form]: ...
    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None: ...


def check_forms(forms: Mapping[str, Form], found: Mapping[str, tuple[str, tuple[int, ...]]], where: str) -> None:
    """Raise ContentError unless one KV head has these arrays and no others, each in its form. Reads no value.

    Args:
        forms: of the spec.
        found: name -> (dtype, shape).
        where: which layer and head, for the message.
    """
    if found.keys() != forms.keys():
        raise ContentError(f"arrays of {where}", ", ".join(sorted(forms)), ", ".join(sorted(found)) or "none")
    for name, form in forms.items():
        dtype, shape = found[name]
        if not form.fits(dtype, shape):
            raise ContentError(f"{name} of {where}", f"{form.dtype} {list(form.shape)}", f"{dtype} {list(shape)}")
    lengths = {found[name][1][0] for name, form in forms.items() if None in form.shape}
    if len(lengths) > 1:
        raise ContentError(f"rows of {where}", "as many in all ragged arrays", sorted(lengths))


def check_layer(spec: Checked, arrays: Mapping[str, Tensor], size: IndexSize, where: str) -> None:
    """Raise ContentError unless the values of a layer's arrays can be.

    Takes some passes over the arrays that name positions, none over codes.

    Args:
        spec: of the method.
        arrays: with leading dim num_kv_heads, as `join_heads` makes them, in their forms. On any device; waits.
        size: of the prefix and the model.
        where: which layer, for the message.
    """
    for name, form in spec.forms(size).items():
        if form.least is None or form.most is None:
            continue
        low, high = (float(bound) for bound in arrays[name].aminmax())
        if not (form.least <= low and high <= form.most):  # NaN, too: both bounds are NaN where a value is
            wanted = f"values of {form.least:g} to {form.most:g}"
            raise ContentError(f"{name} of {where}", wanted, f"{low:g} to {high:g}")
    try:
        spec.check(arrays, size)
    except ContentError as error:
        raise ContentError(f"{error.what} of {where}", error.expected, error.found) from None


def is_ragged(name: str) -> bool:
    """Whether an array of this name holds rows of all heads one after the other."""
    return name.rpartition(".")[2].startswith(RAGGED)


def indptr_name(name: str) -> str:
    """Name of the `row_indptr` of a ragged array."""
    return "".join((*name.rpartition(".")[:2], ROW_INDPTR))


def split_heads(arrays: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """One mapping of views per KV head; `row_indptr` arrays are left out.

    Args:
        arrays: what `IndexBuilder.build_layer` returned. Reads the values of `row_indptr`.
    """
    bounds = {name: a.tolist() for name, a in arrays.items() if name.rpartition(".")[2] == ROW_INDPTR}
    num_heads = next(a.shape[0] for name, a in arrays.items() if not is_ragged(name) and name not in bounds)
    heads: list[dict[str, Tensor]] = [{} for _ in range(num_heads)]
    for name, array in arrays.items():
        if name in bounds:
            continue
        rows = bounds[indptr_name(name)] if is_ragged(name) else None
        for head, pieces in enumerate(heads):
            pieces[name] = array[head] if rows is None else array[rows[head] : rows[head + 1]]
    return heads


def join_heads(heads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of `split_heads`, for any of its heads, one at least, in any order; new memory."""
    joined: dict[str, Tensor] = {}
    for name, first in heads[0].items():
        pieces = [head[name] for head in heads]
        if not is_ragged(name):
            joined[name] = torch.stack(pieces)
            continue
        joined[name] = torch.cat(pieces)
        bounds = list(itertools.accumulate((piece.shape[0] for piece in pieces), initial=0))
        joined[indptr_name(name)] = torch.tensor(bounds, dtype=torch.int32, device=first.device)
    return joined


def layer_batches(num_layers: int, prefix_len: int) -> list[range]:
    """Runs of neighbouring layers to build at once, as one layer with the KV heads of all of them.

    The layers of a short prefix are so little work that what costs time is starting it: 2.6 of 4.2 ms a layer at 32,768
    tokens on an H200.
    """
    size = max(1, TOKENS_AT_ONCE // prefix_len)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]

"""What the arrays of an index must be. An index is data from outside: right checksums say that nobody changed it since
it was written, not that it fits. So each array is looked at once, when it is loaded, and before one is stored.

A spec knows its own arrays: `forms` says what each of them must be, `check` looks at what a range cannot say. Whoever
takes an index in asks `check_forms` before a byte of the arrays is read, then `check_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

LARGEST = float(1 << 17)
"""What a stored number may reach: twice the largest of fp16, so that no score of finite queries leaves fp32."""


class IndexSize(NamedTuple):
    """Of what an index was built.

    Attributes:
        prefix_len: tokens.
        head_dim: channels of a key.
    """

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
    """A spec, as far as its arrays are concerned."""

    def forms(self, size: IndexSize) -> dict[str, Form]:
        """The arrays of each KV head by name."""
        ...

    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None:
        """Raise ContentError for values that cannot be; forms and ranges are right."""
        ...


def check_forms(forms: Mapping[str, Form], found: Mapping[str, tuple[str, tuple[int, ...]]], where: str) -> None:
    """Raise unless one KV head has these arrays and no others, each in its form. Values are not looked at.

    Args:
        forms: from `Checked.forms`.
        found: name -> (dtype, shape).
        where: which layer and head, for the message.

    Raises:
        ContentError: otherwise.
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
    """Raise unless the values of a layer's arrays can be: some passes over those that name positions, none over codes.

    Args:
        spec: of the method.
        arrays: with leading dim num_kv_heads, as `heads.join_heads` makes them, in their forms. On any device; waits.
        size: of the prefix and the model.
        where: which layer, for the message.

    Raises:
        ContentError: otherwise.
    """
    for name, form in spec.forms(size).items():
        if form.least is None or form.most is None:
            continue
        low, high = (float(bound) for bound in arrays[name].aminmax())
        if not (form.least <= low and high <= form.most):  # NaN, too: both bounds are NaN where a value is
            raise ContentError(
                f"{name} of {where}", f"values of {form.least:g} to {form.most:g}", f"{low:g} to {high:g}"
            )
    try:
        spec.check(arrays, size)
    except ContentError as error:
        raise ContentError(f"{error.what} of {where}", error.expected, error.found) from None

"""What `two_level` and `union` have in common: a method made of two others.

Arrays of the parts are kept under `first.` and `second.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from sglang_ext.methods.arrays import Form, IndexSize
from sglang_ext.methods.base import Arrays, IndexBuilder, IndexSpec, make_builder

T = TypeVar("T")


def part_arrays(arrays: Mapping[str, T], part: str) -> dict[str, T]:
    """The arrays of one part under their own names."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def named(parts: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """The arrays of all parts under the parts' names."""
    return {f"{part}.{name}": array for part, arrays in parts.items() for name, array in arrays.items()}


@dataclass(frozen=True)
class CombinedSpec(IndexSpec):
    """Of a method made of two others, its fields `first` and `second`: their arrays are its own."""

    def forms(self, size: IndexSize) -> dict[str, Form]:
        return named({name: part.forms(size) for name, part in self.nested.items()})

    def check(self, arrays: Arrays, size: IndexSize) -> None:
        for name, part in self.nested.items():
            part.check(part_arrays(arrays, name), size)


C = TypeVar("C", bound=CombinedSpec)


class CombinedBuilder(IndexBuilder[C]):
    """Builds both parts. Arrays: those of the parts, named `first.<name>` and `second.<name>`."""

    def needs_queries(self, head_dim: int) -> bool:
        """Whether a part needs them."""
        return any(builder.needs_queries(head_dim) for builder in self._parts().values())

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        return named({name: one.build_layer(keys, queries) for name, one in self._parts().items()})

    def _parts(self) -> dict[str, IndexBuilder[IndexSpec]]:
        return {name: make_builder(part, self.layer) for name, part in self.spec.nested.items()}

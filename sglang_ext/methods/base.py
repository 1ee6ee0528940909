"""What serving and prebuild know of a selection method: its spec, its builder, its selector.

A *spec* is a frozen dataclass of the method's parameters. A *builder* turns one layer's keys (and sampled
queries) into named arrays that can be cut per KV head (`heads`): their leading dimension is num_kv_heads, or rows
of all heads one after the other where heads differ in size. A *selector* reads those arrays, for all or for some
of the KV heads, and names the positions to attend in one step.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.types import Selection
from sglang_ext.methods.contents import Form, IndexSize

S = TypeVar("S", bound="IndexSpec")


@dataclass(frozen=True)
class IndexSpec(ABC):
    """Base of the methods' parameter sets: parsing, checking and writing them.

    A subclass is a frozen dataclass whose fields are int, float, bool, str or `IndexSpec` (the spec of any method,
    for methods made of others) and have defaults; its `__post_init__` checks ranges. `method` is the name under
    which it stands in `METHODS`.
    """

    method: ClassVar[str] = ""

    @classmethod
    def from_dict(cls: type[S], data: Mapping[str, Any]) -> S:
        """Parse parameters as they stand in a configuration or in an index file.

        Args:
            data: field name -> value; missing fields take their defaults. `method` may be given and must then
                be this class's. An int is accepted for a float field; a spec is an object that names its method;
                nothing else is converted.

        Raises:
            ValueError: an unknown key, another method's name, or a value out of range.
            TypeError: `data` is no mapping or a value has another type.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"expected an object of {cls.method} parameters, got {type(data).__name__}; write "
                f'{{"method": "{cls.method}", ...}}'
            )
        values = dict(data)
        named = values.pop("method", cls.method)
        if named != cls.method:
            raise ValueError(f"expected parameters of method {cls.method!r}, got those of {named!r}")
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            raise ValueError(
                f"unknown parameter {unknown[0]!r} of {cls.method}; expected one of: {', '.join(known)}. "
                f"Remove or rename it{did_you_mean(unknown[0], known)}"
            )
        for name, value in values.items():
            values[name] = _checked(f"{cls.method}.{name}", value, hints[name])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All parameters and the method's name, plain values; `from_dict` reads it back to an equal spec."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: v.to_dict() if isinstance(v, IndexSpec) else v for name, v in values.items()}
        return {"method": self.method, **plain}

    @abstractmethod
    def forms(self, size: IndexSize) -> dict[str, Form]:
        """What the arrays of one KV head must be, by name: all that a builder of this spec makes."""

    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None:
        """Look at what the ranges of the forms cannot say; see `contents.check_layer`.

        Raises:
            ContentError: values that no builder makes.
        """
        return


def _checked(name: str, value: object, wanted: type) -> object:
    if wanted is IndexSpec:
        return value if isinstance(value, IndexSpec) else _nested(name, value)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise TypeError(
            f"expected {name} as {wanted.__name__}, got {value!r} ({type(value).__name__}); correct its type"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected {name} to be finite, got {value!r}")
    return value


def _nested(name: str, value: object) -> IndexSpec:
    if not isinstance(value, Mapping):
        raise TypeError(f'expected {name} as an object like {{"method": "ab_sparse"}}, got {value!r}; name its method')
    try:
        return parse_spec(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def parse_spec(data: Mapping[str, Any]) -> IndexSpec:
    """The spec of whichever method `data["method"]` names.

    Args:
        data: {"method": name, parameter: value, ...}.

    Raises:
        ValueError: no or an unknown method, an unknown parameter, or a value out of range.
        TypeError: `data` is no mapping or a value has another type.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f'expected an object like {{"method": "csattention"}}, got {type(data).__name__}')
    name = data.get("method")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"expected method to be one of {', '.join(METHODS)}, got {name!r}; choose one of them"
            f"{did_you_mean(name, METHODS)}"
        )
    spec: IndexSpec = METHODS[name].spec.from_dict(data)
    return spec


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raise unless least <= value <= most, with a message that says what to do."""
    if not least <= value <= most:
        raise ValueError(f"expected {name} in {least}..{most}, got {value}; choose a value in that range")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"expected {name} to be one of {', '.join(choices)}, got {value!r}; choose one of them"
            f"{did_you_mean(value, choices)}"
        )


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the known one that is nearly the same, if there is one."""
    near = difflib.get_close_matches(str(word), [str(one) for one in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


@dataclass(frozen=True)
class LayerProfile:
    """What calibration found out about one layer, for the builders that use it; empty where it was not measured.

    Attributes:
        block_sizes: [num_kv_heads] tokens per block.
        channels: [num_kv_heads][num_channels] ascending channel numbers of the token index.
    """

    block_sizes: tuple[int, ...] = ()
    channels: tuple[tuple[int, ...], ...] = ()


NO_PROFILE = LayerProfile()


class IndexBuilder(Protocol):
    """Builds one layer's part of an index. Holds no state between layers."""

    @property
    def spec(self) -> IndexSpec:
        """The parameters that this builder uses."""
        ...

    @property
    def needs_queries(self) -> bool:
        """Whether `build_layer` needs sampled queries; if not, they are ignored."""
        ...

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """Arrays of one layer.

        Args:
            keys: [prefix_len, num_kv_heads, head_dim] post-RoPE keys, floating, finite, prefix_len >= 1. Read
                only.
            queries: [num_kv_heads, num_samples, head_dim] post-RoPE queries of the prefix's own prefill,
                those of all query heads of a KV head's group together; None if no sample exists. Read only.

        Returns:
            Name -> new array, on the keys' device, in a dtype that numpy has (uint8, int16, int32, fp16, fp32).
            Its leading dimension is num_kv_heads, but for the ragged arrays of `heads`. KV heads do not depend on
            each other.

        Raises:
            ValueError: shapes do not fit, a value is NaN or infinite, or queries are needed and missing.
        """
        ...


class Selector(Protocol):
    """Names the prefix positions that a group attends in one step at one layer."""

    def select(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        budget: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Selection:
        """Score the prefix for all rows of the group, pool, take the best.

        Args:
            arrays: what `build_layer` of the same spec returned, or the slices of some KV heads of it, on q's
                device. Read only.
            q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, num_rows >= 1.
            prefix_len: tokens of the prefix that the arrays were built from.
            budget: tokens per KV head, sink and recent window included.
            num_sink: leading positions always taken.
            num_recent: trailing positions of the prefix always taken.
            sm_scale: the model's attention scale.
            pooling: how rows and heads of the group share the selection.

        Returns:
            A new selection of min(budget, prefix_len) positions per KV head.

        Raises:
            ValueError: an array is missing or of another shape, or sizes are out of range.
        """
        ...

    def token_scores(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """One pooled score per position: what combined methods compare and rank.

        Args:
            arrays, q, prefix_len, sm_scale, pooling: as in `select`.
            candidates: bool [num_kv_heads, prefix_len]; the softmax and the scores then cover these positions only.

        Returns:
            [num_kv_heads, prefix_len] fp32, natural log of the estimated attention probability (see
            `pooling.pool_scores`), -inf where the method has none. The tokens of a block share its score.

        Raises:
            ValueError: as `select`.
        """
        ...


@dataclass(frozen=True)
class Method(Generic[S]):
    """A method's entry in the registry.

    Attributes:
        spec: its parameters.
        builder: called with a spec and, where it is known, a `LayerProfile`.
        selector: called with a spec. The reference of the decode operation.
        decode_op: `module:function` that makes the operation which decode graphs hold, imported where one is made (see
            `decode.ops`). None: the method has none, and its indexes are used without decode graphs only.
    """

    spec: type[S]
    builder: Callable[..., IndexBuilder]
    selector: Callable[[S], Selector]
    decode_op: str | None = None


METHODS: dict[str, Method[Any]] = {}
"""The methods by name. `registry` fills it; it stands here so that methods made of others can look these up."""


def pool_candidates(raw: Tensor, sm_scale: float, pooling: Pooling, candidates: Tensor | None) -> Tensor:
    """`pool_scores` of token scores [num_kv_heads, num_rows, gqa, prefix_len], over the candidates if given."""
    if candidates is not None:
        raw = raw.masked_fill(~candidates[:, None, None], -torch.inf)
    return pool_scores(raw, sm_scale, pooling)


def is_finite(x: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass that makes no tensor of x's size; waits for the device."""
    return math.isfinite(float(torch.linalg.vector_norm(x, ord=torch.inf)))


def require_keys(keys: Tensor) -> None:
    """Raise unless `keys` is [prefix_len >= 1, num_kv_heads, head_dim] and floating. Reads no value."""
    if keys.dim() != 3 or 0 in keys.shape or not keys.dtype.is_floating_point:
        raise ValueError(
            "expected keys [prefix_len >= 1, num_kv_heads, head_dim] in a floating dtype, got "
            f"{tuple(keys.shape)} {keys.dtype}"
        )


def check_keys(keys: Tensor) -> None:
    """Raise unless `keys` is [prefix_len >= 1, num_kv_heads, head_dim], floating and finite."""
    require_keys(keys)
    if not is_finite(keys):
        raise not_finite("keys")


def not_finite(name: str) -> ValueError:
    """What to raise for captured tensors with NaN or infinity."""
    return ValueError(f"expected finite {name}, got NaN or infinity; the capture is unusable, take it again")


def require_samples(queries: Tensor | None, keys: Tensor, method: str) -> Tensor:
    """The sampled queries, if they are there and fit the keys. Reads no value.

    Raises:
        ValueError: otherwise.
    """
    if queries is None:
        raise ValueError(
            f"{method} needs queries of the prefix's prefill, got none; record them, or choose a method that "
            "needs keys only"
        )
    expected = (keys.shape[1], keys.shape[2])
    if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != expected or queries.shape[1] == 0:
        raise ValueError(
            f"expected queries [num_kv_heads={expected[0]}, num_samples >= 1, head_dim={expected[1]}], got "
            f"{tuple(queries.shape)}"
        )
    return queries


def check_samples(queries: Tensor | None, keys: Tensor, method: str) -> Tensor:
    """The sampled queries, if they are there, fit the keys and are finite.

    Raises:
        ValueError: otherwise.
    """
    samples = require_samples(queries, keys, method)
    if not is_finite(samples):
        raise not_finite("queries")
    return samples


def to_half(x: Tensor, name: str) -> Tensor:
    """`x` in fp16.

    Raises:
        ValueError: a value does not fit into fp16.
    """
    half = x.half()
    if not bool(torch.isfinite(half).all()):
        raise ValueError(f"{name} reaches {float(x.abs().max()):.3g}, more than fp16 holds (65504)")
    return half


def require_arrays(arrays: Mapping[str, Tensor], names: tuple[str, ...], method: str) -> tuple[Tensor, ...]:
    """The arrays of these names.

    Raises:
        ValueError: one is missing.
    """
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(
            f"expected arrays {', '.join(names)} of {method}, got {', '.join(sorted(arrays)) or 'none'}; "
            "the index was built with other parameters, build it again"
        )
    return tuple(arrays[name] for name in names)

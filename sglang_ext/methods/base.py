"""What serving and prebuild know of a selection method: its spec, its builder, its selector.

A *spec* is a frozen dataclass of the method's parameters. A *builder* turns one layer's keys (and sampled
queries) into named arrays that can be cut per KV head (`arrays`). A *selector* reads these arrays, for all or for some
of the KV heads, and names the positions to attend in one step.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import rank_by_keys, top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.methods.arrays import Form, IndexSize
from sglang_ext.options import SUM_EVERY, SparseAttnConfig

S = TypeVar("S", bound="IndexSpec")
Arrays = Mapping[str, Tensor]
"""A layer's arrays by name."""


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


@dataclass(frozen=True)
class IndexSpec(ABC):
    """Base of the methods' parameter sets.

    A subclass is a frozen dataclass whose fields are int, float, bool, str or `IndexSpec` (for methods made of others)
    and have defaults; its `__post_init__` checks ranges. `method` is its name in `METHODS`.
    """

    method: ClassVar[str] = ""
    scored_together: ClassVar[int] = 1
    """Tokens from a multiple of this on that always share a score; `two_level` names them as one candidate."""

    @classmethod
    def from_dict(cls: type[S], data: Mapping[str, Any]) -> S:
        """Parse parameters as they stand in a configuration or in an index file.

        Args:
            data: field name -> value; missing fields take their defaults. `method` may be given. An int is accepted
                for a float field; a spec is an object that names its method.

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
        if values.pop("method", cls.method) != cls.method:
            raise ValueError(f"expected parameters of method {cls.method!r}, got those of {data['method']!r}")
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            raise ValueError(
                f"unknown parameter {unknown[0]!r} of {cls.method}; expected one of: {', '.join(known)}. "
                f"Remove or rename it{did_you_mean(unknown[0], known)}"
            )
        return cls(**{name: _checked(f"{cls.method}.{name}", value, hints[name]) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """All parameters and the method's name, plain values; `from_dict` reads it back to an equal spec."""
        nested = {name: part.to_dict() for name, part in self.nested.items()}
        return {"method": self.method, **vars(self), **nested}

    @property
    def nested(self) -> dict[str, IndexSpec]:
        """The specs that this one is made of, by field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, IndexSpec)}

    @abstractmethod
    def forms(self, size: IndexSize) -> dict[str, Form]:
        """What the arrays of one KV head must be, by name: all that a builder of this spec makes."""

    def rows(self, size: IndexSize, layer: LayerProfile, head: int) -> int:
        """Rows of a KV head's arrays whose forms leave their length open.

        Args:
            size: of the prefix and the model.
            layer: what the model's profile says of the layer.
            head: KV head of the model.
        """
        ragged = (part for part in self.nested.values() if any(None in one.shape for one in part.forms(size).values()))
        return next(ragged).rows(size, layer, head)

    def check(self, arrays: Arrays, size: IndexSize) -> None:
        """Raise ContentError for values that no builder makes and that the forms' ranges let pass."""
        return

    def profile_part(self, layers: Sequence[LayerProfile]) -> dict[str, Any]:
        """The part of a profile that builds by this spec depend on, by name, plain values; empty: on none of it.

        Args:
            layers: the model's profile, all layers and KV heads; empty where there is none.

        Raises:
            ValueError: builds need a profile and there is none, or it does not fit the spec.
        """
        used: dict[str, Any] = {}
        for part in self.nested.values():
            used |= part.profile_part(layers)
        return used


def _checked(name: str, value: object, wanted: type) -> object:
    if wanted is IndexSpec:
        return value if isinstance(value, IndexSpec) else _nested(name, value)
    if wanted is float and type(value) is int:
        value = float(str(value))  # inf, where `float(value)` raises
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
    """The spec of whichever method `data["method"]` names. Raises as `IndexSpec.from_dict` does."""
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


def check_share(name: str, value: float, hint: str = "choose one") -> None:
    """Raise unless 0 < value <= 1."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"expected {name} above 0 and at most 1, got {value}; {hint}")


def check_choice(name: str, value: str | int, choices: Sequence[str | int], unit: str = "") -> None:
    """Raise unless `value` is one of `choices`, which are of a unit."""
    if value not in choices:
        raise ValueError(
            f"expected {name} to be one of {', '.join(map(str, choices))}{unit}, got {value!r}; choose one of them"
            f"{did_you_mean(value, choices)}"
        )


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """The end of a sentence about an unknown word: the known one that is nearly the same, if there is one."""
    near = difflib.get_close_matches(str(word), [str(one) for one in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


@dataclass(frozen=True)
class IndexBuilder(ABC, Generic[S]):
    """Builds an index layer by layer. Holds no state between layers.

    KV heads do not depend on each other, so several layers may be built at once (`arrays.layer_batches`).

    Attributes:
        spec: parameters.
        layer: what the model's profile says of the layer.
    """

    spec: S
    layer: LayerProfile = NO_PROFILE

    def needs_queries(self, head_dim: int) -> bool:
        """Whether `build_layer` needs sampled queries for keys of so many channels; if not, they are ignored."""
        return False

    @abstractmethod
    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """Arrays of one layer.

        Args:
            keys: [prefix_len, num_kv_heads, head_dim] post-RoPE keys, floating, finite, prefix_len >= 1. Read only.
            queries: [num_kv_heads, num_samples, head_dim] post-RoPE queries of the prefix's own prefill, those of all
                query heads of a KV head's group together; None if no sample exists. Read only.

        Returns:
            Name -> new array, on the keys' device, in a dtype that numpy has (uint8, int16, int32, fp16, fp32).
            Its leading dimension is num_kv_heads, but for the ragged arrays of `arrays`.

        Raises:
            ValueError: shapes do not fit, a value is NaN or infinite, or queries are needed and missing.
        """


@dataclass(frozen=True, kw_only=True)
class SelectArgs:
    """What a selection is made by, beside arrays and queries.

    Attributes:
        prefix_len: tokens of the prefix that the arrays were built from.
        budget: tokens per KV head, sink and recent window included.
        num_sink: leading positions always taken.
        num_recent: trailing positions of the prefix always taken.
        sm_scale: the model's attention scale.
        pooling: how rows and heads of a group share the selection.
    """

    prefix_len: int
    budget: int = 0
    num_sink: int = 0
    num_recent: int = 0
    sm_scale: float
    pooling: Pooling = Pooling.MAX

    def top_k(self, scores: Tensor) -> Selection:
        """The best positions by scores [num_kv_heads, prefix_len], windows included."""
        return top_k_selection(scores, self.budget, self.num_sink, self.num_recent)


@dataclass(frozen=True)
class Selector(ABC, Generic[S]):
    """Names the prefix positions that a group attends in one step at one layer.

    Attributes:
        spec: parameters that the arrays were built by.
    """

    spec: S

    def select(self, arrays: Arrays, q: Tensor, args: SelectArgs) -> Selection:
        """Score the prefix for all rows of the group, pool, take the best.

        The default: the best of `token_scores`, by keys, as in decode graphs.

        Args:
            arrays: what `build_layer` of the same spec returned, or the slices of some KV heads of it, on q's
                device. Read only, and not checked: `arrays.check_forms` was asked before.
            q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, num_rows >= 1.
            args: sizes, scale and pooling.

        Returns:
            A new selection of min(budget, prefix_len) positions per KV head.

        Raises:
            ValueError: sizes are out of range.
        """
        return args.top_k(rank_by_keys(self.token_scores(arrays, q, args)))

    @abstractmethod
    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """One pooled score per position: what combined methods compare and rank.

        Args:
            arrays, q, args: as in `select`. Scores depend neither on the budget nor on the windows.
            candidates: bool [num_kv_heads, prefix_len]; the softmax and the scores then cover these positions only.

        Returns:
            [num_kv_heads, prefix_len] fp32, natural log of the estimated attention probability (see
            `pooling.pool_scores`), -inf where the method has none. The tokens of a block share its score.

        Raises:
            ValueError: as `select`.
        """

    def entry_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, each: int) -> Tensor:
        """[num_kv_heads, entries] fp32: `token_scores` of entries of `each` tokens, which a method scores together."""
        return self.token_scores(arrays, q, args)[:, ::each]


@dataclass(frozen=True)
class LeveledSelector(Selector[S]):
    """One that first names candidates, and then selects among them."""

    def select(self, arrays: Arrays, q: Tensor, args: SelectArgs) -> Selection:
        return self.select_among(arrays, q, args, self.candidates(arrays, q, args))

    @abstractmethod
    def candidates(self, arrays: Arrays, q: Tensor, args: SelectArgs) -> Tensor:
        """bool [num_kv_heads, prefix_len], windows included; arguments as of `select`."""

    @abstractmethod
    def select_among(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor) -> Selection:
        """As `select`, among candidates that these or other queries named."""


@dataclass(frozen=True)
class Method(Generic[S]):
    """A method's entry in the registry.

    Attributes:
        spec: its parameters.
        builder: called with a spec and, where it is known, a `LayerProfile`.
        selector: called with a spec. The reference of the decode operation.
        decode_op: `module:function` that makes the operation which decode graphs hold of a spec and an `OpContext`
            (see `decode.select_op`), imported where one is made. None: the method has none, and its indexes are used
            without decode graphs only.
        samples_sums: whether the selector takes `sum_every` beside the spec (see `pooling.pool_scores`).
    """

    spec: type[S]
    builder: Callable[..., IndexBuilder[S]]
    selector: Callable[..., Selector[S]]
    decode_op: str | None = None
    samples_sums: bool = False


METHODS: dict[str, Method[Any]] = {}
"""The methods by name. `registry` fills it; it stands here so that methods made of others can look these up."""


def make_builder(spec: S, layer: LayerProfile = NO_PROFILE) -> IndexBuilder[S]:
    """The builder of a spec's method for a layer, of which the model's profile says that."""
    return METHODS[spec.method].builder(spec, layer)


def make_selector(spec: S, sum_every: int = 1) -> Selector[S]:
    """The selector of a spec's method; `sum_every` as `pooling.pool_scores` says.

    Raises:
        ValueError: less than all tokens, for a method that has no such sample.
    """
    method = METHODS[spec.method]
    if method.samples_sums:
        return method.selector(spec, sum_every)
    if sum_every != 1:
        raise ValueError(
            f"expected sum_every 1 for {spec.method}, got {sum_every}; only {names_that_sample()} have a sample"
        )
    return method.selector(spec)


def names_that_sample() -> str:
    """Names of the methods that sample their sums, as a message lists them."""
    return " and ".join(name for name, one in METHODS.items() if one.samples_sums)


def summed_every(config: SparseAttnConfig) -> int:
    """`sum_every` of a configuration, or what null stands for with its method."""
    if config.sum_every is not None:
        return config.sum_every
    return SUM_EVERY if METHODS[config.method].samples_sums else 1


def pool_candidates(raw: Tensor, args: SelectArgs, candidates: Tensor | None, sum_every: int = 1) -> Tensor:
    """`pool_scores` of token scores [num_kv_heads, num_rows, gqa, prefix_len], over the candidates if given: then these
    alone, in their order, are what one in `sum_every` is of."""
    if candidates is None:
        return pool_scores(raw, args.sm_scale, args.pooling, sum_every=sum_every)
    pooled = raw.new_full(candidates.shape, -torch.inf, dtype=torch.float32)
    for scores, own, chosen in zip(raw, pooled, candidates, strict=True):
        some = scores[None, ..., chosen]
        own[chosen] = pool_scores(some, args.sm_scale, args.pooling, sum_every=sum_every)[0]
    return pooled


def check_finite(**tensors: Tensor) -> dict[str, float]:
    """The largest absolute value of each tensor, by name; one pass over each, no copy, one wait for the device.

    Raises ValueError where a value is NaN or infinite.
    """
    # The norm is NaN where a value is.
    norms = [torch.linalg.vector_norm(tensor, torch.inf).double() for tensor in tensors.values()]
    largest: dict[str, float] = dict(zip(tensors, torch.stack(norms).tolist(), strict=True))
    for name, value in largest.items():
        if not math.isfinite(value):
            raise ValueError(f"expected finite {name}, got NaN or infinity; the capture is unusable, take it again")
    return largest


def check_keys(keys: Tensor) -> None:
    """Raise ValueError unless `keys` is [prefix_len >= 1, num_kv_heads, head_dim], floating and finite."""
    _check_key_shape(keys)
    check_finite(keys=keys)


def _check_key_shape(keys: Tensor) -> None:
    if keys.dim() != 3 or 0 in keys.shape or not keys.dtype.is_floating_point:
        raise ValueError(
            "expected keys [prefix_len >= 1, num_kv_heads, head_dim] in a floating dtype, got "
            f"{tuple(keys.shape)} {keys.dtype}"
        )


def check_samples(queries: Tensor | None, keys: Tensor, method: str) -> tuple[Tensor, float]:
    """The sampled queries and the largest absolute value in the keys; waits for the device once.

    Raises:
        ValueError: there are no queries, they do not fit the keys, or a value of either is NaN or infinite.
    """
    _check_key_shape(keys)
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
    return queries, check_finite(keys=keys, queries=queries)["keys"]


def to_half(x: Tensor, name: str) -> Tensor:
    """`x` in fp16. Raises ValueError where a value does not fit."""
    half = x.half()
    if not bool(torch.isfinite(half).all()):
        raise ValueError(f"{name} reaches {float(x.abs().max()):.3g}, more than fp16 holds (65504)")
    return half

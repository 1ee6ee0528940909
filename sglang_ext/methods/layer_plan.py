"""What each layer does in a sparse decode step: dense attention, its own selection, or another layer's.

Source: Kascade, 3.3 to 3.5 (anchor and reuse layers, head remapping). In JSON a plan is a list with one entry
per layer: `"dense"`, `"anchor"`, or `{"reuse": anchor_layer, "head_map": [...]}` where head_map[h] is the KV
head of the anchor layer whose selection KV head h takes; without head_map each head takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class LayerMode(str, Enum):
    """How one layer attends the prefix."""

    DENSE = "dense"
    ANCHOR = "anchor"
    REUSE = "reuse"


@dataclass(frozen=True)
class LayerRole:
    """One layer's part.

    Attributes:
        mode: how the layer attends the prefix.
        anchor_layer: whose selection a reuse layer takes; None for the other modes.
        head_map: [num_kv_heads] KV head of the anchor layer for each KV head here; empty for the other modes.
    """

    mode: LayerMode
    anchor_layer: int | None = None
    head_map: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """Roles of all layers of a model.

    Attributes:
        layers: one role per layer.
        num_kv_heads: KV heads per layer, before tensor parallelism.

    Raises:
        ValueError: a role breaks a rule; the message names the layer and the rule.
    """

    layers: tuple[LayerRole, ...]
    num_kv_heads: int

    def __post_init__(self) -> None:
        for layer, role in enumerate(self.layers):
            if role.mode is LayerMode.REUSE:
                self._check(layer, role)

    @classmethod
    def default(cls, num_layers: int, num_kv_heads: int) -> LayerPlan:
        """Layer 0 dense (its attention is flat: Kascade, 3.1), every other layer an anchor."""
        modes = [LayerMode.DENSE, *[LayerMode.ANCHOR] * (num_layers - 1)]
        return cls(tuple(map(LayerRole, modes[:num_layers])), num_kv_heads)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, num_layers: int, num_kv_heads: int) -> LayerPlan:
        """Parse `{"layers": [entry, ...]}`, see the module; an empty object is the default plan.

        Args:
            data: as written in JSON.
            num_layers, num_kv_heads: of the model, before tensor parallelism.

        Raises:
            ValueError: unknown keys, a wrong number of layers, or a role that breaks a rule.
            TypeError: a value has another type.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f'expected a layer plan like {{"layers": [...]}}, got {type(data).__name__}')
        unknown = sorted(str(key) for key in data if key != "layers")
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} of the layer plan; expected layers. Remove it")
        if "layers" not in data:
            return cls.default(num_layers, num_kv_heads)
        entries = data["layers"]
        if not isinstance(entries, list | tuple):
            raise TypeError(f"expected layers as a list of {num_layers} entries, got {type(entries).__name__}")
        if len(entries) != num_layers:
            raise ValueError(
                f"expected {num_layers} layers in the plan (the model's), got {len(entries)}; is it another model's?"
            )
        roles = (_parse_role(layer, entry, num_kv_heads) for layer, entry in enumerate(entries))
        return cls(tuple(roles), num_kv_heads)

    def to_dict(self) -> dict[str, list[str | dict[str, int | list[int]]]]:
        """Plain values that `from_dict` reads back to an equal plan."""
        return {
            "layers": [
                role.mode.value
                if role.anchor_layer is None
                else {"reuse": role.anchor_layer, "head_map": list(role.head_map)}
                for role in self.layers
            ]
        }

    def with_dense(self, layers: Sequence[int]) -> LayerPlan:
        """The plan in which these layers read the whole prefix, too. A layer that reused one of them selects itself."""
        roles = list(self.layers)
        for layer, role in enumerate(roles):
            if layer in layers:
                roles[layer] = LayerRole(LayerMode.DENSE)
            elif role.anchor_layer in layers:
                roles[layer] = LayerRole(LayerMode.ANCHOR)
        return LayerPlan(tuple(roles), self.num_kv_heads)

    def for_rank(self, rank: int, size: int) -> LayerPlan:
        """The plan of one tensor-parallel rank: its own KV heads, head maps numbered within them.

        Raises:
            ValueError: the heads do not divide, or a head takes the selection of one on another rank.
        """
        heads = heads_of_rank(self.num_kv_heads, rank, size)
        roles = []
        for layer, role in enumerate(self.layers):
            wanted = [role.head_map[head] for head in heads] if role.mode is LayerMode.REUSE else []
            far = [(head, source) for head, source in zip(heads, wanted, strict=False) if source not in heads]
            if far:
                head, source = far[0]
                raise ValueError(
                    f"layer {layer}: expected KV head {head} to reuse a selection of its own rank {rank} of {size} "
                    f"(KV heads {heads.start}..{heads.stop - 1}), got KV head {source} of layer {role.anchor_layer}: "
                    "ranks do not exchange selections. Serve with fewer ranks, make the layer an anchor, or leave "
                    "out its head_map"
                )
            roles.append(replace(role, head_map=tuple(source - heads.start for source in wanted)))
        return LayerPlan(tuple(roles), len(heads))

    def __getitem__(self, layer: int) -> LayerRole:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def anchor_layers(self) -> tuple[int, ...]:
        """Layers that need an index, ascending."""
        return tuple(i for i, role in enumerate(self.layers) if role.mode is LayerMode.ANCHOR)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that read the whole prefix, ascending."""
        return tuple(i for i, role in enumerate(self.layers) if role.mode is LayerMode.DENSE)

    def _check(self, layer: int, role: LayerRole) -> None:
        anchor = role.anchor_layer
        if anchor is None or not 0 <= anchor < layer:
            raise ValueError(
                f"layer {layer}: expected reuse of an earlier layer (0..{layer - 1}), got {anchor}; "
                "selections are made in layer order"
            )
        if self.layers[anchor].mode is not LayerMode.ANCHOR:
            raise ValueError(
                f"layer {layer}: expected reuse of an anchor layer, got layer {anchor}, which is "
                f"{self.layers[anchor].mode.value}; make it an anchor or name another"
            )
        if len(role.head_map) != self.num_kv_heads:
            raise ValueError(
                f"layer {layer}: expected head_map of {self.num_kv_heads} KV heads, got {len(role.head_map)} entries"
            )
        for head in role.head_map:
            if not 0 <= head < self.num_kv_heads:
                raise ValueError(f"layer {layer}: expected head_map entries in 0..{self.num_kv_heads - 1}, got {head}")


def heads_of_rank(num_kv_heads: int, rank: int, size: int) -> range:
    """Of the whole model's KV heads those that one tensor-parallel rank holds, as SGLang deals them out: an equal run
    of them each, or one head for several ranks where there are more ranks than heads.

    Raises:
        ValueError: neither number divides the other.
    """
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"expected KV heads and ranks of which one number divides the other, got {num_kv_heads} and {size}; "
            "serve with another --tp-size"
        )
    count = max(1, num_kv_heads // size)
    first = rank * num_kv_heads // size
    return range(first, first + count)


def _parse_role(layer: int, entry: object, num_kv_heads: int) -> LayerRole:
    wanted = f'layer {layer}: expected "dense", "anchor" or {{"reuse": anchor_layer}}, got'
    if isinstance(entry, str):
        if entry not in (LayerMode.DENSE.value, LayerMode.ANCHOR.value):
            raise ValueError(f"{wanted} {entry!r}")
        return LayerRole(LayerMode(entry))
    if not isinstance(entry, Mapping):
        raise TypeError(f"{wanted} {type(entry).__name__}")
    if "reuse" not in entry or not entry.keys() <= {"reuse", "head_map"}:
        raise ValueError(
            f"layer {layer}: expected the keys reuse and head_map, got {', '.join(sorted(map(str, entry)))}"
        )
    anchor, head_map = entry["reuse"], entry.get("head_map", list(range(num_kv_heads)))
    if type(anchor) is not int:
        raise TypeError(f"layer {layer}: expected reuse as a layer number, got {anchor!r}")
    if not isinstance(head_map, list | tuple) or any(type(head) is not int for head in head_map):
        raise TypeError(f"layer {layer}: expected head_map as a list of KV head numbers, got {head_map!r}")
    return LayerRole(LayerMode.REUSE, anchor, tuple(head_map))

"""Import of the head maps that microsoft/kascade publishes (`results/head_mappings/*.npy` of that repository).

A file is named `<model>_layers_<anchors joined by _>.npy`, for instance `..._layers_0_2_8_13_14.npy`, and holds an
int32 array [num_layers, num_kv_heads]: row j, entry h is the KV head of layer j's anchor whose Top-k KV head h of
layer j takes; the anchor is the nearest layer of the name at or before j, and anchors' own rows are the identity.
Layer 0 is always an anchor there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.calibration.plans import plan_from_maps
from sglang_ext.methods.layer_plan import LayerPlan

_NAME = re.compile(r"_layers_(\d+(?:_\d+)*)\.npy")


def load_published_plan(
    path: str | Path,
    *,
    num_layers: int,
    num_kv_heads: int,
    anchors: Sequence[int] | None = None,
) -> LayerPlan:
    """A layer plan from a published head map file. Layer 0 reads the whole prefix; a layer whose anchor it is becomes
    an anchor itself, see `plan_from_maps`: layer 1 of the published Llama and Qwen3 maps.

    Args:
        path: the file.
        num_layers, num_kv_heads: of the model that the plan is for, before tensor parallelism.
        anchors: layers that select, ascending, the first is 0; None reads them from the file's name.

    Raises:
        OSError: the file cannot be read.
        ValueError: no anchors in the name, no array in the file, one of another shape or dtype, a head out of range, an
            anchor whose row is not the identity, or anchors that break a rule.
    """
    path = Path(path)
    if anchors is None:
        found = _NAME.search(path.name)
        if found is None:
            raise ValueError(
                f"expected a file name like MODEL_layers_0_2_8_13_14.npy, got {path.name!r}; keep the published "
                "name, or name the anchors (--anchors 0,2,8,13,14)"
            )
        anchors = [int(part) for part in found[1].split("_")]
    with path.open("rb") as file:
        try:
            head_map: Any = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # numpy's of a damaged header are of many kinds
            raise ValueError(
                f"expected a .npy array of integers in {path.name}, got something else ({error}); download it again"
            ) from error
    _check(head_map, anchors, num_layers, num_kv_heads)
    maps = {layer: tuple(row) for layer, row in enumerate(head_map.tolist())}
    return plan_from_maps(anchors, maps, num_layers, num_kv_heads)


def _check(head_map: npt.NDArray[Any], anchors: Sequence[int], num_layers: int, num_kv_heads: int) -> None:
    if head_map.shape != (num_layers, num_kv_heads) or head_map.dtype.kind not in "iu":
        raise ValueError(
            f"expected an integer array of {num_layers} layers and {num_kv_heads} KV heads (the model's), got "
            f"{head_map.shape} {head_map.dtype}; take the head map of this model"
        )
    rows = head_map.tolist()
    for anchor in anchors:
        if 0 <= anchor < num_layers and rows[anchor] != list(range(num_kv_heads)):
            raise ValueError(
                f"layer {anchor}: expected the identity map of an anchor, got {rows[anchor]}; the anchors "
                f"{list(anchors)} do not belong to this file"
            )
    if not len(anchors) or anchors[0] != 0:
        raise ValueError(f"expected layer 0 among the anchors, got {list(anchors)}; published maps begin with it")

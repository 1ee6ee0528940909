"""Damages to the content of an index whose checksums are right, for `hostile_indexes.py`.

Every array of a method is damaged in form and value, in one KV head of one layer or in all of them, and the index as a
whole: arrays that are missing, too many, or exchanged. What a builder might have made of another prompt is no damage
that anybody could see; it is planted all the same (`fits`), since decode steps must bear it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefix_index import ArrayKey

Array = NDArray[Any]
Arrays = dict[ArrayKey, Array]
VICTIM = (1, 1)
"""Layer and KV head of what is damaged in one place."""


@dataclass(frozen=True)
class Damage:
    """One.

    Attributes:
        name: what is done to which array.
        apply: changes the arrays in place; each array is the caller's own copy.
        fits: what comes out might have been built; a loader cannot refuse it.
    """

    name: str
    apply: Callable[[Arrays], None]
    fits: bool = False


FORMS: dict[str, Callable[[Array], Array]] = {
    "half": lambda a: a[: len(a) // 2],
    "one less": lambda a: a[:-1],
    "one more": lambda a: np.concatenate([a, a[-1:]]),
    "narrower": lambda a: a[..., :-1],
    "twice as wide": lambda a: np.concatenate([a, a], axis=-1),
    "flat": lambda a: a.reshape(-1) if a.ndim > 1 else a.reshape(1, 1, -1),
    "one dim more": lambda a: a[None],
    "three dims more": lambda a: a[None, None, None],
    "none": lambda a: a[:0],
}
"""Other shapes; of a single number, those of two in a row."""
DTYPES: dict[str, Callable[[Array], Array]] = {
    "other dtype": lambda a: a.astype(np.float64 if a.dtype.kind == "f" else np.int64),
    "same bytes": lambda a: a.view({1: np.int8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]),
}
"""Other dtypes, of the same size too."""
VALUES: dict[str, dict[str, float]] = {
    "i": {"32767": 32767, "minus 1": -1, "minus 32768": -32768},
    "u": {},
    "f": {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf},
}
"""By kind of dtype, what all of an array, or its last value, is set to."""


def _set(value: float, where: Any = ...) -> Callable[[Array], Array]:
    def change(a: Array) -> Array:
        a[where if a.ndim else ...] = value
        return a

    return change


def _on(name: str, change: Callable[[Array], Array], *, everywhere: bool) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        for key in list(arrays):
            if key.name == name and (everywhere or (key.layer, key.kv_head) == VICTIM):
                arrays[key] = change(arrays[key])

    return apply


def damages(arrays: Arrays, method: str) -> Iterator[Damage]:
    """All of them.

    Args:
        arrays: of an index of one method that can be loaded; not written.
        method: its name.
    """
    names = sorted({key.name for key in arrays})
    for name in names:
        yield Damage(f"{name}: missing in a KV head", _drop(lambda k, n=name: k.name == n and k[1:] == VICTIM))
        if len(names) > 1:  # else it is an index of another method
            yield Damage(f"{name}: missing everywhere", _drop(lambda k, n=name: k.name == n))
        shapes = {label: lambda a, form=form: form(a if a.ndim else np.stack([a, a])) for label, form in FORMS.items()}
        for label, form in {**shapes, **DTYPES}.items():
            for where in ("in a KV head", "everywhere"):
                yield Damage(f"{name}: {label} {where}", _on(name, form, everywhere=where == "everywhere"))
        sample = arrays[ArrayKey(name, *VICTIM)]
        for label, value in VALUES[sample.dtype.kind].items():
            yield Damage(f"{name}: {label}", _on(name, _set(value), everywhere=True))
            yield Damage(f"{name}: {label} once", _on(name, _set(value, (-1,) * sample.ndim), everywhere=False))
    yield from _of_meaning(names)
    yield from _of_whole(method, names)


def _of_meaning(names: list[str]) -> Iterator[Damage]:
    """By what an array means."""

    def damage(name: str, label: str, change: Callable[[Array], Array], *, fits: bool = False) -> Damage:
        return Damage(f"{name}: {label}", _on(name, change, everywhere=True), fits)

    for name in names:
        last = name.rpartition(".")[2]
        if last == "channels":
            yield damage(name, "descending", lambda a: a[::-1].copy())
            yield damage(name, "one twice", lambda a: np.concatenate([a[:1], a[:-1]]))
            yield damage(name, "one behind the last", lambda a: np.concatenate([a[:-1], a[-1:] + 100]))
        if last == "counts":
            yield damage(name, "one entry too many", lambda a: _added(a, 1))
            yield damage(name, "one entry too few", lambda a: _added(a, -1))
            yield damage(name, "all in the last block", lambda a: _moved(a, -1))
            yield damage(name, "all in the first block", lambda a: _moved(a, 0))
            yield damage(name, "one of a block in another", lambda a: _added(_added(a, 1), -1, 1))
        if last == "places":
            yield damage(name, "all 255", lambda a: np.full_like(a, 255))
            yield damage(name, "all 0", lambda a: np.zeros_like(a))
            yield damage(name, "descending", lambda a: a[..., ::-1].copy())
            yield damage(name, "the first one other", lambda a: _replaced(a, (..., 0), a[..., 0] ^ 0xFF))
        if last == "block_sizes":
            for size in (0, -16, 1, 17, 128, 1 << 30):
                yield damage(name, f"{size} tokens", _set(size))
            yield damage(name, "of another head", lambda a: np.where(a == 16, 64, 16).astype(a.dtype))
        if last.endswith(("scale", "radius")):
            yield damage(name, "negative", lambda a: -np.abs(a) - 1)
            yield damage(name, "all 0", lambda a: np.zeros_like(a), fits=True)
            most = 131072.0 if last.startswith(("keys", "mean", "min", "max", "center")) else 65504.0
            yield damage(name, "as large as may be", _set(most), fits=True)
        if last.endswith(("_scale", "_zero")):
            yield damage(name, "1e30", _set(1e30))
        if last == "centroids":
            yield damage(name, "1,000 times as long", lambda a: (a * 1000).astype(a.dtype))
            yield damage(name, "all 0", lambda a: np.zeros_like(a), fits=True)
        if last.endswith("packed") or last == "codes":
            yield damage(name, "all 255", lambda a: np.full_like(a, 255), fits=True)
            yield damage(name, "random", _random, fits=True)


def _random(a: Array) -> Array:
    return np.random.default_rng(1).integers(0, 256, a.shape, np.uint8)


def _replaced(a: Array, where: Any, value: Any) -> Array:
    a[where] = value
    return a


def _added(a: Array, more: int, block: int = 0) -> Array:
    a[..., block] += more
    return a


def _moved(a: Array, block: int) -> Array:
    out = np.zeros_like(a)
    out[..., block] = a.sum(axis=-1)
    return out


def _of_whole(method: str, names: list[str]) -> Iterator[Damage]:
    """To the index as a whole."""
    yield Damage("no array of a layer", _drop(lambda k: k.layer == VICTIM[0]))
    yield Damage("no array of a KV head", _drop(lambda k: (k.layer, k.kv_head) == VICTIM))
    yield Damage("an array too many", lambda arrays: arrays.update(_named(arrays, f"{method}.more", lambda k: True)))
    yield Damage(
        "an array too many in a KV head",
        lambda arrays: arrays.update(_named(arrays, f"{method}.more", lambda k: (k.layer, k.kv_head) == VICTIM)),
    )
    yield Damage("an array without a name", lambda arrays: arrays.update(_named(arrays, f"{method}.", lambda k: True)))
    yield Damage(
        "an array of a method that nobody knows",
        lambda arrays: arrays.update(_named(arrays, "other.more", lambda k: True)),
        fits=True,
    )
    for label, field in (("a layer too many", "layer"), ("a KV head too many", "kv_head")):

        def add(arrays: Arrays, field: str = field) -> None:
            arrays.update({key._replace(**{field: 1000 + getattr(key, field)}): arrays[key] for key in list(arrays)})

        yield Damage(label, add, fits=True)
    for label, field in (("layers exchanged", "layer"), ("KV heads exchanged", "kv_head")):

        def exchange(arrays: Arrays, field: str = field) -> None:
            others = {1: 0, 0: 1}
            before = dict(arrays)
            for key in before:
                number = getattr(key, field)
                arrays[key] = before[key._replace(**{field: others.get(number, number)})]

        # Heads may differ in size, and say so.
        yield Damage(label, exchange, fits=True)


def _drop(which: Callable[[ArrayKey], bool]) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        for key in [key for key in arrays if which(key)]:
            del arrays[key]

    return apply


def _named(arrays: Arrays, name: str, which: Callable[[ArrayKey], bool]) -> Arrays:
    """An array of this name wherever the first of the others is."""
    first = min(key.name for key in arrays)
    return {key._replace(name=name): a for key, a in arrays.items() if key.name == first and which(key)}

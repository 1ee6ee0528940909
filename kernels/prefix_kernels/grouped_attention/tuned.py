"""Launch parameters that were measured on a GPU: those shipped with the package, and those a machine found itself."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from prefix_kernels.grouped_attention.config import (
    SPECIALIZED_ROWS,
    AttentionConfig,
    AttentionShape,
    block_m_for,
    default_config,
    fits_specialized,
    name_of,
)

logger = logging.getLogger(__name__)

FORMAT = 2
SHIPPED = Path(__file__).resolve().parents[1] / "tuned"
_WARPS = (1, 2, 4, 8, 16, 32)
_REGISTERS = (16, 255)


@dataclass(frozen=True)
class TileKey:
    """What the best launch parameters depend on, apart from the GPU.

    Attributes:
        block_m: rows of a tile.
        head_dim: channels of a key.
        v_head_dim: channels of a value.
        dtype: of the queries, as `bfloat16`.
        kv_dtype: of keys and values, as `float8_e4m3fn`.
    """

    block_m: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, shape: AttentionShape, block_m: int) -> TileKey:
        """The key of tiles of so many rows."""
        return cls(block_m, shape.head_dim, shape.v_head_dim, name_of(shape.dtype), name_of(shape.kv_dtype))


@dataclass(frozen=True)
class TunedEntry:
    """One measured choice.

    Attributes:
        key: of which tiles.
        config: the fastest parameters.
        us_by_case: microseconds of it by the cases that were measured; for people to read.
    """

    key: TileKey
    config: AttentionConfig
    us_by_case: Mapping[str, float]


class TunedConfigs:
    """Launch parameters by shape and height of a tile: measured ones where there are any, else the package's own.

    Args:
        gpu: name of the device, as torch gives it.
        entries: a later one takes the place of an earlier one with the same key.
        shipped: serves where `entries` has nothing, and is never saved.
    """

    def __init__(self, gpu: str, entries: Iterable[TunedEntry] = (), shipped: Iterable[TunedEntry] = ()) -> None:
        self.gpu = gpu
        self._found = {entry.key: entry for entry in entries}
        self._never_saved = {entry.key: entry for entry in shipped}

    @classmethod
    def for_device(cls, device: torch.device, cache: Path | None = None) -> TunedConfigs:
        """What is known of a device: what it found itself before, on top of what the package ships for it.

        Args:
            device: a CUDA device; on a CPU nothing is known.
            cache: folder that `save()` wrote to. A file in it that cannot be read is as none, with a warning.
        """
        gpu = gpu_name(device)
        path = shipped_file(device)
        shipped = parse(path.read_text(), gpu, str(path)) if path else []
        entries: list[TunedEntry] = []
        if cache is not None:
            try:
                entries = _cached(cache / file_name(gpu, _triton_version()), gpu)
            except (OSError, ValueError) as error:
                logger.warning("tuned launch parameters are left aside and will be measured again: %s", error)
        return cls(gpu, entries, shipped)

    @classmethod
    def read(cls, path: Path) -> TunedConfigs:
        """Of one file, whatever the device.

        Raises:
            OSError: it cannot be read.
            ValueError: it holds something else.
        """
        text = path.read_text()
        return cls(str(_document(text, str(path))["gpu"]), parse(text, None, str(path)))

    def __call__(self, shape: AttentionShape, rows: int) -> AttentionConfig:
        """For tiles of `rows` requests, at most as many as fit one tile."""
        block_m = block_m_for(rows, shape.gqa)
        entry = self._entry(shape, block_m)
        return entry.config if entry else own_config(shape, block_m)

    def passes(self, shape: AttentionShape, rows: int) -> list[AttentionConfig]:
        """As `passes_of`."""
        return passes_of(self, shape, rows)

    def missing(self, shape: AttentionShape, rows: Iterable[int]) -> list[int]:
        """Heights of tile, ascending, that these numbers of requests need and that nothing was measured for."""
        heights = {block_m_for(n, shape.gqa) for n in rows}
        return sorted(h for h in heights if self._entry(shape, h) is None)

    def add(self, entry: TunedEntry, *, keep: bool = True) -> None:
        """Know one more; without `keep` it serves as a shipped one does, and is never saved."""
        (self._found if keep else self._never_saved)[entry.key] = entry

    @property
    def entries(self) -> list[TunedEntry]:
        """All but the shipped ones, by key."""
        return [self._found[key] for key in sorted(self._found, key=lambda key: tuple(asdict(key).values()))]

    def _entry(self, shape: AttentionShape, block_m: int) -> TunedEntry | None:
        """None as well where its tile is too low for one request: measured with fewer query heads to a KV head."""
        key = TileKey.of(shape, block_m)
        entry = self._found.get(key) or self._never_saved.get(key)
        return entry if entry and entry.config.block_m >= shape.gqa else None

    def save(self, cache: Path) -> Path:
        """Write into a folder, for the next `for_device` under the same version of Triton; returns the file.

        The file is replaced as a whole; entries of other keys stay. Of two processes that save in the same moment one
        wins, and the other one's entries are measured again. Raises OSError.
        """
        cache.mkdir(parents=True, exist_ok=True)
        path = self.path_in(cache)
        others: list[TunedEntry] = []
        with suppress(OSError, ValueError):
            others = _cached(path, self.gpu)
        TunedConfigs(self.gpu, [*others, *self.entries]).write(path)
        return path

    def path_in(self, cache: Path) -> Path:
        """The file that `save` writes into a folder."""
        return cache / file_name(self.gpu, _triton_version())

    def write(self, path: Path) -> None:
        """Write to a file, replaced as a whole. Raises OSError."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            partial.write_text(self.dump())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def dump(self) -> str:
        """As JSON, one entry a line."""
        head = {"format": FORMAT, "gpu": self.gpu, "triton": _triton_version()}
        lines = [
            json.dumps({"rows": e.key.block_m, **asdict(e.key), **asdict(e.config), "us": dict(e.us_by_case)})
            for e in self.entries
        ]
        return json.dumps(head)[:-1] + ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def passes_of(
    configs: Callable[[AttentionShape, int], AttentionConfig], shape: AttentionShape, rows: int
) -> list[AttentionConfig]:
    """For a group of `rows` requests and for single ones: a specialized one does for both, in one launch."""
    group = configs(shape, rows)
    return [group, group if group.specialized else configs(shape, 1)]


def gpu_name(device: torch.device) -> str:
    """As torch names it; `cpu` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def shipped_file(device: torch.device) -> Path | None:
    """The file that the package brings for a device, if there is one."""
    path = SHIPPED / file_name(gpu_name(device))
    return path if path.is_file() else None


def own_config(shape: AttentionShape, block_m: int) -> AttentionConfig:
    """What runs where nothing was measured."""
    return default_config(block_m, shape.head_dim, shape.dtype, block_m_for(1, shape.gqa))


def file_name(gpu: str, triton: str = "") -> str:
    """`nvidia-h200.json`; with the version of Triton where a machine found it itself."""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower()).split()
    return "-".join([*words, *([f"triton-{triton}"] if triton else [])]) + ".json"


def parse(text: str, gpu: str | None, source: str) -> list[TunedEntry]:
    """The entries of a file named `source`.

    Raises:
        ValueError: not JSON, another format, of another GPU than `gpu`, or an entry that cannot be.
    """
    document = _document(text, source)
    if gpu is not None and document["gpu"] != gpu:
        raise ValueError(f"expected launch parameters of {gpu} in {source}, got {document['gpu']}; remove the file")
    return [_entry(one, source) for one in document["entries"]]


def _cached(path: Path, gpu: str) -> list[TunedEntry]:
    """The entries of a file that may not be there. Raises OSError and ValueError."""
    return parse(path.read_text(), gpu, str(path)) if path.is_file() else []


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {source}, got: {error}; remove the file") from error
    if (
        not isinstance(document, dict)
        or document.get("format") != FORMAT
        or not isinstance(document.get("gpu"), str)
        or not isinstance(document.get("entries"), list)
    ):
        raise ValueError(f"expected format {FORMAT}, a gpu and entries in {source}, got {text[:80]!r}; remove the file")
    return document


def _entry(one: Any, source: str) -> TunedEntry:
    try:
        # `block_m` is the configuration's: a wide head's tile is lower than what it serves, a specialized one higher.
        key = TileKey(**{name: one["rows" if name == "block_m" else name] for name in TileKey.__dataclass_fields__})
        config = AttentionConfig(**{name: one[name] for name in AttentionConfig.__dataclass_fields__})
        us = {str(name): float(value) for name, value in one.get("us", {}).items()}
        numbers = {**asdict(config), "rows": key.block_m, "head_dim": key.head_dim, "v_head_dim": key.v_head_dim}
        specialized = numbers.pop("specialized")
        if config.max_registers is None:
            del numbers["max_registers"]
        most = max(key.block_m, SPECIALIZED_ROWS) if specialized is True else key.block_m
        if any(type(n) is not int or n < 1 for n in numbers.values()) or config.block_m > most:
            raise ValueError(f"numbers of at least 1 and a tile of at most {most} rows")
        if type(specialized) is not bool:
            raise ValueError("specialized as true or false")
        if specialized and not fits_specialized(key.dtype, key.kv_dtype, key.head_dim, key.v_head_dim, 1):
            raise ValueError("a shape that the specialized kernel has")
        if config.num_warps not in _WARPS or not _REGISTERS[0] <= (config.max_registers or 255) <= _REGISTERS[1]:
            raise ValueError(f"num_warps of {_WARPS} and max_registers from {_REGISTERS[0]} to {_REGISTERS[1]}")
        if not isinstance(key.dtype, str) or not isinstance(key.kv_dtype, str):
            raise ValueError("names of dtypes")
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise ValueError(f"expected an entry of tuned parameters in {source}, got {one!r}: {error}") from error
    return TunedEntry(key, config, us)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)

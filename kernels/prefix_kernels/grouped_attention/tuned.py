"""Launch parameters that were measured on a GPU: those shipped with the package, and those a machine found itself."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prefix_kernels.grouped_attention.config import AttentionConfig, block_m_for, default_config

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention.runner import AttentionShape

logger = logging.getLogger(__name__)

FORMAT = 1


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
        entries: of which a later one takes the place of an earlier one with the same key.
    """

    def __init__(self, gpu: str, entries: Iterable[TunedEntry] = ()) -> None:
        self.gpu = gpu
        self._entries = {entry.key: entry for entry in entries}

    @classmethod
    def for_device(cls, device: torch.device, cache: Path | None = None) -> TunedConfigs:
        """What is known of a device: what it found itself before, on top of what the package ships for it.

        Args:
            device: a CUDA device; on a CPU nothing is known.
            cache: folder that `save()` wrote to. A file in it that cannot be read is as none, with a warning.
        """
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        entries: list[TunedEntry] = []
        shipped = files("prefix_kernels") / "tuned" / file_name(gpu)
        if shipped.is_file():
            entries += parse(shipped.read_text(), gpu, str(shipped))
        found = cache / file_name(gpu, _triton_version()) if cache else None
        if found is not None and found.is_file():
            try:
                entries += parse(found.read_text(), gpu, str(found))
            except (OSError, ValueError) as error:
                logger.warning("tuned launch parameters are left aside and will be measured again: %s", error)
        return cls(gpu, entries)

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
        entry = self._entries.get(TileKey.of(shape, block_m))
        return entry.config if entry else own_config(shape, block_m)

    def missing(self, shape: AttentionShape, rows: Iterable[int]) -> list[int]:
        """Heights of tile, ascending, that these numbers of requests need and that nothing was measured for."""
        heights = {block_m_for(n, shape.gqa) for n in rows}
        return sorted(h for h in heights if TileKey.of(shape, h) not in self._entries)

    def add(self, entry: TunedEntry) -> None:
        """Know one more."""
        self._entries[entry.key] = entry

    @property
    def entries(self) -> list[TunedEntry]:
        """All, by key."""
        return [self._entries[key] for key in sorted(self._entries, key=lambda key: tuple(asdict(key).values()))]

    def save(self, cache: Path) -> Path:
        """Write into a folder, for the next `for_device` under the same version of Triton; returns the file.

        The file is replaced as a whole. Of two processes that save at a time one wins; the other one's entries are
        measured again.

        Raises:
            OSError: it cannot be written.
        """
        cache.mkdir(parents=True, exist_ok=True)
        path = cache / file_name(self.gpu, _triton_version())
        self.write(path)
        return path

    def write(self, path: Path) -> None:
        """Write to a file, replaced as a whole. Raises OSError."""
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(self.dump())
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

    def dump(self) -> str:
        """As JSON, one entry a line."""
        head = {"format": FORMAT, "gpu": self.gpu, "triton": _triton_version()}
        lines = [json.dumps({**asdict(e.key), **asdict(e.config), "us": dict(e.us_by_case)}) for e in self.entries]
        return json.dumps(head)[:-1] + ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def own_config(shape: AttentionShape, block_m: int) -> AttentionConfig:
    """What runs where nothing was measured."""
    return default_config(block_m, shape.head_dim, shape.dtype, block_m_for(1, shape.gqa))


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def file_name(gpu: str, triton: str = "") -> str:
    """`nvidia-h200.json`; with the version of Triton where a machine found it itself."""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower()).split()
    return "-".join([*words, *([f"triton-{triton}"] if triton else [])]) + ".json"


def parse(text: str, gpu: str | None, source: str) -> list[TunedEntry]:
    """The entries of a file.

    Args:
        text: what it holds.
        gpu: the device it must be of; None for any.
        source: its name, for messages.

    Raises:
        ValueError: not JSON, another format, of another GPU, or an entry that cannot be.
    """
    document = _document(text, source)
    if gpu is not None and document["gpu"] != gpu:
        raise ValueError(f"expected launch parameters of {gpu} in {source}, got {document['gpu']}; remove the file")
    return [_entry(one, source) for one in document["entries"]]


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
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
        key = TileKey(**{name: one[name] for name in TileKey.__dataclass_fields__})
        config = AttentionConfig(**{name: one[name] for name in AttentionConfig.__dataclass_fields__})
        us = {str(name): float(value) for name, value in one.get("us", {}).items()}
        values = [n for name, n in asdict(config).items() if (name, n) != ("max_registers", None)]
        numbers = (key.block_m, key.head_dim, key.v_head_dim, *values)
        if any(type(n) is not int or n < 1 for n in numbers) or config.block_m > key.block_m:
            raise ValueError(f"numbers of at least 1 and a tile of at most {key.block_m} rows")
        if not isinstance(key.dtype, str) or not isinstance(key.kv_dtype, str):
            raise ValueError("names of dtypes")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"expected an entry of tuned parameters in {source}, got {one!r}: {error}") from error
    return TunedEntry(key, config, us)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)

"""`index ls`, `show` and `du`: what is there."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from prefix_index import FileStore, IndexEntry, IndexFile, IndexStoreError
from prefix_index.copies import digest_in
from prefix_index.format import is_digest
from sglang_ext.cli.index.targets import fields, find, length, listing, open_unused, opened, store_address
from sglang_ext.cli.index.text import TAG, count, emit, retention, size, span, table, wrapped


def run_ls(args: argparse.Namespace) -> int:
    """One line per usable index (of those that are named), ordered by digest."""
    with opened(args) as store:
        entries, damaged = store.list(), len(_unusable(store))
        if args.index:
            named = {target.digest for target in find(store, args.index, several=True)}
            entries = [entry for entry in entries if entry.digest in named]
    if args.json:
        for entry in entries:
            emit(fields(entry))
    elif entries:
        print("\n".join(listing(entries, time.time())))
        print(f"{count(len(entries))}, {size(sum(entry.nbytes for entry in entries))}")
    else:
        print(wrapped(f"no indexes in {store_address(args)}"))
    if damaged:
        sys.stdout.flush()
        print(f"{damaged} more cannot be used: see sglang-ext index verify", file=sys.stderr)
    return 0


def _unusable(store: FileStore) -> list[str]:
    """Paths of problems; one of an index that is served all the same, with a damaged retention, is none of them."""
    known = {entry.digest for entry in store.list()}
    return [path for path, _ in store.problems() if digest_in(path) not in known]


def run_show(args: argparse.Namespace) -> int:
    """Everything known of the named indexes; 1 when one of them cannot be used."""
    damaged = False
    with opened(args) as store:
        for number, target in enumerate(find(store, args.index)):
            if number and not args.json:
                print()
            try:
                if target.entry is None:
                    raise target.error or AssertionError("a target is an entry or an error")
                with open_unused(target.entry) as index:
                    details = _details(target.entry, index)
            except IndexStoreError as error:
                damaged = True
                details = {"digest": target.digest, "error": str(error)}
            if args.json:
                emit(details)
            else:
                print("\n".join(_described(details)))
    return 1 if damaged else 0


def _details(entry: IndexEntry, index: IndexFile) -> dict[str, Any]:
    arrays: dict[tuple[str, str], dict[str, Any]] = {}
    for key in index.keys:
        record = index.record(key)
        group = arrays.setdefault(
            (key.name, record.dtype),
            {"name": key.name, "dtype": record.dtype, "shapes": [], "count": 0, "nbytes": 0},
        )
        if list(record.shape) not in group["shapes"]:
            group["shapes"].append(list(record.shape))
        group["count"] += 1
        group["nbytes"] += record.nbytes
    return {
        **fields(entry),
        "prefix_hash": entry.identity.prefix_hash,
        "page_tokens": entry.identity.page_tokens,
        "format_version": entry.identity.format_version,
        "model_fields": msgspec.to_builtins(entry.identity.model),
        "spec": index.spec,
        "stats": index.stats,
        "arrays": list(arrays.values()),
    }


def _described(details: Mapping[str, Any]) -> Iterator[str]:
    def line(label: str, value: str) -> str:
        return wrapped(value, f"{label:<10}", " " * 10)

    yield line("index", details["digest"])
    if "error" in details:
        yield line("error", details["error"])
        return
    now = time.time()
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(details["created"]))
    kept = retention(details["pinned"], details["expires"], now)
    if details["name"] is not None:
        yield line("name", details["name"])
    yield line("prefix", f"{details['num_tokens']} tokens, hash {details['prefix_hash'][:32]}...")
    yield line("namespace", details["namespace"])
    yield line("profile", details["profile"])
    yield line("size", f"{size(details['nbytes'])} ({details['nbytes']} bytes), format {details['format_version']}")
    yield line("made", f"{made}, {span(now - details['created'])} ago, in {details['build_seconds']:.1f} s")
    yield line("kept", "until it must leave" if kept == "-" else kept)
    if details["path"]:
        yield line("path", details["path"])
    for label, value in (("model", details["model_fields"]), ("spec", details["spec"]), ("stats", details["stats"])):
        yield line(label, ", ".join(f"{key} {_plain(part)}" for key, part in value.items()) or "-")
    rows = [
        (
            group["name"],
            str(group["count"]),
            group["dtype"],
            "x".join(map(str, group["shapes"][0])) + (" ..." if len(group["shapes"]) > 1 else ""),
            size(group["nbytes"]),
        )
        for group in details["arrays"]
    ]
    yield from table(("ARRAY", "COUNT", "DTYPE", "SHAPE", "SIZE"), rows, (1, 4))


def _plain(value: Any) -> str:
    """A value for people: digests cut, objects with spaces where a line may break."""
    if isinstance(value, str):
        return value[:16] if is_digest(value) else value
    return json.dumps(value)


_GROUPS = ("model", "profile", "namespace")


def run_du(args: argparse.Namespace) -> int:
    """Bytes by model, profile and namespace."""
    with opened(args) as store:
        usage = _usage(store)
    if args.json:
        emit(usage)
        return 0
    for by in _GROUPS:
        rows = [(group[by][: 2 * TAG], str(group["indexes"]), size(group["nbytes"])) for group in usage[f"by_{by}"]]
        print(*table((by.upper().ljust(2 * TAG), "INDEXES", "      SIZE"), rows, (1, 2)), "", sep="\n")
    print(f"total      {count(usage['indexes'])}, {size(usage['nbytes'])}")
    if usage["unusable"]:
        print(f"unusable   {usage['unusable']}, {size(usage['unusable_nbytes'])}")
    print(f"free disk  {size(usage['free_bytes'])} of {size(usage['disk_bytes'])}")
    return 0


def _usage(store: FileStore) -> dict[str, Any]:
    entries, unusable = store.list(), _unusable(store)
    disk = shutil.disk_usage(store.folder)
    return {
        "indexes": len(entries),
        "nbytes": sum(entry.nbytes for entry in entries),
        "unusable": len(unusable),
        "unusable_nbytes": sum(length(path) for path in unusable if digest_in(path) is not None),
        "free_bytes": disk.free,
        "disk_bytes": disk.total,
        **{f"by_{name}": _grouped(entries, name) for name in _GROUPS},
    }


def _grouped(entries: Sequence[IndexEntry], name: str) -> list[dict[str, Any]]:
    groups: dict[object, dict[str, Any]] = {}
    for entry in entries:
        key = fields(entry)[name]
        group = groups.setdefault(key, {name: key, "indexes": 0, "nbytes": 0})
        group["indexes"] += 1
        group["nbytes"] += entry.nbytes
    return sorted(groups.values(), key=lambda group: (-group["nbytes"], group[name]))

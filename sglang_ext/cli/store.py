"""`sglang-ext store`: the process that keeps a host's DRAM and SSD tiers for all its servers and jobs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from prefix_index import IndexStoreError, StoreFolderError, printable
from sglang_ext.cli.arguments import parse_bytes, refuse
from sglang_ext.cli.index.text import size
from sglang_ext.storage import default_store

_SERVE = """\
Keep the index store of this host: one process that owns the folder, and a DRAM tier in front of it, for all
SGLang ranks and prebuild jobs. They name it instead of a folder: --sparse-attn-store ipc:///FOLDER/SOCKET.

The DRAM tier is a folder in memory (tmpfs): --memory-bytes 64G keeps copies of what is used there, and
--memory-dir says where (default: /dev/shm/sglang-ext-UID/NAME-HASH). Its contents outlive this process.

SIGTERM or Ctrl-C ends it; its clients go on with the folder. See docs/store.md.
"""
_SWITCH_S = 0.0005
_IN_MEMORY = ("tmpfs", "ramfs")


def default_endpoint() -> str:
    """The socket when none is named: in the user's runtime folder, or its own folder below /tmp."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(base, "sglang-ext") if base else f"/tmp/sglang-ext-{os.getuid()}"
    return f"ipc://{folder}/store"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("store", help="serve the index store of this host, or ask how it does")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    serve = actions.add_parser("serve", help="run the service", description=_SERVE)
    serve.add_argument("--dir", default=default_store(), help="index store; made when missing (default: %(default)s)")
    serve.add_argument("--endpoint", default=default_endpoint(), metavar="ipc:///PATH", help="default: %(default)s")
    add_size = partial(serve.add_argument, type=parse_bytes, metavar="N")
    add_size("--max-bytes", help="evict the least recently used above it (default: never)")
    add_size("--min-free-bytes", default=0, help="to leave free on the disk")
    add_size("--memory-bytes", default=0, help="size of the DRAM tier (default: none)")
    serve.add_argument("--memory-dir", metavar="DIR", help="the DRAM tier's folder, on a tmpfs (default: in /dev/shm)")
    serve.add_argument("--mode", default="0700", help="of new folders, octal; of files without x (default: 0700)")
    serve.add_argument("--group", metavar="NAME", help="that they belong to, for readers of a mode such as 0750")
    serve.add_argument("--verbose", action="store_true", help="log more")
    serve.set_defaults(run=run_serve)

    status = actions.add_parser("status", help="what the service holds and did", description="Ask a running service.")
    status.add_argument("--endpoint", default=default_endpoint(), metavar="ipc:///PATH", help="default: %(default)s")
    status.add_argument("--json", action="store_true", help="one JSON object instead of text")
    status.set_defaults(run=run_status)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit status."""
    from prefix_index import Copies, FileStore, InvalidPayload
    from prefix_index.connect import locate
    from prefix_index.service import StoreServer, raise_descriptor_limit

    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s store %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    log = logging.getLogger("prefix_index.service")
    raise_descriptor_limit()
    try:
        place = locate(args.dir)
        if place.kind != "file":
            raise InvalidPayload(
                "--dir", "a folder or file:///FOLDER", repr(args.dir), "name the folder that is served"
            )
        args.dir = place.value
        copies = None
        if args.memory_bytes:
            memory = _memory_dir(args)
            keeper = FileStore(memory, create=True, max_bytes=args.memory_bytes)
            copies = Copies(Path(memory), keeper=keeper)
        store = FileStore(
            args.dir,
            create=True,
            max_bytes=args.max_bytes,
            min_free_bytes=args.min_free_bytes,
            mode=args.mode,
            group=args.group,
            copies=copies,
        )
        server = StoreServer(store, args.endpoint)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        server.open()
    except IndexStoreError as error:
        return refuse("store serve", printable(str(error)), 1)
    # Copying computes checksums; the loop must get its turn soon.
    sys.setswitchinterval(_SWITCH_S)
    try:
        tier = f", {size(args.memory_bytes)} of DRAM in {copies.folder}" if copies is not None else ""
        log.info("serves %s%s at %s", store.folder, tier, args.endpoint)
        if copies is not None and (found := file_system(copies.folder)) not in _IN_MEMORY:
            log.warning(
                "expected the DRAM tier's folder on a tmpfs, found %s at %s: its copies take disk space, and are read "
                "no faster than the store. Name a folder on a tmpfs with --memory-dir, or leave --memory-bytes out",
                found,
                copies.folder,
            )
        server.serve()
    finally:
        server.close()
    return 0


def file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on, as Linux names it; `unknown` for what it does not list."""
    device = os.stat(folder).st_dev
    with suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for mount, _, source in (line.partition(" - ") for line in mounts):
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return source.split()[0]
    return "unknown"


def _memory_dir(args: argparse.Namespace) -> str:
    """Raises StoreFolderError where somebody else made the default's parent, who could then swap its files."""
    if args.memory_dir:
        return str(args.memory_dir)
    parent = f"/dev/shm/sglang-ext-{os.getuid()}"
    refused = partial(StoreFolderError, "DRAM tier's folder", remedy="give --memory-dir", path=parent)
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        owner = os.stat(parent, follow_symlinks=False).st_uid
    except OSError as err:
        raise refused(expected="a usable folder", found=err.strerror or str(err)) from err
    if owner != os.getuid():
        raise refused(expected="one of this user", found=f"user {owner}'s")
    return os.path.join(parent, memory_name(args.dir))


def memory_name(store: str) -> str:
    """A DRAM tier's folder: the start is for people, the end keeps /srv/a-b/c and /srv/a/b-c apart."""
    path = os.path.realpath(store)
    return f"{path.strip('/').replace('/', '-')[-80:]}-{xxhash.xxh3_64_hexdigest(os.fsencode(path))[:8]}"


def run_status(args: argparse.Namespace) -> int:
    """Print a service's status; returns the exit status, 1 where none answers."""
    from prefix_index.service import service_status

    try:
        status = service_status(args.endpoint)
    except IndexStoreError as error:
        return refuse("store status", printable(str(error)), 1)
    if args.json:
        print(json.dumps(msgspec.to_builtins(status), indent=2))
        return 0
    print(f"service   pid {status.pid}, up {status.uptime_s:.0f} s, at {status.endpoint}")
    print(f"indexes   {status.indexes} usable, {status.problems} problems (sglang-ext index verify)")
    for tier in status.tiers:
        limit = f" of {size(tier.max_bytes)}" if tier.max_bytes is not None else ""
        held = f"{tier.indexes} indexes, {size(tier.nbytes)}{limit}"
        evicted = "" if tier.evicted is None else f", {tier.evicted} evicted"
        print(f"{tier.name:<9} {held}, {tier.hits} hits{evicted}")
        print(f"          {printable(tier.folder)}")
        if tier.error:
            print(f"          {printable(tier.error)}")
    print(f"writing   {status.reservations} indexes, {size(status.reserved_bytes)}; {status.promoted} copied to DRAM")
    print(f"building  {len(status.leases)} leases held")
    for digest in status.leases[:10]:
        print(f"          {digest[:16]}...")
    print(f"clients   {status.connections} connections; heard from last:")
    for connection in status.clients[-10:]:
        print(f"          {printable(connection)}")
    print("counts    " + ", ".join(f"{count} {what}" for what, count in sorted(status.counts.items())))
    return 0

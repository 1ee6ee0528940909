"""Prints how large the project is and how far a decode step and a prefix key travel through it.

    TRITON_INTERPRET=1 python -m tests.house_report

Lines are those of Python files, empty ones and comments among them. Words are those of README.md and docs/, without the
page that a script writes. An import circle is a way from a module over its imports back to it; imports within functions
and for type checkers count. Files are entered when one of their functions runs: of a decode step from the runtime to
the kernels (on a CPU in Triton's interpreter, and the reference attends), and of a prefix key from a request's
admission to the index on the device.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"sglang_ext": ROOT, "prefix_kernels": ROOT / "kernels", "prefix_index": ROOT / "index_store"}
sys.path[:0] = map(str, SOURCES.values())  # this checkout, whichever one is installed


def lines(*folders: str) -> int:
    return sum(len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def words() -> int:
    pages = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    return sum(len(page.split()) for page in pages if "Written by `python scripts/" not in page)


def imports() -> dict[str, set[str]]:
    """Of each module of ours, those that it imports anywhere. What a package hands on counts as an import of it."""
    graph = grimp.build_graph(*SOURCES, cache_dir=None)
    return {name: set(graph.find_modules_directly_imported_by(name)) for name in graph.modules}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next one, and the last one is the first; empty where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@contextmanager
def entered() -> Iterator[set[str]]:
    """The source files of ours whose functions run within the block, on any thread that begins there."""
    found: set[str] = set()
    roots = tuple(str(root / package) + os.sep for package, root in SOURCES.items())

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(roots) and frame.f_code.co_name != "<module>":
            found.add(str(Path(name).relative_to(ROOT)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walk_decode_step() -> set[str]:
    """A step of a server with an index, all layers; groups are known, so that nothing but a usual step runs."""
    import torch

    from tests.sparse_server import Server

    with one_request() as (admit, step):
        admit()
        for length in range(66, 70):
            step(length)
        with entered() as found:
            step(70)
    # On a CPU the reference selects: of this step only files of the plugin count, and the kernels of another one.
    found = {name for name in found if name.startswith("sglang_ext") and "/methods/" not in name}
    server = Server(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    server.join(1, *server.prefix(300), 5)
    for _ in range(4):
        server.step([1])
    batch = server.batch([1], [server.lens[1]])
    q = torch.randn(1, server.shape.num_qo_heads, server.dim, dtype=server.dtype, device=server.device)
    with entered() as by_kernels:
        server.tracker.learn(batch)
        plan = server.sparse.plan(batch)
        assert plan is not None
        assert server.sparse.begin(plan, batch) is not None
        for layer, kv in enumerate(server.caches):
            server.sparse.run(q, kv, layer, 0.1)
    return found | by_kernels


def walk_prefix_key() -> set[str]:
    """A prompt's way to its index on the device."""
    with one_request() as (admit, _), entered() as found:
        admit()
    return found


@contextmanager
def one_request() -> Iterator[tuple[Callable[[], None], Callable[[int], None]]]:
    """(admit a request and wait for its index, a decode step of it at a length)."""
    from sglang_ext.config import Settings
    from tests.serving.admitting import PROMPT, Model, Runtime, ours
    from tests.serving.conftest import Bench, config_from_dict

    method = {"method": "token_index", "methods": {"token_index": {}}}
    fields = {**method, "keep_ratio": 1.0, "layer_plan": ["anchor"] * 3, "min_sparse_prompt_len": 16}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), config_from_dict({**fields, "store_min_free_bytes": 0}))
        bench.put(PROMPT)
        runtime = Runtime(Settings(config=bench.config, store=folder), Model(bench.model))

        def admit() -> None:
            attachment = runtime.requests.of(runtime.came("a"))
            attachment.index.loaded.result(30)

        def step(length: int) -> None:
            assert ours(runtime, ["a"], [length])

        yield admit, step
        runtime.close()
        bench.store.close()


def main() -> None:
    graph = imports()
    found = circle(graph)
    step, key = walk_decode_step(), walk_prefix_key()
    print(f"lines shipped             {lines('sglang_ext', 'kernels', 'index_store'):,}")
    print(f"lines of tests            {lines('tests'):,}")
    print(f"lines of benchmarks       {lines('benchmarks'):,}")
    print(f"words of docs             {words():,}")
    print(f"modules shipped           {len(graph)}")
    print(f"import circle             {' -> '.join(found) or 'none'}")
    for what, files in (("one sparse decode step", step), ("one prefix key", key)):
        print(f"files entered by {what}: {len(files)}")
        for name in sorted(files):
            print(f"    {name}")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "run it with TRITON_INTERPRET=1"
    main()

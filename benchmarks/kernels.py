"""Decode kernels: exact and sparse attention of prefix groups, and selection, beside FlashInfer and plain torch.

    python benchmarks/kernels.py attention --out rows.jsonl            # a GPU with FlashInfer; minutes
    python benchmarks/kernels.py attention --tune H200.json --out tune.jsonl --seconds 400
    python benchmarks/kernels.py selection --out rows.jsonl
    python benchmarks/kernels.py --table rows.jsonl
    python benchmarks/kernels.py --plot plots rows.jsonl
    TRITON_INTERPRET=1 python benchmarks/kernels.py attention --smoke --out tiny.jsonl    # a CPU is enough

The command line is in `kernel_bench.py`: this file is also what Python finds for `import kernels` when a script of this
folder runs, and `kernels` is a package of Hugging Face that transformers and SGLang look for. Then it steps aside.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def _step_aside() -> None:
    """Put the package of this name, from anywhere else on the path, in this module's place.

    Where there is none, an empty module without a file stands there, as an empty folder would: transformers takes that
    for "not installed", while an error at this point would break its check.
    """
    here = Path(__file__).resolve().parent
    path = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, path)
    if spec is None or spec.loader is None:
        sys.modules[__name__] = ModuleType(__name__)
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if "--smoke" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from kernel_bench import main

    sys.exit(main())
elif __name__ == "kernels":
    _step_aside()

"""Put on PYTHONPATH of a server under test: the index of the second tensor-parallel rank comes late, by a second."""

import importlib.abc
import importlib.machinery
import sys
import time

_MODULE = "sglang_ext.prefix.residency"
LATE_S = 1.0


class _Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            load = module.Residency._load

            def late(residency, index):
                if residency._kv_heads.start > 0:
                    time.sleep(LATE_S)
                load(residency, index)

            module.Residency._load = late

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Late())

"""Put on PYTHONPATH of a server under test: the second tensor-parallel rank's index comes late, by decode steps."""

import importlib.abc
import importlib.machinery
import sys
import threading

_MODULE = "sglang_ext.prefix.residency"
LATE_STEPS = 20
LATE_S = 300.0


class _Steps:
    """Decode steps of this process, which a thread can wait for."""

    def __init__(self):
        self._count = 0
        self._more = threading.Condition()

    def one(self):
        with self._more:
            self._count += 1
            self._more.notify_all()

    def wait(self, more):
        with self._more:
            end = self._count + more
            self._more.wait_for(lambda: self._count >= end, LATE_S)


def _make_late(residency, agreement):
    steps, load, took = _Steps(), residency._load, agreement.took

    def late(self, index):
        if self._kv_heads.start > 0:
            steps.wait(LATE_STEPS)
        load(self, index)

    def counted(self, path, rows):
        steps.one()
        took(self, path, rows)

    residency._load, agreement.took = late, counted


class _Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _make_late(module.Residency, importlib.import_module("sglang_ext.ranks").Agreement)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Late())

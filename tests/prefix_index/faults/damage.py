"""Bytes that change or go missing on the disk: flipped bits, cut files, also under an open reader."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefix_index import FileStore, IndexCorrupt, IndexFile, IndexFormatError
from prefix_index.format import ALIGN, PRELUDE, aligned

from .outcome import Campaign, Outcome
from .tools import MEDIUM, Tally, array_of, folder, identity_of, opened, payload_of

PARTS = 4


class Patient:
    """A file of a store, whole before and after each fault."""

    def __init__(self, store: FileStore, nbytes: int) -> None:
        self.path = Path(store.put(payload_of(0, 7, nbytes, parts=PARTS)).path or "")
        self.raw = self.path.read_bytes()
        self.fd = os.open(self.path, os.O_RDWR)
        with IndexFile.open(self.path) as index:
            self.size = int(index.stats["size"])
        self.data_offset = len(self.raw) - ALIGN - PARTS * aligned(self.size)

    def flip(self, bit: int) -> None:
        os.pwrite(self.fd, bytes([self.raw[bit // 8] ^ 1 << bit % 8]), bit // 8)

    def mend(self, bit: int) -> None:
        os.pwrite(self.fd, self.raw[bit // 8 : bit // 8 + 1], bit // 8)

    def cut(self, nbytes: int) -> None:
        os.ftruncate(self.fd, nbytes)

    def grow_back(self, nbytes: int) -> None:
        os.pwrite(self.fd, self.raw[nbytes:], nbytes)

    def right(self, part: int, found: NDArray[np.uint8]) -> bool:
        return np.array_equal(found, array_of(0, 7, part, self.size))


def flip_one(tally: Tally, store: FileStore, patient: Patient, bit: int) -> None:
    """Flips, then reads by each way there is: an error of the format by the end of verify(), no wrong byte before."""
    tally.tried += 1
    detected = False
    patient.flip(bit)
    try:
        with store.get(identity_of(0)) as index:
            for key in index.keys:
                try:
                    out = index.read_many([key], direct=False)[key]
                    tally.expect(patient.right(key.layer, out), f"bit {bit}: one array had other bytes")
                    tally.expect(patient.right(key.layer, index.array(*key)), f"bit {bit}: array gave other bytes")
                except IndexFormatError:
                    detected = True
            for direct in (True, False):
                try:
                    for key, found in index.read_many(direct=direct).items():
                        tally.expect(patient.right(key.layer, found), f"bit {bit}: read_many gave other bytes")
                    tally.expect(not detected, f"bit {bit}: read_many did not detect it")
                except IndexFormatError:
                    detected = True
            index.verify()
    except IndexFormatError as err:
        detected = True
        tally.expect(err.path == str(patient.path), f"bit {bit}: the error names no file: {err}")
    except Exception as err:
        tally.err(f"bit {bit}: {type(err).__name__}: {err}")
    finally:
        patient.mend(bit)
    tally.expect(detected, f"bit {bit} of byte {bit // 8} was not detected")


def flip_header(count: int, seed: int) -> Outcome:
    """Each single bit of header, its padding and the footer: detected before a byte is given out."""
    tally = Tally("flip_header")
    with folder() as path, opened(path) as store:
        patient = Patient(store, ALIGN)
        total = len(patient.raw) * 8
        bits = [*range(patient.data_offset * 8), *range(total - ALIGN * 8, total)]
        chosen = bits if count >= len(bits) else bits[: PRELUDE.size * 8] + random.Random(seed).sample(bits, count)
        for bit in chosen:
            flip_one(tally, store, patient, bit)
        with store.get(identity_of(0)) as index:
            index.verify()
    return tally.outcome(f"{len(chosen):,} of the {len(bits):,} bits of header, padding and footer")


def flip_arrays(count: int, seed: int) -> Outcome:
    """Single random bits of arrays and of the zeros behind them: detected by each way to read."""
    tally, rng = Tally("flip_arrays"), random.Random(seed)
    with folder() as path, opened(path) as store:
        patient = Patient(store, 6 * ALIGN + 8 * PARTS)
        first, last = patient.data_offset * 8, (len(patient.raw) - ALIGN) * 8
        in_padding = 0
        for _ in range(count):
            bit = rng.randrange(first, last)
            in_padding += (bit // 8 - patient.data_offset) % aligned(patient.size) >= patient.size
            flip_one(tally, store, patient, bit)
        with store.get(identity_of(0)) as index:
            index.verify()
    return tally.outcome(f"{count - in_padding} bits of arrays, {in_padding} of padding")


def cuts_of(nbytes: int, count: int) -> list[int]:
    """Every 4 KiB boundary of a file and the lengths next to it, one in a few where ``count`` is less."""
    cuts = [at for edge in range(0, nbytes + 1, ALIGN) for at in (edge - 1, edge, edge + 1) if 0 <= at < nbytes]
    step = max(1, len(cuts) // count)
    return cuts[:: step + (step % 3 == 0)]


def truncate(count: int, seed: int) -> Outcome:
    """A file cut at every 4 KiB boundary and a byte beside it: never listed, contained or opened."""
    tally = Tally("truncate")
    with folder() as path, opened(path) as store:
        patient = Patient(store, MEDIUM)
        for at in cuts_of(len(patient.raw), count):
            patient.cut(at)
            tally.raises(IndexFormatError, lambda: store.get(identity_of(0)))
            tally.expect(not store.contains(identity_of(0)), f"cut at {at}: contained")
            store.rescan(full=True)
            tally.expect(not store.list(), f"cut at {at}: listed")
            tally.expect(len(store.problems()) == 1, f"cut at {at}: {len(store.problems())} problems")
            patient.grow_back(at)
        store.rescan(full=True)
        if not store.contains(identity_of(0)):
            tally.lose("the mended file")
    return tally.outcome(f"a file of {len(patient.raw):,} bytes cut at every 4 KiB boundary and 1 byte beside it")


def truncate_open(count: int, seed: int) -> Outcome:
    """The file is cut after ``get``: read_many gives the right bytes or IndexCorrupt."""
    tally = Tally("truncate_open")
    with folder() as path, opened(path) as store:
        patient = Patient(store, MEDIUM)
        for at in cuts_of(len(patient.raw), count):
            with store.get(identity_of(0)) as index:
                patient.cut(at)
                for key in index.keys:
                    whole = patient.data_offset + (key.layer + 1) * aligned(patient.size) <= at
                    for direct in (True, False):
                        tally.tried += 1
                        try:
                            out = index.read_many([key], direct=direct)[key]
                            tally.expect(patient.right(key.layer, out), f"cut at {at}: other bytes of {key.layer}")
                        except IndexCorrupt:
                            tally.expect(not whole, f"cut at {at}: array {key.layer} is there but was refused")
            patient.grow_back(at)
        with store.get(identity_of(0)) as index:
            index.verify()
    return tally.outcome(f"a file of {len(patient.raw):,} bytes, each array read after each cut")


CAMPAIGNS = {
    "flip_header": Campaign(flip_header, full=1 << 17, quick=4_000),
    "flip_arrays": Campaign(flip_arrays, full=8_000, quick=1_000),
    "truncate": Campaign(truncate, full=1 << 20, quick=1_000),
    "truncate_open": Campaign(truncate_open, full=1 << 20, quick=300),
}

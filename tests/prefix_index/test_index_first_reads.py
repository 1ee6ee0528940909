"""What a process does when it reads its first index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prefix_index import FileStore, Retention
from prefix_index.testing import sample_identity, sample_payload

READ_ALL_RECORDS = """
import sys
import prefix_index.remote
from prefix_index import FileStore
from prefix_index.remote.claims import LeaseRecord
from prefix_index.remote.values import LEASE, LEASES, pack_record, unpack_record

worked_out = set()

def called(frame, event, arg):
    if event == "call" and "msgspec" in frame.f_code.co_filename:
        worked_out.add(frame.f_code.co_name)

sys.setprofile(called)
with FileStore(sys.argv[1]) as store:
    (entry,) = store.list()
    assert entry.retention.pinned
    store.get(entry.digest).close()
lease = pack_record(LEASE, entry.digest, "0" * 16, LeaseRecord(holder="me", expires=1.0))
unpack_record(LEASE, entry.digest, lease, LEASES)
sys.setprofile(None)
print(*sorted(worked_out))
"""


def test_types_of_records_are_worked_out_before_any_thread_reads_one(tmp_path: Path) -> None:
    """msgspec does so in Python at a type's first use; processes whose threads did it together died (SIGSEGV)."""
    with FileStore(tmp_path / "store", create=True) as store:
        store.put(sample_payload(sample_identity()), retention=Retention(pinned=True))
    ran = subprocess.run([sys.executable, "-c", READ_ALL_RECORDS, tmp_path / "store"], capture_output=True, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"\n", b"")

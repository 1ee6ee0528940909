"""A real S3 protocol over loopback for tests: moto's server, in a thread of this process, one per process."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import urllib.request

import pytest

from prefix_index.remote import ObjectBlobs


@functools.lru_cache(maxsize=1)
def endpoint() -> str:
    """Starts the server at the first call; it ends with the process."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    atexit.register(server.stop)
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


def new_bucket() -> ObjectBlobs:
    """An empty bucket, and a folder in it."""
    name = f"bucket-{secrets.token_hex(6)}"
    request = urllib.request.Request(f"{endpoint()}/{name}", method="PUT")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60):
        return bucket(name)


def bucket(name: str) -> ObjectBlobs:
    """Another client of a bucket that is there."""
    pytest.importorskip("obstore")
    set_credentials()
    return ObjectBlobs(
        f"s3://{name}/fleet", endpoint=endpoint(), region="us-east-1", client_options={"allow_http": True}
    )


def set_credentials() -> None:
    """Where obstore finds them in real life. Without any it would ask the cloud's metadata service."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test-key")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test-secret")

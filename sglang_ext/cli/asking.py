"""Questions of commands to a running server's `/sparse_attn` routes. Needs no SGLang and no torch."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

ENV_ADMIN_KEY = "SGLANG_SPARSE_ATTN_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:30000"


class ServerError(Exception):
    """A server that cannot be asked, or refuses: what was expected, what came, what to do."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the key would go to another host. For the same reason no proxy is asked."""

    def redirect_request(self, *_: Any) -> None:
        return None


def add_arguments(parser: argparse.ArgumentParser, url: str | None = DEFAULT_URL) -> None:
    """--url, with that default, and --admin-key."""
    default = "" if url is None else " (default: %(default)s)"
    parser.add_argument("--url", default=url, help=f"of the server{default}")
    parser.add_argument(
        "--admin-key",
        default=os.environ.get(ENV_ADMIN_KEY),
        metavar="KEY",
        help="SGLang's --admin-api-key, or its --api-key where there is no other; everybody on this machine sees what "
        f"stands on a command line, so rather set {ENV_ADMIN_KEY}",
    )


def ask(
    args: argparse.Namespace, command: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0
) -> dict[str, Any]:
    """What the server answers to a command.

    Args:
        args: with the arguments of `add_arguments`.
        command: last word of its route.
        body: JSON values; None: it has none, and is asked by GET.
        timeout_s: of the answer. A server answers between two steps; behind a long prefill that takes a while.

    Raises:
        ServerError: no answer, or a refusal.
    """
    return request(args, f"/sparse_attn/{command}", body, timeout_s)


def request(args: argparse.Namespace, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """What any route of the server answers, as `ask`."""
    url = f"{args.url.rstrip('/')}{path}"
    headers = {"Content-Type": "application/json"}
    if args.admin_key:
        headers["Authorization"] = f"Bearer {args.admin_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        sent = urllib.request.Request(url, data, headers, method="GET" if body is None else "POST")
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
        try:
            with opener.open(sent, timeout=timeout_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise ServerError(_refusal(args, error.code, error.read())) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        # UnicodeError of a key, InvalidURL, timeouts and what is no JSON among them
        raise ServerError(
            f"expected an answer of {url}, got: {error}; check --url, and that the server runs"
        ) from error
    if not isinstance(answer, dict):
        raise ServerError(f"expected a JSON object from {url}, got {type(answer).__name__}; check --url")
    return answer


def _refusal(args: argparse.Namespace, status: int, text: bytes) -> str:
    try:
        said = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        said = ""
    if status in (401, 403) and said in ("", "Unauthorized", "Forbidden"):  # SGLang's words
        got = "another one" if args.admin_key else "none"
        return f"expected the server's admin key, got {got}; give it by {ENV_ADMIN_KEY} or --admin-key"
    if not said:
        return (
            f"expected a server with --sparse-attn of this release at {args.url}, got HTTP {status}; check --url, and "
            "start the server with the flag (with --tokenizer-worker-num above 1 it has no such routes)"
        )
    return said

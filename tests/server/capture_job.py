"""Captures one prompt through SGLang and saves it: `python -m tests.server.capture_job IDS_JSON OUT -- FLAGS`."""

from __future__ import annotations

import json
import os
import sys

from sglang_ext.calibration.prompt_capture import save_capture
from sglang_ext.cli.engines import open_session
from tests.server.harness import MODEL

DECODE_STEPS = 8


def main() -> None:
    request = json.loads(sys.argv[1])
    sizes = {"query_samples": 512, "tail_tokens": 32, "decode_steps": DECODE_STEPS}
    with open_session(str(MODEL), sys.argv[4:], **sizes) as session:
        capture = session.capture("first", request["input_ids"], request["prefix_len"])
        save_capture(capture, sys.argv[2])
        try:
            session.capture("long", [5] * 70000)
        except ValueError as error:
            print(f"REFUSED {error}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # SGLang has ended what the interpreter would wait for


if __name__ == "__main__":
    main()

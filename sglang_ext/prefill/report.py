"""What became of each prompt of a building or capturing process, as JSON lines in the file `build_report`."""

from __future__ import annotations

import json
import logging
from typing import Any

from prefix_index import printable_values

logger = logging.getLogger(__name__)


def report(to: str | None, rid: str, /, **fields: Any) -> None:
    """Append one line about a request to a file; nothing without one.

    A file that cannot be written is logged: the server must live on.
    """
    if not to:
        return
    try:
        with open(to, "a") as file:
            file.write(json.dumps(printable_values({"rid": rid, **fields})) + "\n")
    except OSError as error:
        logger.error("sparse attention: build_report cannot be written (%s): %s %s", error, rid, fields)

"""What our loggers say, printable: a line of the log is one that we wrote, whatever a request or a file is called."""

from __future__ import annotations

import logging

from prefix_index import printable

LOGGERS = ("sglang_ext", "prefix_index", "prefix_kernels")
MAX_CHARS = 16384
"""Of a message; what a request is called may be longer."""
_FORMAT = logging.Formatter()


class _Printable(logging.Handler):
    """Stands on our loggers, below whatever writes. It comes first, and changes the record that the others write."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # it does not fit its arguments, which ends nothing
            message = f"{record.msg} {record.args}"
        record.msg, record.args = _cut(printable(message)), None
        if record.exc_info and not record.exc_text:
            lines = _FORMAT.formatException(record.exc_info).splitlines()
            record.exc_text = "\n".join(f"  | {printable(line)}" for line in lines)
        last = None if logging.getLogger().handlers else logging.lastResort
        if last is not None and record.levelno >= last.level:
            last.handle(record)  # which logging leaves out where any handler stands


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"


def install() -> None:
    """Once in a process; nothing the second time."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Printable) for handler in logger.handlers):
            logger.addHandler(_Printable())

"""Log lines are made and written off the hot path: records wait for a moment, then one write takes all of them.

What warns leaves at once, and so does everything when the process ends; one that is killed takes a moment's lines with it.
"""

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, TextIO

from gateway.config.gateway import GatewayConfig

FORM: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
INTERVAL_S: Final = 0.1
MAX_WAITING: Final = 1000


class Formatter(logging.Formatter):
    """Formats a second's time once."""

    def __init__(self) -> None:
        super().__init__(FORM)
        self._second = 0
        self._text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text},{int(record.msecs):03d}"


class JsonFormatter(logging.Formatter):
    """Each record as one JSON object, for collectors of logs: nothing in a line has to be guessed."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


FORMS: Final[dict[str, Callable[[], logging.Formatter]]] = {"text": Formatter, "json": JsonFormatter}


class LogLevel:
    """The level of the process's log, as a part that can be reconfigured."""

    def configure(self, config: GatewayConfig) -> None:
        logging.getLogger().setLevel(config.log_level.upper())


class LineWriter(logging.Handler):
    """Writes lines to `stream`, some at a time, by a thread of its own."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter | None = None) -> None:
        super().__init__()
        self.setFormatter(formatter or Formatter())
        self._stream = stream
        self._waiting: deque[logging.LogRecord] = deque()
        self._some_wait = threading.Event()
        self._writing = threading.RLock()  # its holder may log itself: what is formatted may, or a finaliser
        self._is_writing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        """Without the handler's own lock: a thread that logs while it writes would take the two in the other order."""
        passes = bool(self.filter(record))
        if passes:
            self.emit(record)
        return passes

    def emit(self, record: logging.LogRecord) -> None:
        self._waiting.append(record)
        if record.levelno >= logging.WARNING or len(self._waiting) >= MAX_WAITING:
            self.flush()
        elif not self._some_wait.is_set():
            self._some_wait.set()

    def flush(self) -> None:
        """Writes what waits."""
        with self._writing:
            if self._is_writing:  # a line that came of writing others: it is among the next ones
                return
            self._is_writing = True
            try:
                self._some_wait.clear()
                while self._waiting:
                    self._write(self._texts())
            finally:
                self._is_writing = False

    def _texts(self) -> str:
        return "".join(self._text(self._waiting.popleft()) for _ in range(len(self._waiting)))

    def _text(self, record: logging.LogRecord) -> str:
        try:
            return f"{self.format(record)}\n"
        except Exception:  # its arguments do not fit: only this line is lost
            self.handleError(record)
            return ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # a log that cannot be written ends nothing

    def close(self) -> None:
        self._closing.set()
        self._some_wait.set()
        self._thread.join(1.0)  # no longer than that for a log
        self.flush()
        super().close()

    def _write_until_closed(self) -> None:
        while not self._closing.is_set():
            self._some_wait.wait()
            self._closing.wait(INTERVAL_S)
            self.flush()


def set_up(level: str, form: str = "text") -> None:
    """Lines of this level and above go to stderr, as one of FORMS."""
    # What FORM does not name need not be found out for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level, handlers=[LineWriter(sys.stderr, FORMS[form]())])

"""Progress of a command: a bar on a terminal, lines in a log file.

A job under nohup or SLURM writes to a file, where a bar would be only control characters. There, a line is printed at
the start, at the end and every 30 seconds, even if one step takes longer than that.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_memmix import launch
from hf_memmix.commands.common import err

SECONDS_BETWEEN_LINES = 30

Advance = Callable[..., None]


def tell(line: str) -> None:
    """Print a line on stderr about what begins now. In a launch of several processes, only the first one prints it."""
    if launch.is_first():
        err.print(line, markup=False, highlight=False, soft_wrap=True)


def tell_reading(texts: list) -> None:
    """Tell that texts are read and tokenised, which takes minutes for a gigabyte."""
    tell(f"reading and tokenising {texts[0]}{f' and {len(texts) - 1} more' if len(texts) > 1 else ''}")


def tell_date(tokenizer) -> None:
    """Tell the date that the chat template writes into training data, if it writes one."""
    from hf_memmix.training.chat_rows import training_date

    if date := training_date(tokenizer):
        tell(f"the chat template writes the date, which in training data is always {date}")


def rate_text(tokens: float, seconds: float) -> str:
    """Tokens per second with the digits that are known; "" before there are any."""
    if not tokens or seconds <= 0:
        return ""
    rate = tokens / seconds
    return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Show the progress on stderr; yields `advance(done, total, note="")`.

    If a launch has several processes, only the first one shows it.
    """
    if not launch.is_first():
        yield lambda done, total, note="": None
    elif err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=err) as shown:
            task = shown.add_task(title, total=None, note="")
            yield lambda done, total, note="": shown.update(task, completed=done, total=total, note=note)
    else:
        lines = Lines(title, lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True))
        try:
            yield lines.advance
        finally:
            lines.close()


class Lines:
    """Prints `TITLE DONE of TOTAL, NOTE, H:MM:SS left`: the first and the last state, and one every `seconds`.

    Args:
        title: the beginning of every line.
        show: called with each line.
        seconds: time between two lines.
    """

    def __init__(self, title: str, show: Callable[[str], None], seconds: float = SECONDS_BETWEEN_LINES):
        self.title, self.show, self.seconds = title, show, seconds
        self._newest = self._shown = self._first = self._since = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def advance(self, done: int, total: int, note: str = "") -> None:
        """Record the newest state. This call prints only the first one."""
        with self._lock:
            if self._newest is None or done != self._newest[0]:
                self._since = time.monotonic()
            self._newest = (done, total, note)
            if self._first is None:
                self._first = (done, self._since)
                self._print()
                self._thread.start()

    def close(self) -> None:
        """Print the last state, if it has not been printed."""
        self._closed.set()
        with self._lock:
            if self._newest is not None and self._newest != self._shown:
                self._print()

    def _tick(self) -> None:
        while not self._closed.wait(self.seconds):
            with self._lock:
                self._print()

    def _print(self) -> None:
        done, total, note = self._shown = self._newest
        parts = [f"{self.title} {done} of {total}", note, self._left(done, total)]
        self.show(", ".join(part for part in parts if part))

    def _left(self, done: int, total: int) -> str:
        """The estimate at the end of the newest step, less the time since then, but for the rest of this step."""
        first, start = self._first
        if not first < done < total:
            return ""
        each = (self._since - start) / (done - first)
        seconds = each * (total - done) - min(time.monotonic() - self._since, each)
        return f"{timedelta(seconds=round(seconds))} left"

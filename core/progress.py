"""Progress for a person: a bar with ETA on a terminal, plain lines elsewhere. Always on stderr."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")

_PLAIN_INTERVAL_S = 10.0


class Reporter:
    """Where a stage says what it does. One object, handed down; it holds no result."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._quiet = quiet

    def say(self, text: str) -> None:
        """One line of plain text; markup in it is not interpreted."""
        if not self._quiet:
            self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", markup=False, emoji=False, soft_wrap=True)

    def track(self, items: Iterable[Item], *, total: int, label: str) -> Iterator[Item]:
        """Yield the items, showing how many are done and when the rest will be."""
        if self._quiet:
            yield from items
        elif self.console.is_terminal:
            yield from self._track_bar(items, total, label)
        else:
            yield from self._track_lines(items, total, label)

    def _track_bar(self, items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            for item in items:
                yield item
                bar.advance(task)

    def _track_lines(self, items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
        start = last = time.monotonic()
        for num_done, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - last >= _PLAIN_INTERVAL_S or num_done == total:
                last = now
                left = (now - start) / num_done * (total - num_done)
                self.say(f"{label}: {num_done}/{total}, {now - start:.0f} s so far, about {left:.0f} s left")

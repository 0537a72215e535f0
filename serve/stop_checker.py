"""Stop strings in a text that comes in pieces. Nothing is held back that cannot become a stop string."""

from collections.abc import Sequence


class StopChecker:
    """Passes text on up to the first stop string.

    The stop that is complete first wins (of those, the one that began first), so the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """Text that may be shown now."""
        if self.is_stopped or not text:
            return ""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown
        num_shown = len(self._held) - self._longest_tail()
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def flush(self) -> str:
        """The held tail, when the text ended without a stop."""
        tail, self._held = self._held, ""
        return tail

    def _longest_tail(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

"""Limits on how often something happens: lines of a log, and whatever takes tokens. `now` is passed in."""

import logging

# How many lines about one subject a log may have in so many seconds.
_LINES, _LINE_SECONDS = 10, 60.0


class LogLimit:
    """Logs about one subject with a limit, because a peer must not be able to fill the log.

    After 10 lines within a minute, the others are counted, and the first line of the next minute tells their number.
    """

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log, self._level = log, level
        self._began, self._lines, self.omitted = -_LINE_SECONDS, 0, 0

    def say(self, now: float, text: str, *arguments: object) -> None:
        """Log a line, or count it if there were too many."""
        if now - self._began >= _LINE_SECONDS:
            if self.omitted:
                self._log.log(self._level, "%d more lines like the next one were left out", self.omitted)
            self._began, self._lines, self.omitted = now, 0, 0
        self._lines += 1
        if self._lines > _LINES:
            self.omitted += 1
        else:
            self._log.log(self._level, text, *arguments)


class TokenBucket:
    """A token bucket: `rate` tokens (mostly bytes) a second, of which up to `depth` may be saved."""

    def __init__(self, rate: float, depth: float, now: float) -> None:
        self.rate, self.depth = rate, depth
        self.left, self._filled = depth, now  # what was left at that time; negative if too much was taken

    def tokens(self, now: float) -> float:
        """Return the tokens that may be taken from `left` now; negative if too many were."""
        self.left = min(self.depth, self.left + (now - self._filled) * self.rate)
        self._filled = now
        return self.left

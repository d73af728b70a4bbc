"""Trial: whether datagrams are lost because there are too many of them: with half as many, fewer are lost.

A queue that was there from the beginning shows as no delay. A link's own loss stays when its sender slows down; that of
a full queue does not. So a sender that fills its window and loses datagrams tries it, from time to time.
"""

# Smoothed loss from which on it is tried, and by how much it must have grown since it was found to be the link's own.
_WORTH, _GROWN = 0.02, 1.5
# What is left of the window meanwhile; the share of the loss that remains at most if there were too many.
_HALF, _FEWER = 0.5, 0.6
# How long a trial takes: round trips, and datagrams. How long a verdict holds: seconds.
_TRIPS, _ENOUGH, _HOLDS = 4.0, 128, 10.0


class Trial:
    """One sender's."""

    def __init__(self) -> None:
        self.running = False
        self._loss = self._excused = 0.0
        self._until = self._began = 0.0
        self._before = (0.0, 0.0)  # loss and window
        self._sent = self._lost = 0

    def due(self, sent: int, lost: int, now: float) -> bool:
        """Take a report in while no trial runs; whether it is time for one."""
        self._loss += (lost / max(sent, 1) - self._loss) / 4
        known = now < self._until and self._loss < _GROWN * self._excused + _WORTH
        return self._loss > _WORTH and not known

    def begin(self, window: float, now: float) -> float:
        """Begin; returns the window meanwhile."""
        self.running, self._began, self._before = True, now, (self._loss, window)
        self._sent = self._lost = 0
        return window * _HALF

    def learn(self, sent: int, lost: int, trip: float, now: float) -> float | None:
        """Take a report in while it runs; the window afterwards (the old one if nothing changed), or None to go on."""
        if now - self._began < 1.5 * trip:  # on what had left before
            return None
        self._sent, self._lost = self._sent + sent, self._lost + lost
        if now - self._began < _TRIPS * trip or self._sent < _ENOUGH:
            return None
        self.running = False
        before, window = self._before
        self._loss = after = self._lost / self._sent
        if after < _FEWER * before:
            return window * _HALF
        self._excused, self._until = max(after, before), now + _HOLDS
        return window

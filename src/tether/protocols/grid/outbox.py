"""Where the parts of a node put the effects they want, in the order in which they decide on them."""

from __future__ import annotations

from tether.core.effects import Effect, Send
from tether.core.message import Message


class Outbox:
    """The effects of the event that is being handled."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def add(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def send(self, to: str, message: Message) -> None:
        self._effects.append(Send(to, message))

    def drain(self) -> list[Effect]:
        """All effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

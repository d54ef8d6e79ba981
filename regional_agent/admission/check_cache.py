"""What was asked before, by what it came as: under the same policies the same question takes the same again.

Services ask the same few questions all day. To read one, and to find what it meets, costs more than to decide it.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from regional_agent.admission.engine import Admits, Asked
from regional_agent.admission.policies import Policies
from regional_agent.admission.rules.generational_cache import Remembered

MOST_QUESTIONS = 4_096

K = TypeVar("K", bound=Hashable)


class AskedBefore(Generic[K]):
    def __init__(self, admission: Admits) -> None:
        self._admission = admission
        self._asked: Remembered[K, Asked] = Remembered(MOST_QUESTIONS)
        self._under: Policies | None = None

    def find(self, question: K) -> Asked | None:
        if self._under is not self._admission.policies:
            self._under = self._admission.policies
            self._asked.clear()
        return self._asked.get(question)

    def keep(self, question: K, asked: Asked) -> None:
        """After it was not found. What is the caller's own (a block, an operation) does not come again."""
        if asked.lasts:
            self._asked.put(question, asked)

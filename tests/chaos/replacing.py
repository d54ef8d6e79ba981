"""Replace services of a stack by those of another release, as an operator would."""

import signal
from collections.abc import Mapping
from pathlib import Path

from leasehold.local_stack.calls import is_ready
from leasehold.local_stack.processes import stop
from tests.chaos.pieces import AGENTS, Piece, Stack

STOP_S = 60.0
LAME_DUCK_MS = "2000"  # a load balancer has noticed by then that the agent leaves


class ReplaceableStack(Stack):
    """Has two addresses of coordinators. One coordinator runs, or two while it is replaced.

    The lists of `agents_of` are what a load balancer of each region sends requests to.
    """

    def __init__(self, directory: Path, agent_environ: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, agent_environ)
        first = self.coordinator
        self.pieces["coordinator"].is_ready = lambda: is_ready(first)
        second, self.spare = self.another_coordinator("coordinator-2")
        del self.pieces[self.spare.name]
        self.coordinators = {"coordinator": first, self.spare.name: second}

    @property
    def url_of_spare(self) -> str:
        """Return the address at which the next coordinator starts."""
        return self.coordinators[self.spare.name]

    def replace_agent(self, name: str, python: Path) -> None:
        """Take an agent out of rotation, stop it, and put one of another release in its place."""
        rotation = self.agents_of[AGENTS[name]]
        rotation.remove(self.agents[name])
        stop_gracefully(self.pieces[name])
        self.pythons[name] = python
        self.pieces[name].begin()
        self.pieces[name].wait()
        rotation.append(self.agents[name])

    def start_coordinator(self, python: Path) -> Piece:
        """Start a coordinator of a release at the other address, beside the one that runs."""
        self.pythons[self.spare.name] = python
        self.spare.begin()
        return self.spare

    def keep_new_coordinator(self) -> None:
        """Stop the coordinator that was there before, once the new one is ready."""
        self.spare.wait()
        [before] = self.coordinators.keys() & self.pieces.keys()
        self.pieces[self.spare.name] = new = self.spare
        self.spare = self.pieces.pop(before)
        self.coordinator = self.coordinators[new.name]
        stop_gracefully(self.spare)

    def end(self) -> None:
        if self.spare.process is not None:
            stop(self.spare.process)
        super().end()


def stop_gracefully(piece: Piece) -> None:
    assert piece.process is not None
    assert stop(piece.process, by=signal.SIGTERM, timeout_s=STOP_S), f"{piece.name} did not end by itself"

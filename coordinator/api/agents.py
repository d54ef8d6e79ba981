"""For agents: epochs, exchanges, signals and policies."""

from fastapi import APIRouter

router = APIRouter(tags=["agents"])

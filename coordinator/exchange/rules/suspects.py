"""Remember which lanes failed by themselves lately. Pure: moments are arguments."""

from collections.abc import Collection

SUSPECTED_FOR_S = 30.0
MOST_LANES = 8  # of one region; with more, all of its lanes are suspects
MOST_REGIONS = 1_000

LaneName = tuple[int, int]  # epoch and lane


class Suspects:
    """Suspected lanes by region, so that no region makes a suspect of another region's lane."""

    def __init__(self) -> None:
        self._until_s: dict[str, dict[LaneName, float]] = {}

    def add(self, region: str, lanes: Collection[LaneName], now_s: float) -> None:
        if region not in self._until_s and len(self._until_s) >= MOST_REGIONS:
            self._forget(now_s)
        of_region = self._current(region, now_s)
        of_region |= dict.fromkeys(lanes, now_s + SUSPECTED_FOR_S)
        while len(of_region) > MOST_LANES + 1:
            del of_region[next(iter(of_region))]
        self._until_s[region] = of_region

    def includes(self, region: str, lanes: Collection[LaneName], now_s: float) -> bool:
        if region not in self._until_s:
            return False
        of_region = self._until_s[region] = self._current(region, now_s)
        return len(of_region) > MOST_LANES or not of_region.keys().isdisjoint(lanes)

    def clear(self, region: str, lanes: Collection[LaneName]) -> None:
        """Forget lanes that had no trouble since."""
        for lane in lanes:
            self._until_s.get(region, {}).pop(lane, None)

    def _current(self, region: str, now_s: float) -> dict[LaneName, float]:
        return {lane: until for lane, until in self._until_s.get(region, {}).items() if now_s < until}

    def _forget(self, now_s: float) -> None:
        self._until_s = {region: left for region in self._until_s if (left := self._current(region, now_s))}

"""Small disks that a test can fill."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

MIB = 1 << 20


class SmallDisk:
    """A file system of a few MiB in memory, which takes root to mount."""

    def __init__(self, directory: Path, mib: int) -> None:
        self.directory = directory
        directory.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "tmpfs", directory], check=True)

    @property
    def _filler(self) -> Path:
        return self.directory / "filler"

    def fill(self) -> None:
        """Leave no byte free."""
        with self._filler.open("ab", buffering=0) as filler, suppress(OSError):  # no space left
            while True:
                filler.write(bytes(MIB // 64))
        assert shutil.disk_usage(self.directory).free == 0

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.directory], check=True)

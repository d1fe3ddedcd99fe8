"""Runs whose disk fills or becomes read-only, and runs whose clock jumps."""

from __future__ import annotations

import mmap
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reliability.campaign.faults import Kind, kill
from reliability.campaign.runs import Run

# --- disks ---

DISK_BYTES = 16 << 20
WARNS = "training continues"
"""Message of a run that goes on without a checkpoint."""


class DiskRun(Run):
    """`oases train` with its checkpoints on a small disk of its own, in a mount namespace that a process holds."""

    def prepare(self) -> None:
        """See `Run`."""
        self.disk = self.place / "disk"
        self.disk.mkdir()
        self.folder = self.disk / "run"
        mount = f'mount -t tmpfs -o size={DISK_BYTES} none "$0" && echo mounted && exec sleep infinity'
        self.holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", mount, str(self.disk)], stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "mounted\n":
            raise RuntimeError("a disk of its own was refused")
        self.checkpoints = Path(f"/proc/{self.holder.pid}/root{self.folder}")

    def inside(self) -> list[str]:
        """Command that enters the namespace."""
        return ["nsenter", "-t", str(self.holder.pid), "-U", "-m", "--preserve-credentials", f"--wdns={self.place}"]

    def command(self) -> list[str]:
        """See `Run`."""
        return [*self.inside(), *super().command()]

    def shell(self, text: str) -> None:
        """Run shell commands in the namespace; the disk is $0."""
        subprocess.run([*self.inside(), "sh", "-c", text, str(self.disk)], check=True, capture_output=True)

    def end(self) -> None:
        """See `Run`."""
        super().end()
        self.holder.kill()
        self.holder.wait()


def why_no_disk() -> str | None:
    """Reason why a disk of its own is impossible here; None if it is not."""
    tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    return f"mount namespaces are off ({tried.stderr.strip()})" if tried.returncode else None


@contextmanager
def _full(run: DiskRun) -> Iterator[None]:
    """Fill the disk, to the last byte."""
    file = run.checkpoints.parent / "filler"
    with suppress(OSError), file.open("wb", buffering=0) as filler:  # it ends with the disk
        while True:
            filler.write(bytes(4096))
    try:
        yield
    finally:
        file.unlink()


@contextmanager
def _read_only(run: DiskRun) -> Iterator[None]:
    """Make the disk read-only for all that is opened from now on."""
    remount = 'mount -o remount,bind,ro "$0"'  # refused while a file that was opened meanwhile is written
    run.shell(f'mount --bind "$0" "$0" && for each in $(seq 200); do {remount} && exit; sleep 0.01; done; exit 1')
    try:
        yield
    finally:
        run.shell('umount -l "$0"')


def go_on_without(run: DiskRun, generator: random.Random) -> None:
    """Wait until the run has gone on without a checkpoint. RuntimeError if one was lost meanwhile."""
    before, newest, steps = run.said().count(WARNS), run.newest(), run.steps()
    told = run.wait_for(lambda: run.said().count(WARNS) > before, "a warning of the disk")
    if told and run.wait_for(lambda: run.steps() > steps, "a step") and run.newest() < newest:
        raise RuntimeError(f"checkpoint {newest} was lost while the disk could not be written")


def go_on_and_kill(run: DiskRun, generator: random.Random) -> None:
    """Kill a rank after the run has gone on without a checkpoint."""
    go_on_without(run, generator)
    kill(run, generator)


# --- clocks ---

_SHIM = Path(__file__).with_name("clock.c")


class ClockRun(Run):
    """`oases train` with a clock that a file shifts, by seconds in eight bytes."""

    def prepare(self) -> None:
        """See `Run`."""
        self.shift, self.shim = self.place / "shift", self.place / "clock.so"
        self.shift.write_bytes(struct.pack("q", 0))
        build = ["cc", "-O1", "-shared", "-fPIC", "-o", str(self.shim), str(_SHIM)]
        subprocess.run(build, check=True, capture_output=True)

    def environment(self) -> dict[str, str]:
        """See `Run`."""
        return super().environment() | {"LD_PRELOAD": str(self.shim), "OASES_CLOCK_SHIFT": str(self.shift)}


def why_no_clock() -> str | None:
    """Reason why a clock cannot be shifted here; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"clocks are shifted by LD_PRELOAD, and this is {sys.platform}"
    return None if shutil.which("cc") else "'cc' is missing; install a C compiler"


def jump(run: ClockRun, generator: random.Random) -> None:
    """Shift the clock by hours, forwards or backwards."""
    seconds = generator.choice((-1, 1)) * generator.randrange(3600, 24 * 3600)
    with run.shift.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shift:
        shift[:] = struct.pack("q", seconds)


def jump_and_kill(run: ClockRun, generator: random.Random) -> None:
    """Shift the clock and kill a rank."""
    jump(run, generator)
    kill(run, generator)


FAULTS = {
    "full disk": Kind(go_on_without, False, during=_full),
    "full disk, kill": Kind(go_on_and_kill, True, during=_full),
    "read-only disk": Kind(go_on_without, False, starting=False, during=_read_only),
    "clock jump": Kind(jump, False),
    "clock jump, kill": Kind(jump_and_kill, True),
}

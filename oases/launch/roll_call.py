"""Roll call: a rank whose collective failed or timed out asks what the others do, and names those that are missing.

Live ranks answer with what they wait for, even while their main thread is blocked in a collective; those that do not
answer are gone. An idle thread polls the store once per interval. A rank that has answered and still waits some
seconds later ends, too: where a link was lost, nothing else may tell it that its peer is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

_INTERVAL_SECONDS = 0.5
_FAREWELL_SECONDS = 8.0
"""Time that a rank has to fail by itself after another made a roll call; more than that one takes to end."""
_MOST_CONNECTIONS = 3
"""Connections to the store that a thread tries: a link that was lost for some seconds breaks one."""


class RollCall:
    """Thread that answers roll calls for `rank` of `size` until stopped, over a connection of its own.

    waiting_for: returns the op that the rank's main thread waits for, "" while it computes.
    """

    def __init__(self, rank: int, size: int, waiting_for: Callable[[], str]) -> None:
        self.rank = rank
        self.size = size
        self._waiting_for = waiting_for
        # A launcher may start the ranks again over the same store.
        self._call = f"oases/roll-call/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._stop = threading.Event()
        self._calls = False
        """Whether this rank made a roll call, and so is ending."""
        self._thread = threading.Thread(target=self._answer, name="oases-roll-call", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def call(self, patience_seconds: float = 3.0) -> dict[int, str | None]:
        """Make a roll call; return the op every other rank waits for ("": it computes), None for ranks that are gone.

        Empty if the store is gone, too.
        """
        self._calls = True
        answers: dict[int, str | None] = {rank: None for rank in range(self.size) if rank != self.rank}
        try:
            store = _connect()
            store.set(self._call, str(self.rank))
            end = time.monotonic() + patience_seconds
            while None in answers.values() and time.monotonic() < end:
                time.sleep(0.05)
                for rank, answer in answers.items():
                    if answer is None and store.check([f"{self._call}/{rank}"]):
                        answers[rank] = store.get(f"{self._call}/{rank}").decode().removeprefix("here ")
        except (RuntimeError, OSError):  # the store went down with the rank that held it
            return {}
        return answers

    def _answer(self) -> None:
        for _ in range(_MOST_CONNECTIONS):
            try:
                store = _connect()
                while not self._stop.wait(_INTERVAL_SECONDS):
                    if store.check([self._call]):
                        # "here": the store would wait forever for an empty value.
                        store.set(f"{self._call}/{self.rank}", f"here {self._waiting_for()}")
                        return self._farewell(store.get(self._call).decode())
                return None
            except (RuntimeError, OSError):
                continue  # a lost link, or the launcher, which holds the store, is gone
        return None

    def _farewell(self, caller: str) -> None:
        """End this process unless it ends by itself in time."""
        if self._stop.wait(_FAREWELL_SECONDS) or self._calls:
            return
        waiting = self._waiting_for()
        doing = f" while it waited for {waiting}" if waiting else ""
        print(f"oases: rank {self.rank}: rank {caller} has left{doing}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def _connect() -> TCPStore:
    # The default group's client would do, were it not locked while another thread uses it.
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=5),
    )  # fmt: skip

"""Scripts run as under torchrun, by processes that have imported torch already and run one script after the other."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oases.launch import fork_server


class ScriptRanks:
    """`size` processes with torchrun's environment variables; each script makes its own process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, script: Path, arguments: Sequence[Any] = (), *, folder: Path, seconds: float = 150) -> str:
        """Run the script in `folder` on all ranks; return what rank 0 printed. AssertionError with its traceback."""
        if not self._ranks:
            self._start()
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        for _, connection in self._ranks:
            connection.send((port, str(script), [str(each) for each in arguments], str(folder)))
        printed: dict[int, str] = {}
        errors: list[str] = []
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and not errors:  # where one rank fails the others may wait for it
            ready = wait(waiting, seconds)
            if not ready:
                errors.append(f"ranks {sorted(waiting.values())} have not ended after {seconds:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                printed[rank], error = connection.recv()
                errors += [f"rank {rank}:\n{error}"] if error else []
        if errors:
            self.close()  # their process groups may be unusable: the next script gets fresh ranks
            raise AssertionError("\n".join(errors))
        return printed[0]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def _start(self) -> None:
        context = fork_server.context()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(rank: int, size: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        port, script, arguments, folder = connection.recv()
        os.environ |= {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(rank),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        }  # fmt: skip
        os.chdir(folder)
        sys.argv = [script, *arguments]
        error = ""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                runpy.run_path(script, run_name="__main__")
                if dist.is_initialized():
                    dist.destroy_process_group()
            except BaseException:
                error = traceback.format_exc()
        connection.send((printed.getvalue(), error))

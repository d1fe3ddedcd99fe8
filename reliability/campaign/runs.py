"""Programs that train, which the campaign starts, watches, and starts again after they have ended early."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from kills import children_of, lines_of, losses_of, words_of
from marked_processes import with_mark

from oases.checkpoint import retention
from oases.checkpoint.files import export
from oases.errors import SAVED_EXIT_CODE

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
SAVE_EVERY = 2
GIVE_UP_SECONDS = 180.0
END_SECONDS = 10.0
"""Time that processes have to end after the run."""
MOST_STARTS = 40
GPT = ["--hidden", "32", "--layers", "4", "--heads", "4"]
SIZES = (
    "--sequence 32 --batch 8 --warmup 2 --validation-batches 1 "
    f"--steps {STEPS} --checkpoint-every {SAVE_EVERY} --keep 2 --max-restarts 100 --resume auto"
).split()


class Run:
    """`oases train` in a process of its own, started again, as a scheduler would, when it has ended early.

    options: the ranks' degrees. place: a new folder. folder: that of checkpoints, as the run names it;
    checkpoints: as this process does. temporary: folder of temporary files.
    """

    ended_early: ClassVar[tuple[int, ...]] = (SAVED_EXIT_CODE, 130, -signal.SIGKILL, -signal.SIGTERM)
    """Exit codes after which the program is started again."""
    caches: ClassVar[tuple[str, ...]] = ("torchinductor_",)
    """Beginnings of the names of temporary folders that torch leaves by design."""

    def __init__(self, options: str, corpus: Path, place: Path) -> None:
        self.options, self.corpus, self.place = options, corpus, place
        self.log = place / "steps.jsonl"
        self.folder = self.checkpoints = place / "run"
        self.temporary = place / "tmp"
        self.temporary.mkdir(parents=True)
        self.mark = f"OASES_CAMPAIGN={place.name}-{os.getpid()}-{time.monotonic_ns()}"
        self.starts = 0
        self.exact_steps = STEPS
        """Steps whose losses equal the undisturbed run's to the bit."""
        self.prepare()
        self.start()

    def prepare(self) -> None:
        """Prepare what surrounds the run."""

    def command(self) -> list[str]:
        """Command line of the next start."""
        files = ["--data", self.corpus, "--checkpoint", self.folder, "--step-log", self.log]
        options = [*self.model(), *SIZES, *self.options.split()]
        return [sys.executable, "-m", "oases", "train", *options, *map(str, files)]

    def model(self) -> list[str]:
        """Options of the model: the built-in GPT."""
        return GPT

    def environment(self) -> dict[str, str]:
        """Environment of the program."""
        name, _, value = self.mark.partition("=")
        paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        own = {name: value, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        return os.environ | own

    def start(self) -> None:
        """Start the launcher; its output goes to a file."""
        self.starts += 1
        if self.starts > MOST_STARTS:
            raise RuntimeError(f"the launcher was started {MOST_STARTS} times")
        with (self.place / "output").open("a") as output:
            self.process = subprocess.Popen(
                self.command(), env=self.environment(), stdout=output, stderr=output, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """Processes of the ranks, in rank order."""
        servers = [child for child in children_of(self.process.pid) if "forkserver" in words_of(child)]
        return sorted(rank for server in servers for rank in children_of(server))

    def kill_job(self) -> None:
        """Kill the launcher; its ranks end with it."""
        send(self.process.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        """Wait for the launcher's end; TimeoutError if it does not come."""
        try:
            self.process.wait(GIVE_UP_SECONDS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the launcher did not end within {GIVE_UP_SECONDS:.0f} s") from None

    def steps(self) -> int:
        """Steps in the log."""
        return len(lines_of(self.log))

    def said(self) -> str:
        """Output so far."""
        return (self.place / "output").read_text(errors="replace")

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob(".step-*.part"))

    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return max((retention.step_of(path) for path in retention.checkpoints(self.checkpoints)), default=0)

    def keep_alive(self) -> bool:
        """Start the launcher again where it has ended early; False once the run is done."""
        code = self.process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        if code not in self.ended_early:
            raise RuntimeError(f"the launcher ended with exit code {code}")
        self.start()
        return True

    def wait_for(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait for a condition; False where the run ends before. Raises TimeoutError."""
        end = time.monotonic() + GIVE_UP_SECONDS
        while not condition():
            if not self.keep_alive():
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come within {GIVE_UP_SECONDS:.0f} s")
            time.sleep(0.002)
        return True

    def result(self) -> tuple[list[tuple[int, float]], str]:
        """(losses by step, SHA-256 of the weights) of a run that has ended."""
        return losses_of(self.log), hashlib.sha256(self.weights().read_bytes()).hexdigest()

    def weights(self) -> Path:
        """Write the weights of the newest checkpoint to a file, and return its path."""
        copy, file = self.place / "copy", self.place / "model.safetensors"
        if not file.is_file():
            shutil.copytree(self.checkpoints, copy)  # a path through /proc cannot be resolved
            export(copy, file)
        return file

    def left(self) -> list[str]:
        """Processes and files that the run has left behind."""
        end = time.monotonic() + END_SECONDS
        while (found := with_mark(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        found += [path.name for path in self.checkpoints.glob(".*")]
        return found + [name for name in os.listdir(self.temporary) if not name.startswith(self.caches)]

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            self.kill_job()


class ModelRun(Run):
    """A run of a transformers model, a small Llama."""

    LLAMA: ClassVar = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "attention_dropout": 0.1,
    }  # fmt: skip

    def prepare(self) -> None:
        """Write the model's configuration."""
        (self.place / "config.json").write_text(json.dumps(self.LLAMA))

    def model(self) -> list[str]:
        """Options of the model: its configuration."""
        return ["--model", str(self.place / "config.json")]


class ReshardedRun(Run):
    """`oases train`, each start of which may have other degrees."""

    degrees: ClassVar[tuple[str, ...]] = (
        "--tp 2",
        "--pp 2 --tp 1 --micro-batches 2",
        "--dp 2 --tp 1",
        "--tp 1 --micro-batches 2",
        "--dp 2 --tp 1 --fsdp",
    )
    """Those that a start may have, beside the first one's."""
    equal: ClassVar[tuple[str, ...]] = ("--dp 2 --tp 1 --zero", "--dp 2 --tp 1")
    """Degrees of the first start and others with the same sums, whose losses are equal to the bit."""

    def command(self) -> list[str]:
        """See `Run`."""
        if self.options not in self.equal:
            self.exact_steps = min(self.exact_steps, self.newest())
        return super().command()


class TorchrunRun(Run):
    """A user's own training loop, `user_loop.py`, under torchrun. options: how it saves, see there."""

    ended_early = (1, -signal.SIGKILL, -signal.SIGTERM)
    caches = ("torchinductor_", "torchelastic_")

    def command(self) -> list[str]:
        """See `Run`."""
        script = Path(__file__).with_name("user_loop.py")
        torchrun = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 100 --monitor-interval 0.1"
        arguments = [str(script), str(self.place), str(STEPS), str(SAVE_EVERY), self.options]
        return [sys.executable, "-m", *torchrun.split(), *arguments]

    def environment(self) -> dict[str, str]:
        """See `Run`. In the agent's store, which outlives a restart, ranks find addresses of those before."""
        return super().environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def ranks(self) -> list[int]:
        """See `Run`."""
        return sorted(child for child in children_of(self.process.pid) if "user_loop.py" in words_of(child))

    def kill_job(self) -> None:
        """Kill the launcher and, as the end of a scheduler's job does, its ranks, which torchrun would leave."""
        for process in [self.process.pid, *self.ranks()]:
            send(process, signal.SIGKILL)
        self.join()

    def weights(self) -> Path:
        """See `Run`; the script writes them at its end."""
        return self.place / "weights.safetensors"


def send(process: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return  # it has ended meanwhile, which the run shows

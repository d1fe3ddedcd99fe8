"""What a profile is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass

from oases.bench.config import DTYPES
from oases.errors import UsageError
from oases.train.config import ModelOptions, option, require_device, require_memory, require_seed


@dataclass(frozen=True)
class ProfileConfig(ModelOptions):
    """Block shapes and sizes of sub-batches. `layers` are those of the stack that is measured, not of a model."""

    hidden: int = option(768, "width of the model, features")
    layers: int = option(3, "transformer layers of the stack that is measured; 3 show the middle one")
    sequence: int = option(256, "tokens per sample")
    batch: int = option(8, "largest sub-batch to measure, samples; 1, 2, 4, ... up to it are measured")
    degrees: str = option("", "tensor-parallel degrees of the blocks, joined by commas, e.g. 1,2,4; default: --tp")
    iterations: int = option(5, "repetitions; medians are reported")
    seed: int = option(0, "seed of weights and inputs")
    device: str = option("cpu", "cpu or cuda")
    dtype: str = option("float32", "type of weights and activations: float32, bfloat16 or float16")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1:
            raise UsageError(f"iterations must be at least 1, got {self.iterations}")
        require_seed(self.seed)
        require_device(self.device)
        if self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")

    def tensor_parallel(self, ranks: int) -> tuple[int, ...]:
        """The degrees asked for, in order. UsageError for one that `ranks` ranks cannot form groups of."""
        if not self.degrees.strip():
            return (ranks,)
        found = set()
        for text in self.degrees.split(","):
            if not text.strip().isdecimal() or not 1 <= int(text) <= 1 << 20:
                raise UsageError(f"--degrees {self.degrees!r}: {text!r} is no degree; give numbers, such as 1,2,4")
            degree = int(text)
            if ranks % degree:
                raise UsageError(
                    f"--degrees {self.degrees!r}: {ranks} ranks do not form groups of {degree}; give degrees that "
                    f"divide --tp {ranks}, or raise it with --backend sim:alpha=0us,bandwidth=1gbit,alone, where one "
                    "process stands for all ranks"
                )
            found.add(degree)
        return tuple(sorted(found))

    @property
    def sub_batch_sizes(self) -> tuple[int, ...]:
        """Samples of the sub-batches that are measured."""
        return tuple(sorted({1 << power for power in range(self.batch.bit_length())} | {self.batch}))

    def check(self, ranks: int) -> None:
        """Everything that can be known before any rank starts."""
        if ranks < 2:
            raise UsageError(
                f"--tp {ranks} has no link to measure; give at least 2, with --degrees 1 for blocks that nobody cuts"
            )
        for degree in self.tensor_parallel(ranks):
            self.require_degree(degree)
        if self.device == "cpu":
            require_memory(self, ranks)

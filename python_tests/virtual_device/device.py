"""The virtual device (cpp_tests/virtual_device) in Python: built, loaded, and made the device of a rank.

An accelerator for tests, on the CPU: its streams are threads, its memory is poisoned when it is freed, and its
backend waits as NCCL does. What is right only because the host waits for the device, or a stream for another, is
found on any machine.

With OASES_TEST_DEVICE=cuda ranks have GPUs instead, which they may share, and tests that ask the virtual device for
what no GPU tells are left out: `make test-gpu`.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from build_tools import objects
from build_tools.objects import Unit
from oases.launch.ranks import _CUDA

NAME = "virtual"
FOLDER = objects.BUILD / "virtual_device"
LIBRARY = FOLDER / "virtual_device.so"
TIMEOUT = timedelta(seconds=60)
ON_GPUS = os.environ.get("OASES_TEST_DEVICE") == "cuda"
if ON_GPUS:  # as in ranks that oases starts
    os.environ |= _CUDA | os.environ
virtual_only = pytest.mark.skipif(ON_GPUS, reason="asks for counts, costs, faults or numbers of the virtual device")


def build() -> None:
    """Compile the module, if its sources have changed."""
    from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

    if ON_GPUS:
        return
    headers = [option for path in include_paths() for option in ("-isystem", path)]
    options = ("-std=c++20", "-O1", "-g0", "-Wall", "-fPIC", "-DTORCH_EXTENSION_NAME=virtual_device")
    includes = ("-DTORCH_API_INCLUDE_EXTENSION_H", *headers, "-isystem", sysconfig.get_path("include"))
    source = objects.ROOT / "cpp_tests" / "virtual_device" / "module.cpp"
    unit = Unit(
        source, FOLDER / "module.o", (get_cxx_compiler(), *options, *includes), f"torch {torch.__version__}: "
    )
    if unit.up_to_date() and LIBRARY.exists():
        return
    unit.compile()
    libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    made = LIBRARY.with_suffix(f".{os.getpid()}")
    subprocess.run([get_cxx_compiler(), "-shared", str(unit.target), *libraries, "-o", str(made)], check=True)
    made.replace(LIBRARY)  # at once: other processes may load it


def loaded() -> types.ModuleType:
    """The module, which makes the device known to torch when it is loaded."""
    if "virtual_device" in sys.modules:
        return sys.modules["virtual_device"]
    loader = importlib.machinery.ExtensionFileLoader("virtual_device", str(LIBRARY))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("virtual_device", loader))
    loader.exec_module(module)
    sys.modules["virtual_device"] = module
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _namespace(module))
    dist.Backend.register_backend(NAME, _backend, devices=[NAME])
    return module


def _namespace(module: types.ModuleType) -> types.ModuleType:
    """Module `torch.virtual`, as torch.cuda is for CUDA, as far as it is asked for."""
    found = types.ModuleType(f"torch.{NAME}")
    count = module.devices
    found.default_generators = tuple(module.default_generator(index) for index in range(count))

    def generator(device):
        index = torch.device(device).index if isinstance(device, str | torch.device) else device
        return found.default_generators[torch.accelerator.current_device_index() if index is None else index]

    def manual_seed_all(seed):
        for each in found.default_generators:
            each.manual_seed(seed)

    found._is_in_bad_fork = lambda: False
    found.is_available = found.is_initialized = lambda: True
    found.device_count = lambda: count
    found.current_device = torch.accelerator.current_device_index
    found.manual_seed_all = manual_seed_all
    found.get_rng_state = lambda device=NAME: generator(device).get_state()
    found.set_rng_state = lambda state, device=NAME: generator(device).set_state(state)
    # What FSDP2 asks a device for.
    found.Stream = lambda device=NAME, priority=0: torch.Stream(device, priority=priority)
    found.Event = lambda **options: torch.Event(NAME, **options)
    found.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    found.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    found.set_device = torch.accelerator.set_device_index
    found.synchronize = torch.accelerator.synchronize
    found.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return found


def _backend(store, rank, size, timeout):
    return loaded().backend(dist.ProcessGroupGloo(store, rank, size, timeout))


def staged_group() -> dist.ProcessGroup:
    """Make a group of all ranks that moves tensors of the device by the backend `staged`. Collective."""
    from oases_staged.extension import register_stream_words

    if ON_GPUS:
        return dist.new_group(backend="cpu:gloo,cuda:staged", timeout=TIMEOUT)
    module = loaded()
    if not hasattr(module, "words"):
        module.words = module.stream_words()
        register_stream_words(NAME, module.words)
    return dist.new_group(backend=f"cpu:gloo,{NAME}:staged", timeout=TIMEOUT)


class Gpu:
    """GPUs of a rank in the place of the module: nothing is delayed, and nothing has a cost, but what it takes."""

    @staticmethod
    def set_delays(seconds: float, seed: int = 0) -> None:
        """GPUs have delays of their own."""


def take() -> tuple[types.ModuleType | Gpu, torch.device]:
    """Make the device, of this rank's number, that of a rank of a pool and of its default group; once.

    The module, without costs and delays, and the device.
    """
    name = "cuda" if ON_GPUS else NAME
    if not ON_GPUS:
        loaded().set_costs()
        loaded().set_delays(0.0)
        loaded().set_lazy(False)
    kind = f"{name}:{'staged' if ON_GPUS else NAME}"
    if kind not in dist.get_backend_config():  # gloo alone names cuda, too, of which it sends no messages
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group(f"cpu:gloo,{kind}", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    index = dist.get_rank() % torch.cuda.device_count() if ON_GPUS else dist.get_rank()
    torch.accelerator.set_device_index(index)
    return Gpu() if ON_GPUS else loaded(), torch.device(name, index)

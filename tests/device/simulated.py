"""The simulated accelerator "sim": PyTorch's PrivateUse1 key in host memory, with the CPU's numbers.

A pytest process has it with `-p tests.device.simulated`; `register` is for the whole process, and cannot be undone.
Not simulated: several devices, work that overlaps with the host's, and the numbers of real kernels.
"""

import collections
import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import filelock
import torch

SOURCE = Path(__file__).with_name("simulated_device.cpp")
BUILD = Path(__file__).with_name("build")
WAITS = ("scalar", "sync", "d2h")
LIMITLESS = 2**40
_loaded = None


def missing():
    """Why the device cannot be built here; nothing if it can."""
    if sys.platform != "linux":
        return "the simulated device is built on Linux only"
    if shutil.which("c++") is None:
        return "the simulated device needs a C++ compiler (c++), which is not here"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated device needs Python's headers (python3-dev), which are not here"
    return ""


def built():
    """The compiled library, made once for each source and torch."""
    from torch.utils import cpp_extension

    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    library = BUILD / f"simulated_device-{name}.so"
    BUILD.mkdir(exist_ok=True)
    with filelock.FileLock(BUILD / "lock"):
        if not library.exists():
            part = library.with_suffix(".part")
            paths = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
            command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=simulated_device"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *paths, str(SOURCE)]
            command += ["-o", str(part), *(f"-L{path}" for path in cpp_extension.library_paths())]
            subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"], check=True)
            part.rename(library)
    return library


def register():
    """Make `torch.device("sim")` known to this process."""
    global _loaded
    if _loaded is not None:
        return
    spec = importlib.util.spec_from_file_location("simulated_device", built())
    _loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_loaded)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module(_loaded))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    register_operators()


def pytest_configure(config):
    register()


def device_module(device):
    """What `torch.get_device_module("sim")` gives."""
    module = types.ModuleType("torch.sim")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_name = lambda device=None: "simulated"
    module.manual_seed = lambda seed: device.default_generator().manual_seed(seed)
    module.manual_seed_all = module.manual_seed
    module.get_rng_state = lambda device_="sim": device.default_generator().get_state()
    module.set_rng_state = lambda state, device_="sim": device.default_generator().set_state(state)
    module.device = Selected
    module.default_generators = (device.default_generator(),)
    module.empty_cache = lambda: None

    def mem_get_info(device_=None):
        limit = device.memory_limit()
        total = LIMITLESS if limit < 0 else limit
        return total - device.memory_allocated(), total

    shares = {"sim": 1.0}
    module.mem_get_info = mem_get_info
    module.set_per_process_memory_fraction = lambda share: shares.update(sim=share)
    module.get_per_process_memory_fraction = lambda device_=None: shares["sim"]
    return module


class Selected:
    """`with torch.sim.device(0):`, of which torch.load makes use."""

    def __init__(self, device):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def lstm_cell(igates, hgates, cx, b_ih=None, b_hh=None):
    """`nn.LSTM` asks accelerators for this one, which the CPU has not."""
    gates = igates + hgates + (0 if b_ih is None else b_ih + b_hh)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    gh = torch.zeros_like(cy) if grad_hy is None else grad_hy
    gc = gh * o * (1 - t * t) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat([gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)], 1)
    return gates, gc * f, gates.sum(0) if has_bias else torch.empty(0, device=cy.device)


def dropout(x, p, train=None):
    """Takes no generator, so the CPU's kernel would draw from the CPU's; accelerators draw from their own."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def register_operators(library=torch.library.Library("aten", "IMPL")):  # noqa: B008 - the library must outlive the call
    library.impl("native_dropout", dropout, "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell", lstm_cell, "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, "PrivateUse1")


@contextlib.contextmanager
def counting(depth=60):
    """Count what waits for the device, and uploads: a Counter of (kind, operator, Python stack, innermost first)."""
    seen = collections.Counter()

    def heard(kind, name, size):
        frame, stack = sys._getframe(1), []
        while frame is not None and len(stack) < depth:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        seen[kind, name, tuple(stack)] += 1

    _loaded.listen(heard)
    try:
        yield seen
    finally:
        _loaded.listen(None)


@contextlib.contextmanager
def memory(free):
    """Leave so many bytes of the device's memory in this block."""
    limit(free)
    try:
        yield
    finally:
        _loaded.set_memory_limit(-1)


def allocated():
    return _loaded.memory_allocated()


def limit(free):
    """Leave so many bytes of the device's memory, to the end of this process."""
    _loaded.set_memory_limit(_loaded.memory_allocated() + free)

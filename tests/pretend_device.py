"""An accelerator for machines without one: tensors in the CPU's memory that refuse, as CUDA's do, to meet the CPU's.

Built from ``pretend_device.cpp``. A process that has loaded it keeps it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import torch

NAME = "pretend"
SOURCE = Path(__file__).with_suffix(".cpp")


def compiler() -> str | None:
    """The machine's C++ compiler, if it has one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path) -> Path:
    """The shared library, compiled into ``folder``."""
    home, library = Path(torch.__file__).parent, folder / "pretend_device.so"
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    links = [f"-L{home / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-w"]
    command = [str(compiler()), *flags, *includes, str(SOURCE), "-o", str(library), *links]
    subprocess.run(command, check=True)
    return library


def load(library: Path) -> None:
    """Give this process's torch the device."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.seeds = []
    module.manual_seed_all = module.seeds.append
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = contextlib.nullcontext
    module.set_device = module.synchronize = module.empty_cache = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()

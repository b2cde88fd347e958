"""Directories that try to hang a reader, to fill its memory, or to make peft import or compute something.

Each directory has a manifest with the right hashes. Only the meaning is wrong.

python -m tests.faults.exhaustion DIRECTORY small|large    -> one line of JSON

The line holds, for each attack and each way to load: the outcome, and the seconds.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.edits import edit_json, sign

Attack = Callable[[Path], None]
LARGE = frozenset({
    "40,000 target_modules", "a million token indices", "a million parameter names", "a name of a million parts",
    "20,000 parameter names, the last twice", "a million members", "400,000 members", "400,000 labels",
    "a text of 30 MB", "500,000 empty tensors", "20,000 empty tensors", "500,000 keys, the last twice",
    "a header of 60 MB", "a million deep", "five million lists", "an integer of a million digits",
})  # fmt: skip
"""Attacks that take a second to prepare or to refuse."""
BACKTRACKING = r"((\w+\.?)+)+!"  # needs 2^n steps on a name of n characters
SECONDS, BYTES = 5, 2**30


def of_adapter_configs() -> dict[str, dict[str, Any]]:
    """Return the name of an attack -> fields of adapter_config.json."""
    return {
        "r of ten million": {"r": 10**7},
        "rank_pattern of ten million": {"rank_pattern": {"q_proj": 10**7}},
        "r of 400 digits": {"r": 10**400},
        "lora_alpha of 400 digits": {"lora_alpha": 10**400},
        "4000 layers": {"layer_replication": [[0, 2]] * 2000},
        "backtracking target_modules": {"target_modules": BACKTRACKING},
        "backtracking exclude_modules": {"exclude_modules": BACKTRACKING},
        "backtracking rank_pattern": {"rank_pattern": {BACKTRACKING: 2}},
        "backtracking alpha_pattern": {"alpha_pattern": {BACKTRACKING: 2}},
        "backtracking layers_pattern": {"layers_pattern": BACKTRACKING, "layers_to_transform": [0]},
        "backtracking modules_to_save": {"modules_to_save": [BACKTRACKING]},
        "40,000 target_modules": {"target_modules": [f"q_proj{i}" for i in range(40_000)]},
        "a million token indices": {"trainable_token_indices": list(range(10**6))},
        "megatron imports": {"megatron_config": {"a": 1}, "megatron_core": "modeling_posterior"},
        "parent_library imports": {"auto_mapping": {"base_model_class": "E", "parent_library": "modeling_posterior"}},
        "runtime_config": {"runtime_config": {"ephemeral_gpu_offload": True}},
        "pissa of 10^9 rounds": {"init_lora_weights": "pissa_niter_1000000000"},
        "loftq of 10^9 rounds": {"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 10**9, "loftq_bits": 4}},
        "corda reads a file": {"init_lora_weights": "corda", "corda_config": {"cache_file": "/etc/passwd"}},
        "a deep field": {"megatron_config": nested(900)},
    }


def of_posterior_configs() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return the name of an attack -> a change of posterior_config.json."""

    def parameters(names: Iterator[str]) -> Callable[[dict[str, Any]], Any]:
        return lambda config: config.update(parameters=[[name, [1]] for name in names])

    return {
        "a million parameter names": parameters(f"p{i}" for i in range(10**6)),
        "20,000 parameter names, the last twice": parameters(f"p{max(i, 1)}" for i in reversed(range(20_000))),
        "a name of a million parts": parameters(iter(["a." * 10**6])),
        "parameters of 2^60 elements": lambda config: config["parameters"][0].__setitem__(1, [2**30, 2**30]),
        "10^9 members": lambda config: config.update(num_members=10**9),
        "a million members": lambda config: config.update(num_members=10**6, member_chains=[0] * 10**6),
        "a chain of 2^70": lambda config: config["member_chains"].__setitem__(0, 2**70),
        "a seed of 2^70": lambda config: config.update(seed=2**70),
        "900 deep in head": lambda config: config.update(head=nested(900)),
        "900 deep in diagnostics": lambda config: config.update(diagnostics={"a": nested(900)}),
        "300 deep in method": lambda config: config["method"].update(a=nested(300)),
        "400,000 members": lambda config: config.update(num_members=400_000, member_chains=[0] * 400_000),
        "400,000 labels": lambda config: config["head"].update(labels=[f"l{i}" for i in range(400_000)]),
        "a text of 30 MB": lambda config: config.update(subspace="x" * 30_000_000),
    }


def of_bytes() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Return the name of an attack -> a file and its content."""
    empty = '"t{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    return {
        "500,000 empty tensors": (ADAPTER, lambda: header(",".join(map(empty.format, range(500_000))))),
        "20,000 empty tensors": (ADAPTER, lambda: header(",".join(map(empty.format, range(20_000))))),
        "500,000 keys, the last twice": (CONFIG, lambda: keys(500_000)),
        "a header of 60 MB": (ADAPTER, lambda: header(" " * 60_000_000)),
        "a dtype that is a list": (ADAPTER, lambda: header('"t":{"dtype":[],"shape":[0],"data_offsets":[0,0]}')),
        "900 deep": (CONFIG, lambda: b'{"a":' * 900 + b"1" + b"}" * 900),
        "a million deep": (CONFIG, lambda: b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
        "five million lists": (CONFIG, lambda: b'{"a":[' + b"[]," * (5 * 10**6) + b"[]]}"),
        "an integer of a million digits": (CONFIG, lambda: b'{"a":' + b"1" * 10**6 + b"}"),
    }


ADAPTER, CONFIG = "adapter_model.safetensors", "posterior_config.json"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def header(entries: str) -> bytes:
    data = ("{" + entries + "}").encode()
    return struct.pack("<Q", len(data)) + data


def keys(count: int) -> bytes:
    return ("{" + ",".join(f'"k{i}":1' for i in range(count)) + f',"k{count - 1}":1' + "}").encode()


def edit_adapters(directory: Path, fields: dict[str, Any]) -> None:
    for path in directory.rglob("adapter_config.json"):
        edit_json(path, lambda config: config.update(fields))
    sign(directory)


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_json(directory / CONFIG, change)
    sign(directory)


def put(directory: Path, name: str, make: Callable[[], bytes]) -> None:
    (directory / name).write_bytes(make())
    sign(directory)


def sparse(directory: Path) -> None:
    """Make a sparse file of 50 GB with a wrong hash, which only a reader of the whole file finds."""
    os.truncate(directory / ADAPTER, 50 * 10**9)
    edit_json(directory / "manifest.json", lambda manifest: manifest["files"][ADAPTER].update(size=50 * 10**9))


def attacks() -> Iterator[tuple[str, Attack]]:
    """Return (name, attack) pairs."""
    for name, fields in of_adapter_configs().items():
        yield name, partial(edit_adapters, fields=fields)
    for name, change in of_posterior_configs().items():
        yield name, partial(edit_config, change=change)
    for name, (file, make) in of_bytes().items():
        yield name, partial(put, name=file, make=make)
    yield "a sparse file of 50 GB", sparse


def bounded(load: Callable[[Path], Any], directory: Path) -> tuple[str, float]:
    """Return the outcome of loading in a fork with a limit on address space, and its CPU seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(12 * SECONDS)  # other processes may share the CPU
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        result = "crash"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(directory)
            result = "accepted"
        except (ValueError, OSError) as error:
            result = "refused" if len(str(error)) < 20_000 else "an endless message"
        except BaseException as error:
            result = f"{type(error).__name__}: {error!s:.200}"
        finally:
            os.write(write, result.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read().decode() or "hang"
    _, _, usage = os.wait4(child, 0)
    return result, usage.ru_utime + usage.ru_stime


def main(base: str, size: str) -> None:
    import torch

    from hf_bayes.models.causal_lm import BayesianModelForCausalLM
    from hf_bayes.posteriors.posterior import Posterior
    from tests.models.loading.test_lora_layers import saved
    from tests.tiny_models import tiny_llama, with_lora

    torch.set_num_threads(1)
    os.fsync = lambda file: None
    root = Path(os.path.realpath(base))
    tiny_llama().save_pretrained(root / "base")
    saved(with_lora(tiny_llama(), modules_to_save=["lm_head"]), root / "clean")
    loaders: dict[str, Callable[[Path], Any]] = {
        "Posterior": Posterior.from_pretrained,
        "model": lambda directory: BayesianModelForCausalLM.from_pretrained(directory, base_model=root / "base"),
        "adapter": lambda directory: Posterior.from_adapters([directory]),
    }
    result: dict[str, Any] = {}
    chosen = [(name, attack) for name, attack in attacks() if (name in LARGE) == (size == "large")]
    for name, attack in [("nothing", lambda directory: None), *chosen]:
        shutil.rmtree(root / "attacked", ignore_errors=True)
        shutil.copytree(root / "clean", root / "attacked")
        attack(root / "attacked")
        result[name] = {way: bounded(load, root / "attacked") for way, load in loaders.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

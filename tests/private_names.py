"""A scan of source for private names of host libraries: what is read, overridden, imported or named as text."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType

from hf_bayes.core.compat import PrivateName

PYTHONS_OWN = {"_asdict", "_fields", "_make", "_replace", "_abc_impl", "_is_protocol"}
"""Names of named tuples and of abstract classes, which Python documents or sets."""
STANDARD_LIBRARY = {"_actions": argparse.ArgumentParser}
"""Private names of the standard library that the command line reads -> the class that has them."""

HOST_CLASSES = (
    "torch.Tensor",
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.utils.data.DataLoader",
    "transformers.PreTrainedModel",
    "transformers.PreTrainedConfig",
    "transformers.PreTrainedTokenizerBase",
    "transformers.GenerationMixin",
    "transformers.LlamaForCausalLM",
    "transformers.DynamicCache",
    "transformers.Pipeline",
    "transformers.TextGenerationPipeline",
    "transformers.TokenClassificationPipeline",
    "transformers.Trainer",
    "transformers.TrainingArguments",
    "transformers.TrainerCallback",
    "accelerate.Accelerator",
    "peft.PeftModel",
    "peft.LoraConfig",
    "peft.tuners.lora.LoraLayer",
    "datasets.Dataset",
    "datasets.DatasetDict",
    "evaluate.Metric",
    "lm_eval.models.huggingface.HFLM",
    "trl.SFTTrainer",
    "trl.DPOTrainer",
)
"""Classes of hosts that ours derive from or read. A private name of theirs is never ours, whoever defines it too."""

_BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "__setattr__", "get", "pop", "setdefault"}
"""Functions that take the name of an attribute, or of an argument, as text."""


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore."""
    return name.isidentifier() and name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


@cache
def host_names() -> frozenset[str]:
    """Return the private names that the installed classes of ``HOST_CLASSES`` define or set on ``self``."""
    found: set[str] = set()
    for path in HOST_CLASSES:
        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except ImportError:  # trl and lm_eval are no dependencies
            continue
        for each in kind.__mro__:
            if each.__module__.split(".")[0] not in ("builtins", "typing", "collections", "abc", "enum"):
                found |= {own for own in vars(each) if is_private(own)}
                found |= set(re.findall(r"\bself\.(_[A-Za-z]\w*)\b", _source(each)))
    return frozenset(found - PYTHONS_OWN)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class of an extension module
        return ""


def compat_modules(package: Path) -> dict[str, ModuleType]:
    """Return {file in the package: module} of the modules that list or read private names of hosts."""
    files = [*package.rglob("compat.py"), *package.rglob("compat/[!_]*.py")]
    paths = sorted(file.relative_to(package) for file in files)
    name = package.name
    return {path.as_posix(): importlib.import_module(".".join([name, *path.with_suffix("").parts])) for path in paths}


def lists_of(package: Path) -> dict[str, tuple[PrivateName, ...]]:
    """Return {file in the package: its list} of the modules that list private names of hosts."""
    return {path: module.NAMES for path, module in compat_modules(package).items() if hasattr(module, "NAMES")}


def listed(names: Iterable[PrivateName]) -> set[str]:
    """Return the private names in a list of a compat module, with the private parts of their owners' paths."""
    return {part for entry in names for part in (*entry.owner.split("."), entry.name) if is_private(part)}


def unlisted(root: Path, lists: Iterable[str] = ()) -> dict[str, set[str]]:
    """Return {private name of a host: "file:line" of its places} under a folder, without the listed names.

    A name is ours if a file under the folder defines it, and no class in ``HOST_CLASSES`` has it. In a class that
    neither derives from a host's nor is mixed into one that does, the names of ``self`` are ours, too.
    """
    trees = {file: ast.parse(file.read_text("utf-8")) for file in sorted(root.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    hosts = host_names() | {name for tree in trees.values() for name in _stand_ins(tree)}
    known = set(lists) | PYTHONS_OWN | STANDARD_LIBRARY.keys()
    related = _related_to_hosts(trees.values())
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        own = {id(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name not in related
               for node in _of_self(node)}  # fmt: skip
        for name, node, where in (*_used(tree), *_members(tree)):
            is_host = where is Where.MODULE or (name in hosts and not (id(node) in own and name in ours))
            if name not in known and (is_host or (where is Where.CODE and name not in ours)):
                found.setdefault(name, set()).add(f"{file.relative_to(root).as_posix()}:{node.lineno}")
    return found


def imports(root: Path) -> dict[str, set[str]]:
    """Return {file under a folder: top packages that it imports private names or modules of}."""
    found: dict[str, set[str]] = {}
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            module = getattr(node, "module", None) or ""
            for path in ([*module.split("."), *alias.name.split(".")] for alias in node.names):
                top = next(filter(None, path))
                if top not in ("hf_bayes", "__future__") and any(map(is_private, path)):
                    found.setdefault(file.relative_to(root).as_posix(), set()).add(top)
    return found


# -- what a file holds ------------------------------------------------------------------------------------------------

Place = ast.expr | ast.stmt


class Where(Enum):
    """How a private name stands in a file."""

    MODULE = "read of a host's module"
    CODE = "read, imported, or given to a function such as getattr"
    OTHER = "as text, or as the member of a class"


def _used(tree: ast.AST) -> Iterator[tuple[str, Place, Where]]:
    """Yield the private names that are read, imported, or stand as text."""
    modules = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
               for alias in node.names} - sys.stdlib_module_names  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node, Where.MODULE if ast.unparse(node.value) in modules else Where.CODE
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value, node, Where.OTHER
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for text in node.args if function in _BY_NAME else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and is_private(text.value):
                    yield text.value, text, Where.CODE
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for path in ([*module.split("."), *alias.name.split(".")] for alias in node.names):
                if path[0] not in ("hf_bayes", "__future__"):
                    yield from ((part, node, Where.CODE) for part in path if is_private(part))


def _members(tree: ast.AST) -> Iterator[tuple[str, Place, Where]]:
    """Yield the private names that classes define, which override a host's if it has them."""
    for owner in ast.walk(tree):
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            yield from ((name, node, Where.OTHER) for name in _bound(node) if is_private(name))


def _of_self(kind: ast.ClassDef) -> Iterator[Place]:
    """Yield the members of a class, and what its methods read of ``self`` and ``cls``."""
    yield from kind.body
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            yield node


def _related_to_hosts(trees: Iterable[ast.Module]) -> set[str]:
    """Return the classes that derive from a host's, and the ones that such a class derives from."""
    bases: dict[str, set[str]] = {}
    related = set()
    for tree in trees:
        plain = set(dir(builtins)) | _standard_imports(tree)
        local = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        local |= {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                  if (node.module or "").startswith("hf_bayes") for alias in node.names}  # fmt: skip
        local -= {node.name for node in _stand_in_classes(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                heads = {ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases}
                bases[node.name] = heads & local
                if any(head.split(".")[0] not in plain | local for head in heads):
                    related.add(node.name)
    while True:
        further = {name for name, above in bases.items() if above & related}
        further |= {each for name in related for each in bases.get(name, ())}
        if further <= related:
            return related
        related |= further


def _standard_imports(tree: ast.Module) -> set[str]:
    """Return the names that a file imports from the standard library."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in sys.stdlib_module_names:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _stand_in_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the classes that stand in for a host's while types are checked."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (each for each in node.body if isinstance(each, ast.ClassDef))


def _stand_ins(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of a file's stand-ins for classes of a host."""
    for kind in _stand_in_classes(tree):
        yield from (name for name, _, _ in _members(kind))


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines: in its modules and classes, and on ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for each in node.body:
                yield from _bound(each)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            yield from (str(text.value) for text in node.args[1:2] if isinstance(text, ast.Constant))


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module or a class binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name))

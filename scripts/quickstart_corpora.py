"""English text from the standard library of CPython, cut into the corpora of the quickstart: no network, no randomness.

This module is not a command: ``python scripts/quickstart.py`` calls it.

pretrain    docstrings of the standard library: training text of the base model and the tokenizer
finetune    most of the language reference (``pydoc_data.topics``): training text of the posterior
validation  more of the language reference: for every choice of a setting
test        the rest of the language reference: in distribution, used once
code        standard library source without comments and docstrings: near out of distribution
rot13       the test text with every letter moved by 13: far out of distribution

``package_docstrings`` returns docstrings of installed packages, more text like ``pretrain`` for a larger base model.
"""

from __future__ import annotations

import ast
import codecs
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

# Tests, demonstrations and tables are not prose, and site-packages is not the standard library.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
    "pydoc_data",
}
_SHARES = {"finetune": 0.6, "validation": 0.15, "test": 0.25}  # shares of the language reference
_PYTHON_PARAGRAPH = re.compile(r">>>|^\s*(def|class|import|from|return|@)\b", re.MULTILINE)


def corpora() -> dict[str, list[str]]:
    """Return corpus name -> texts. No paragraph occurs in two texts, so held-out text is new to the model."""
    seen: set[str] = set()
    # The reference comes first: a paragraph that a docstring repeats must not be in the pretraining corpus.
    reference = [text for name in sorted(topics) if (text := _prose(topics[name], seen))]
    modules = _modules(Path(sysconfig.get_path("stdlib")))
    split: dict[str, list[str]] = {"pretrain": _prose_of(modules, seen), "finetune": [], "validation": [], "test": []}
    # Whole topics, the longest first. Each goes to the corpus that is furthest below its share.
    for text in sorted(reference, key=len, reverse=True):
        split[min(_SHARES, key=lambda name: sum(map(len, split[name])) / _SHARES[name])].append(text)
    split["code"] = [code for tree in modules[::8] if len(code := _code(tree)) > 2000]
    split["rot13"] = [codecs.encode(text, "rot13") for text in split["test"]]
    return split


def package_docstrings(packages: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return docstrings of installed packages, one text per module, without the paragraphs of the ``known`` texts.

    Raises:
        ModuleNotFoundError: for a package that is not installed.
    """
    seen = {line for text in known for line in text.splitlines()}
    texts = []
    for name in packages:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"{name} is not installed, but its docstrings are needed: pip install {name}")
        texts += _prose_of(_modules(Path(found.origin).parent), seen)
    return texts


def _prose_of(modules: Sequence[ast.Module], seen: set[str]) -> list[str]:
    """Return the prose of the docstrings, one text for each module with prose."""
    return [text for tree in modules if (text := _prose("\n\n".join(_docstrings(tree)), seen))]


def _modules(root: Path) -> list[ast.Module]:
    """Yield the parsed modules of a library, in the order of their paths."""
    trees = []
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED & set(path.relative_to(root).parts):
            try:
                trees.append(ast.parse(path.read_text(encoding="utf-8")))
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue  # templates and files in other encodings
    return trees


def _documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _docstrings(tree: ast.Module) -> list[str]:
    return [inspect.cleandoc(text) for node in _documented(tree) if (text := ast.get_docstring(node, clean=False))]


def _prose(text: str, seen: set[str]) -> str:
    """Return the English paragraphs of a text, one per line, that were not seen before."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character == " " for character in line)
        if len(line) < 40 or letters < 0.8 * len(line) or _PYTHON_PARAGRAPH.search(paragraph) or line in seen:
            continue
        seen.add(line)
        kept.append(line)
    return "\n".join(kept)


def _code(tree: ast.Module) -> str:
    """Return the source of a module without docstrings. Parsing has removed the comments."""
    for node in _documented(tree):
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)

"""Sidecars: the files beside a posterior's tensors that can change a prediction.

Sidecars are the files of the tokenizer, chat templates, the image processor or processor, and the generation config. A
posterior holds them as bytes, so that they are saved, verified, read and pushed together with its tensors.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_bayes.posteriors.chat_templates import check_chat_template
from hf_bayes.posteriors.file_formats import (
    CHAT_TEMPLATES,
    CODE_REFERENCES,
    FURTHER_FILES,
    GENERATION_CONFIG,
    VOCABULARY_FILES,
)
from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.storage.json_types import require_object

TEMPLATE, TEMPLATE_CONFIG, MORE_TEMPLATES = CHAT_TEMPLATES
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_CONFIG,
    TEMPLATE,
    f"{MORE_TEMPLATES}/*.jinja",
    # vocabularies of tokenizers without a tokenizer.json
    "vocab*.json",
    "*_vocab.json",
    "vocab*.txt",
    "*_vocab.txt",
    "dict.txt",
    "merges.txt",
    "bpe.codes",
    "byte_maps.json",
    "emoji.json",
    "normalizer.json",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    # processors of images, sound and several inputs
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    GENERATION_CONFIG,
)
"""Patterns of the names of sidecars. Other files of a directory are never read as sidecars."""
ACCESS_TOKEN = re.compile(rb"\bhf_(?:oauth_|jwt_)?[A-Za-z0-9]{20,}")
_AUTH_TOKEN = re.compile(rb'"use_auth_token"\s*:\s*"')  # a token of another server can have any form
MAX_FILES = 64
MAX_BYTES = 64 * 2**20
"""The largest size of a sidecar in bytes. The largest tokenizers in use take about 35 MB."""
MAX_BYTES_TOGETHER = 128 * 2**20

_TEXTS = (".json", ".jinja", ".txt", ".codes")
_IGNORED = ("*.py", "README.md", ".*")  # files of ``save_pretrained`` that a posterior does not need


def is_sidecar(name: str) -> bool:
    """Return whether a file of this name, relative to the posterior's directory, is a sidecar."""
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in NAMES)


def sidecars_in(directory: Path) -> list[str]:
    """Return the names of all sidecars in a directory, also of those that no manifest lists."""
    found = [*directory.glob("*"), *directory.glob(f"{MORE_TEMPLATES}/*")]
    return sorted(name for path in found if is_sidecar(name := path.relative_to(directory).as_posix()))


@dataclass(frozen=True)
class Sidecars:
    """The sidecars of a posterior: an immutable mapping from names to bytes.

    Raises:
        ValueError: for a name that no sidecar has, a text that is not UTF-8, a chat template that could run for ever,
            or files that are too many or too large.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(sorted(self.files.items()))))
        if unknown := [name for name in self.files if not is_sidecar(name)]:
            raise ValueError(f"{', '.join(unknown)}: a posterior does not keep this file of a tokenizer or processor")
        sizes = {name: len(data) for name, data in self.files.items()}
        if large := [f"{name} ({size:,} bytes)" for name, size in sizes.items() if size > MAX_BYTES]:
            raise ValueError(f"{', '.join(large)}: a posterior keeps files of at most {MAX_BYTES:,} bytes")
        if len(sizes) > MAX_FILES or sum(sizes.values()) > MAX_BYTES_TOGETHER:
            raise ValueError(
                f"{len(sizes)} files of tokenizer and processor with {sum(sizes.values()):,} bytes: a posterior keeps "
                f"at most {MAX_FILES} files with {MAX_BYTES_TOGETHER:,} bytes"
            )
        for name, data in self.files.items():
            if name.endswith(_TEXTS):
                _check_text(data, name)
        for name, template in _chat_templates(self.files):
            try:
                check_chat_template(template)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Sidecars, (dict(self.files),)  # a mapping that cannot be changed cannot be copied or pickled either

    @classmethod
    def of(cls, processor: Any = None, generation_config: Any = None) -> Sidecars:
        """Return the files that a tokenizer or processor saves, and the generation config of a model.

        Args:
            processor: an object with ``save_pretrained`` of transformers, or None.
            generation_config: a ``GenerationConfig`` of transformers, or None.
        Raises:
            ValueError: if the processor cannot be saved, or saves files that a posterior does not keep.
            OSError: if the temporary directory has no room, naming it.
        """
        files = {} if processor is None else _saved_by(processor)
        if generation_config is not None:
            files[GENERATION_CONFIG] = generation_config.to_json_string(use_diff=True).encode()
        return cls(files)

    def __bool__(self) -> bool:
        return bool(self.files)

    def __or__(self, other: Sidecars) -> Sidecars:
        """Return the files of both. A file of ``other`` replaces a file of the same name here."""
        return Sidecars({**self.files, **other.files})

    def has(self, *names: str) -> bool:
        """Return whether at least one of these files exists."""
        return any(name in self.files for name in names)

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """The fields of the generation config, or None without one.

        Raises:
            ValueError: if the file is not a JSON object.
        """
        data = self.files.get(GENERATION_CONFIG)
        return None if data is None else _object(data, GENERATION_CONFIG)

    @contextlib.contextmanager
    def folder(self, *, code_from: str | None = None) -> Iterator[Path]:
        """Write the files to a private temporary directory for ``from_pretrained``, and remove it after the block.

        Args:
            code_from: the repository or folder of the base model. The files may name its code only (``auto_map``). A
                name without a repository gets this one. None leaves the names unchanged.
        Raises:
            ValueError: if the files name code of another repository than ``code_from``.
            OSError: if there is no space, naming the file.
        """
        with tempfile.TemporaryDirectory(prefix="hf_bayes_", ignore_cleanup_errors=True) as root:
            for name, data in self.files.items():
                path = Path(root) / name
                path.parent.mkdir(exist_ok=True)
                disk.write(path, _bound(name, data, code_from))
            yield Path(root)


def _saved_by(processor: Any) -> dict[str, bytes]:
    """Return the files that ``processor.save_pretrained`` writes, without code."""
    kind = type(processor).__name__
    if not hasattr(processor, "save_pretrained"):
        raise ValueError(
            f"a {kind} cannot be saved with the posterior: it has no save_pretrained. Give a tokenizer or processor of "
            "transformers as processing_class="
        )
    with tempfile.TemporaryDirectory(prefix="hf_bayes_", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        try:
            processor.save_pretrained(folder)
        except Exception as error:
            # on a full disk the tokenizers library raises the class Exception itself
            if not isinstance(error, OSError) and type(error) is not Exception:
                raise ValueError(f"the {kind} cannot be saved with the posterior: {error}") from error
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(
                getattr(error, "errno", None) or (int(number[1]) if number else errno.EIO),
                f"cannot write the files of the {kind} to {folder}: {error}. Free space there, or name another "
                "directory in the environment variable TMPDIR",
                folder,
            ) from error
        paths = [path for path in root.rglob("*") if path.is_file()]
        names = {path.relative_to(root).as_posix(): path for path in paths}
        files = {name: path.read_bytes() for name, path in names.items() if not _is_ignored(name)}
    if unknown := sorted(name for name in files if not is_sidecar(name)):
        raise ValueError(
            f"the {kind} saves {', '.join(unknown)}, which a posterior does not keep: it keeps tokenizers and "
            "processors as JSON, text and sentencepiece models. Leave processing_class= out and give the tokenizer "
            "when the posterior is loaded"
        )
    for name, data in files.items():
        _check_no_secret(data, name, kind)
    for name in files:  # a full disk may cut a file without an error
        if name.endswith(".json"):
            _object(files[name], f"{name} of the {kind}, written to {folder},")
    return files


def _check_no_secret(data: bytes, name: str, kind: str) -> None:
    """Check that a file holds no access token.

    Raises:
        ValueError: naming the file, without the token.
    """
    if ACCESS_TOKEN.search(data) or _AUTH_TOKEN.search(data):
        raise ValueError(
            f"the {kind} would write an access token into {name} of the posterior, expected none: load it again with "
            "token= in place of use_auth_token="
        )


def _is_ignored(name: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in name.split("/") for pattern in _IGNORED)


def _bound(name: str, data: bytes, code_from: str | None) -> bytes:
    """Return the bytes of a file without names of further files, and with code of ``code_from`` only."""
    if not name.endswith("_config.json"):
        return data
    before = _object(data, name)
    values = {key: value for key, value in before.items() if not _names_a_file(key, value)}
    if code_from is not None:
        values = _with_code_from(values, code_from, name)
    return data if values == before else json.dumps(values, ensure_ascii=False).encode()


def _names_a_file(key: str, value: Any) -> bool:
    return key in FURTHER_FILES or (key in VOCABULARY_FILES and isinstance(value, str))


def _with_code_from(values: Any, repository: str, where: str, *, refers: bool = False) -> Any:
    """Return JSON values whose ``auto_map`` entries name code of the repository.

    Raises:
        ValueError: if an entry names code of another repository.
    """
    match values:
        case dict():
            return {
                key: _with_code_from(value, repository, where, refers=refers or key == CODE_REFERENCES)
                for key, value in values.items()
            }
        case list():
            return [_with_code_from(value, repository, where, refers=refers) for value in values]
        case str() if refers:
            return _own_code(values, repository, where)
    return values


def _own_code(name: str, repository: str, where: str) -> str:
    source, dashes, reference = name.rpartition("--")
    if dashes and source != repository:
        raise ValueError(
            f"{where} names code of {source!r} in auto_map, expected code of the base model {repository!r}: no other "
            "code runs, even with trust_remote_code=True. Pass the tokenizer or processor yourself"
        )
    return f"{repository}--{reference}"


def _chat_templates(files: Mapping[str, bytes]) -> Iterator[tuple[str, Any]]:
    """Yield (name of the file, template) for each chat template."""
    for name, data in files.items():
        if name.endswith(".jinja"):
            yield name, data.decode()
        elif name == TEMPLATE_CONFIG or name.endswith("_config.json"):
            found = _object(data, name).get("chat_template")
            match found:
                case list():  # [{"name": ..., "template": ...}, ...]
                    templates = [entry.get("template") if isinstance(entry, dict) else entry for entry in found]
                case dict():
                    templates = list(found.values())
                case _:
                    templates = [found]
            yield from ((name, template) for template in templates if template is not None)


def _check_text(data: bytes, where: str) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not a text in UTF-8: {error}") from error


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    return require_object(value, where)

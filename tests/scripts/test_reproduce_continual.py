from __future__ import annotations

import codecs
import gzip
import json
import math
import os
from pathlib import Path

import pytest

from hf_bayes.cli.data import load_episode
from scripts.reproduce import continual
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

NUMBERS = [  # (single, sequential, other) after the last of two episodes, for each seed and order
    ([1.0, 2.0], [1.4, 2.0], [1.1, 2.1]),
    ([1.0, 2.0], [1.8, 2.2], [1.3, 2.1]),
    ([3.0, 4.0], [3.2, 4.0], [3.4, 4.2]),
]


def runs() -> list[dict]:
    rows = [
        {
            "single": [[single[0], 9.0], [9.0, single[1]]],
            "sequential": [[single[0], 9.0], sequential],
            "other": [[single[0], 9.0], other],
        }
        for single, sequential, other in NUMBERS
    ]
    return [{"seed": seed, "order": ["a", "b"], "losses": losses} for seed, losses in enumerate(rows)]


def test_differences_are_taken_within_a_pair() -> None:
    found = continual.differences(runs(), "other")
    assert found == pytest.approx([0.1 - 0.2, 0.2 - 0.5, 0.3 - 0.1])
    mean = sum(found) / 3
    error = math.sqrt(sum((value - mean) ** 2 for value in found) / 2 / 3)
    assert continual.paired(runs(), "other") == f"{mean:+.4f} ± {error:.4f}"
    # the broken twin: with the seeds of one method shuffled the mean stays and the error does not
    shuffled = runs()
    first, last = shuffled[0]["losses"], shuffled[2]["losses"]
    for key in ("single", "sequential"):
        first[key], last[key] = last[key], first[key]
    assert continual.paired(shuffled, "other") != continual.paired(runs(), "other")


def test_a_package_is_fetched_and_unpacked_without_being_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, content = tmp_path / "bin", tmp_path / "content.gz"
    programs.mkdir()
    content.write_bytes(gzip.compress("Größe".encode()))
    for name, body in {
        "apt-get": 'echo "$@" >> calls; touch "$2_1.2_all.deb"',
        "dpkg-deb": f'[ "$1" = -f ] && echo 1.2 && exit; mkdir -p "$3/usr" && cp {content} "$3/usr/text.gz"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    source, cache = continual.Source("words", "usr/text.gz"), tmp_path / "cache"
    assert continual.fetch(source, cache) == ("Größe", "1.2")
    assert continual.fetch(source, cache) == ("Größe", "1.2")
    assert (cache / "calls").read_text() == "download words\n"  # once


def test_where_apt_is_missing_the_reader_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"apt-get and dpkg-deb cannot be found: run this on\s+Debian"):
        continual.fetch(continual.SOURCES["policy"], tmp_path)


def test_the_experiment_tunes_on_the_first_episode_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: "\n".join(f"{text} {index}" for index in range(8)) for name, text in zip("ab", TEXTS, strict=False)}
    sources = {name: continual.Source(name, "text") for name in texts}
    monkeypatch.setattr(continual, "SOURCES", sources)
    monkeypatch.setattr(continual, "ORDERS", (("b", "a"),))
    monkeypatch.setattr(continual, "METHODS", ("sequential", "laplace_diagonal"))
    monkeypatch.setattr(continual, "fetch", lambda source, cache: (texts[source.package], "1.0"))
    base = tmp_path / "base"
    tiny_llama(max_position_embeddings=48).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    (base / "trained.json").write_text(json.dumps({"loss": 4.0}))
    settings = continual.Settings(
        cache=str(tmp_path), updates=4, batch_size=2, window=48, stride=48, lora_layers=[0], seeds=[0],
        strengths=[1e-6, 1e6],
    )  # fmt: skip

    record = json.loads(json.dumps(continual.run(settings)))
    (only,) = record["runs"]
    losses = only["losses"]
    assert only["order"] == ["b", "a"]
    # methods without an order were learnt in the order of the sources, and are reported in this one
    kept = json.loads((tmp_path / "seed_0" / "shared" / "single" / "episode_0" / "losses.json").read_text())
    assert losses["single"][1] == kept["losses"][::-1]
    assert losses["sequential"][0] == losses["laplace_diagonal"][0] == losses["single"][0]
    assert losses["sequential"][1] != losses["laplace_diagonal"][1]

    train, test = (part["text"][0] for part in load_episode(str(tmp_path / "b.txt")))
    first, second = (tmp_path / "choice" / "b" / f"half_{index}.txt" for index in range(2))
    assert first.read_text() + codecs.decode(second.read_text(), "rot13") == train
    assert texts["b"].startswith(train)
    assert (train + test).splitlines() == texts["b"].splitlines()
    chosen = record["choices"]["b"]["laplace_diagonal"]
    assert set(chosen) == {"1e-06", "1e+06"}
    assert chosen["1e-06"] != chosen["1e+06"]

    tables = continual.blocks(record)
    assert "| b | laplace_diagonal |" in tables["choices"]
    continual.figures(record, tmp_path)
    assert (tmp_path / "continual.png").exists()
    assert (tmp_path / "continual_losses.png").exists()
    monkeypatch.setattr(continual.command, "BayesianTrainer", None)  # a second call trains nothing
    assert json.loads(json.dumps(continual.run(settings))) == record

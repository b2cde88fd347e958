"""Rows of preferences in TRL's formats, and a tokenizer with a chat template, for tests of its trainers."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import TEXTS, tiny_tokenizer

CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}"
PLAIN = [{"prompt": f"{n} ", "chosen": TEXTS[n % 4], "rejected": TEXTS[(n + 1) % 4][:20]} for n in range(8)]
IMPLICIT = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in PLAIN]
MESSAGES = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in PLAIN
]


def tokenizer() -> Any:
    found = tiny_tokenizer()
    found.chat_template = CHAT
    return found

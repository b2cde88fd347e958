"""Generate from an exported repository in a process that cannot import hf_bayes: BASE REPOSITORY OUTPUT."""

import sys


class Refused:
    """An import hook: hf_bayes is not installed here."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_bayes":
            raise ImportError("hf_bayes was imported")


sys.meta_path.insert(0, Refused())

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

base, repository, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base)
tokenizer = AutoTokenizer.from_pretrained(repository, padding_side="left")
inputs = tokenizer(["The mitochondrion is", "Langevin"], padding=True, return_tensors="pt", return_token_type_ids=False)
found = {}
for name, options in {"greedy": {"do_sample": False}, "sampling": {"do_sample": True}}.items():
    torch.manual_seed(0)
    text = model.generate(
        **inputs, **options, max_new_tokens=12, custom_generate=repository, trust_remote_code=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    found |= {f"{name}.{part}": text[part] for part in ("sequences", "total", "aleatoric", "epistemic")}
assert "hf_bayes" not in sys.modules
save_file(found, output)

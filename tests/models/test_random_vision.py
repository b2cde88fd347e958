"""Models of images and text with random weights in the part that reads images, against separate models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_bayes
from hf_bayes.core.layout import select
from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.fit.model_curvature import row_gradients_of_model
from hf_bayes.members.module_hooks import LayerHooks
from hf_bayes.members.single_member import as_single_model
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from tests import multimodal, runs
from tests.illustrated import GREEDY
from tests.illustrated import collate as collate_rows
from tests.illustrated import rows_of as illustrated_rows
from tests.members.reference import entropies, mixture, scattered, separate_gradients, separate_logits
from tests.models.trained import from_disk
from tests.multimodal import IMAGE, PLACEHOLDERS
from tests.tiny_models import VOCABULARY, with_lora

MAKE = {"llava": multimodal.llava, "gemma3": multimodal.gemma3, "idefics3": multimodal.idefics3,
        "qwen2_vl": multimodal.qwen2_vl}  # fmt: skip
LENGTH = 18
PROJECTOR = r".*multi_modal_projector\.linear_1\.weight"


def adapted(kind: str) -> nn.Module:
    """LoRA in both parts."""
    return with_lora(MAKE[kind](torch.float64).eval(), target_modules=r".*\.(q_proj|v_proj|qkv)")


def bayesian(kind: str, num_members: int = 2) -> tuple[BayesianModel, Tensor]:
    model = adapted(kind)
    theta = scattered(model, select(model), num_members)
    return attach(model, theta).eval(), theta


def texts(kind: str, counts: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Rows with these numbers of images. The first image of ``qwen2_vl`` has four tokens, the others have one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (len(counts), LENGTH), generator=generator)
    sizes = [4 if kind == "qwen2_vl" and image == 0 else PLACEHOLDERS[kind] for image in range(sum(counts))]
    left = iter(sizes)
    for row, count in enumerate(counts):
        start = 1
        for size in (next(left) for _ in range(count)):
            ids[row, start : start + size] = IMAGE
            start += size + 1
    types = (ids == IMAGE).long()
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found |= {"gemma3": {"token_type_ids": types}, "qwen2_vl": {"mm_token_type_ids": types}}.get(kind, {})
    if kind == "qwen2_vl":
        grid = torch.tensor([[1, 4, 4] if size == 4 else [1, 2, 2] for size in sizes])
        patches = torch.randn(int(grid.prod(1).sum()), 96, generator=generator, dtype=torch.float64)
        return found | {"pixel_values": patches, "image_grid_thw": grid}
    pixels = torch.randn(sum(counts), 3, 8, 8, generator=generator, dtype=torch.float64)
    if kind == "idefics3":
        parts = pixels.split(list(counts))
        pixels = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    return found | ({"pixel_values": pixels} if sum(counts) else {})


def labelled(kind: str, counts: tuple[int, ...]) -> dict[str, Tensor]:
    inputs = texts(kind, counts)
    return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)}


def losses(model: BayesianModel, theta: Tensor, batch: dict[str, Tensor], *, folded: bool) -> tuple[Tensor, Tensor]:
    leaf = theta.clone().requires_grad_()
    loss = model(**batch, theta=leaf, folded=folded).loss
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def rows_of(batch: dict[str, Tensor], counts: tuple[int, ...], rows: slice) -> dict[str, Tensor]:
    """Return rows of a batch of ``llava``; without ``pixel_values`` if they have no image."""
    first, last = sum(counts[: rows.start]), sum(counts[: rows.stop])
    found = {name: value[rows] for name, value in batch.items() if name != "pixel_values"}
    return found if first == last else {**found, "pixel_values": batch["pixel_values"][first:last]}


@pytest.mark.parametrize("counts", [(2, 1, 1, 0), (2, 2, 0, 0), (1, 1, 2, 1), (0, 1, 1, 1), (1, 1, 1, 1)])
def test_each_chain_reads_the_images_of_its_own_rows(counts: tuple[int, ...]) -> None:
    """Four images for two chains of two rows do not mean two images for each chain."""
    model, theta = bayesian("llava")
    batch = labelled("llava", counts)
    own = [rows_of(batch, counts, rows) for rows in (slice(0, 2), slice(2, 4))]
    expected = separate_gradients(adapted("llava"), model.layout, theta, own)
    for found, wanted in zip(losses(model, theta, batch, folded=True), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("counts", [(2, 0, 1), (2, 1, 1), (1, 1, 1)])
def test_chains_share_rows_with_any_number_of_images(kind: str, counts: tuple[int, ...]) -> None:
    model, theta = bayesian(kind)
    batch = labelled(kind, counts)
    expected = separate_gradients(adapted(kind), model.layout, theta, [batch] * 2)
    for found, wanted in zip(losses(model, theta, batch, folded=False), expected, strict=True):
        # positions are rotated in float32
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_first_batch_of_text_alone_reads_no_weights_of_images() -> None:
    model, theta = bayesian("llava")
    grad = losses(model, theta, labelled("llava", (0, 0)), folded=False)[1]
    by_name = model.layout.unflatten(grad)
    silent = {name for name, part in by_name.items() if not part.any()}
    assert silent == {name for name in by_name if "vision_tower" in name} == model.members.names_of_images


def test_weights_of_images_that_images_do_not_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text alone need not read them, whatever it was that came before."""
    model, theta = bayesian("llava")
    losses(model, theta, labelled("llava", (0, 0)), folded=False)
    for layer in model.core.model.vision_tower.encoder.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(ValueError, match=r"12 random parameters were not read .*vision_tower"):
        losses(model, theta, labelled("llava", (1, 1)), folded=False)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}])
def test_generated_tokens_are_judged_as_by_separate_models(kind: str, options: dict[str, Any]) -> None:
    model, theta = bayesian(kind)
    inputs = texts(kind, (2, 0, 1))
    output = model.generate(**inputs, **GREEDY, **options, return_dict_in_generate=True)
    new = output.sequences.shape[1] - LENGTH
    times = len(output.sequences) // 3
    for number in range(times):  # the text of this number from each row
        whole = {**inputs, "input_ids": output.sequences[number::times]}
        whole["attention_mask"] = nn.functional.pad(inputs["attention_mask"], (0, new), value=1)
        for name in {"token_type_ids", "mm_token_type_ids"} & set(whole):
            whole[name] = nn.functional.pad(inputs[name], (0, new))
        logits = separate_logits(adapted(kind), model.layout, theta, whole)[:, :, LENGTH - 1 : -1]
        found, read = output.epistemic[number::times], output.logprobs[number::times].isfinite()
        torch.testing.assert_close(found[read], entropies(logits)[2][read], rtol=0, atol=1e-5)


@pytest.mark.parametrize("members_per_pass", [None, 1])
def test_an_own_loop_has_the_positions_behind_images(members_per_pass: int | None) -> None:
    """Four tokens of an image take two positions, in one row and not in the others."""
    model, theta = bayesian("qwen2_vl")
    model.members_per_pass = members_per_pass
    inputs = {name: value for name, value in texts("qwen2_vl", (1, 0, 1)).items() if name != "attention_mask"}
    new = torch.randint(8, VOCABULARY, (3, 2), generator=torch.Generator().manual_seed(1))
    whole = {**inputs, "input_ids": torch.cat([inputs["input_ids"], new], 1)}
    whole["mm_token_type_ids"] = nn.functional.pad(inputs["mm_token_type_ids"], (0, 2))
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        found = model(input_ids=new, past_key_values=cache).logits
    expected = mixture(separate_logits(adapted("qwen2_vl"), model.layout, theta, whole))[:, -2:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_cache_filled_by_all_members_at_once_is_refused() -> None:
    model, _ = bayesian("qwen2_vl")
    with pytest.raises(ValueError, match=r"StaticCache .* these images need a pass for each member.*use_cache=False"):
        model.generate(**texts("qwen2_vl", (2, 0, 1)), **GREEDY, cache_implementation="static")


@pytest.mark.parametrize("members_per_pass", [None, 1])
def test_an_own_cache_that_has_no_join_is_refused(members_per_pass: int | None) -> None:
    core = multimodal.llava_lfm2(torch.float64).eval()
    theta = scattered(core, select(core, PROJECTOR), 2)
    model = attach(core, theta, subspace=PROJECTOR).eval()
    model.members_per_pass = members_per_pass
    inputs = texts("llava", (2, 1))
    with pytest.raises(ValueError, match=r"DynamicCache .* these images need a pass for each member.*use_cache=False"):
        model(**inputs, use_cache=True)
    expected = mixture(separate_logits(multimodal.llava_lfm2(torch.float64).eval(), model.layout, theta, inputs))
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected.to(torch.float64), rtol=0, atol=1e-5)
        assert model(**texts("llava", (1, 1)), use_cache=True).past_key_values is not None


def test_a_single_pass_goes_on_behind_uncertain_keys(tmp_path: Path) -> None:
    """The keys of an image are uncertain, those of a new token in the first layer are not."""
    base = from_disk(multimodal.llava(), tmp_path / "base")
    core = with_lora(base, target_modules=r".*(multi_modal_projector.linear_1|language_model.*q_proj)")
    posterior = fit_laplace(core, illustrated_rows("llava", 8), LaplaceConfig(prior_std=0.3), collate=collate_rows)
    posterior.save_pretrained(tmp_path / "posterior")
    model = hf_bayes.BayesianModelForImageTextToText.from_pretrained(tmp_path / "posterior").single_pass()
    inputs = {
        name: value.float() if value.is_floating_point() else value for name, value in texts("llava", (1, 1)).items()
    }
    found, expected = (
        model.generate(**inputs, **GREEDY, use_cache=cached, return_dict_in_generate=True) for cached in (True, False)
    )
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.epistemic, expected.epistemic, rtol=0, atol=1e-5)
    assert bool((found.epistemic > 1e-6).all())


def test_slices_of_rows_without_an_image_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = bayesian("idefics3")
    inputs = texts("idefics3", (2, 0, 1))
    whole = model.score(**inputs)
    monkeypatch.setattr("hf_bayes.models.language.causal_members.HIDDEN_BYTES", 0)
    monkeypatch.setattr(model.predictor, "tensors_per_state", 10**9, raising=False)
    assert [sorted(rows) for rows in model.row_slices(inputs)][1] == ["attention_mask", "input_ids"]
    torch.testing.assert_close(model.score(**inputs), whole, rtol=0, atol=1e-10)


# -- training --------------------------------------------------------------------------------------------------------


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch as a processor of ``llava`` makes it: without ``pixel_values`` if no row has an image."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    images = [torch.tensor(row["pixel_values"]) for row in rows if row["pixel_values"]]
    batch |= {"pixel_values": torch.cat(images)} if images else {}
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)}


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
def test_a_run_does_not_depend_on_the_members_of_a_pass(minibatch: str, tmp_path: Path) -> None:
    counts = (2, 0, 1, 1, 0, 0, 3, 1)
    rows = [
        {"pixel_values": [], **{name: value[0].tolist() for name, value in texts("llava", (count,), seed).items()}}
        | ({"pixel_values": texts("llava", (count,), seed)["pixel_values"].tolist()} if count else {})
        for seed, count in enumerate(counts)
    ]
    found = []
    for number, fields in enumerate(({}, {"members_per_pass": 1})):
        base = from_disk(multimodal.llava(), tmp_path / f"base{number}")
        trainer = runs.trainer(
            tmp_path / f"posterior{number}", SGHMCConfig(num_chains=2, draws_per_chain=1), train=rows, collator=collate,
            model=with_lora(base, target_modules=["q_proj", "v_proj"]), minibatch=minibatch, max_steps=6,
            per_device_train_batch_size=2, **fields,
        )  # fmt: skip
        trainer.train()
        found.append(trainer.posterior.sample(None))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    trainer.save_model()
    loaded = hf_bayes.BayesianModelForImageTextToText.from_pretrained(tmp_path / "posterior1")
    assert loaded.score(**{k: v for k, v in collate(rows).items() if k != "labels"}).total.isfinite().all()


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 0), (2, 1, 0), (2, 1)])
def test_row_gradients_are_those_of_the_images_of_a_row(kind: str, counts: tuple[int, ...]) -> None:
    """A batch with as many images as rows may have two images in one row and none in another."""
    model, _ = bayesian(kind, num_members=1)
    batch = labelled(kind, counts)
    found = row_gradients_of_model(
        model, list(range(len(counts))), collate=lambda _: dict(batch), batch_size=len(counts)
    )
    own = [model.take_rows(batch, torch.tensor([row])) for row in range(len(counts))]
    expected = [-separate_gradients(adapted(kind), model.layout, model.current, [rows])[1] for rows in own]
    torch.testing.assert_close(torch.cat(list(found)), torch.cat(expected), rtol=1e-5, atol=1e-5)  # rotated in float32


def test_pieces_of_a_batch_take_their_images_along() -> None:
    """A batch with as many rows as positions is read in two pieces."""
    counts = (2, 2, *[1] * (LENGTH - 4), 0, 0)
    batch = labelled("llava", counts)
    core = with_lora(multimodal.llava(torch.float64).eval(), target_modules=r".*language_model.*q_proj")
    model = attach(core, scattered(core, select(core), 1)).eval()
    rows = list(range(len(counts)))
    found = row_gradients_of_model(model, rows, collate=lambda _: dict(batch), batch_size=len(rows))
    alone = row_gradients_of_model(
        model, rows, collate=lambda given: model.take_rows(batch, torch.tensor(given)), batch_size=1
    )
    torch.testing.assert_close(torch.cat(list(found)), torch.cat(list(alone)), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("length", [4, 5])
def test_padding_of_a_text_hides_no_patch_of_an_image(length: int) -> None:
    """An image of idefics3 has four patches, as a text of four tokens has tokens."""
    batch = {k: v if k == "pixel_values" else v[:, :length] for k, v in labelled("idefics3", (1, 1)).items()}
    batch["attention_mask"][0, -1] = 0
    batch["labels"][0, -1] = -100
    model, _ = bayesian("idefics3", num_members=1)
    valid: dict[str, Tensor | None] = {}
    with as_single_model(model.members, model.current[0]):
        hooks = LayerHooks(model.model, model.layout.names, model.members.names_of_images)
        with hooks.open():
            hooks.begin(batch)
            hidden = model.head.hidden({k: v for k, v in batch.items() if k != "labels"} | {"use_cache": False})[0]
            hooks.on_backward(
                lambda record: valid.update(dict.fromkeys(record.layer.names.values(), record.valid)), first=True
            )
            torch.autograd.backward(hidden, torch.ones_like(hidden), inputs=[hooks.anchor])
    assert valid.keys() == set(model.layout.names)
    for name, mask in valid.items():
        assert (mask is None) == (name in model.members.names_of_images), name


def test_images_without_the_ids_of_their_rows_are_refused() -> None:
    model, theta = bayesian("llava")
    batch = labelled("llava", (2, 1, 1, 0))
    embedded = model.core.get_input_embeddings()(batch.pop("input_ids")).detach()
    with pytest.raises(ValueError, match="the rows whose input_ids have their placeholders: give input_ids"):
        model(**batch, inputs_embeds=embedded, theta=theta, folded=True)

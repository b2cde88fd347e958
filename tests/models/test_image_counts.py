"""Images of several sizes, in several crops each: placeholders do not say which image belongs to which row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.layout import select
from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.fit.model_curvature import row_gradients_of_model
from hf_bayes.members.pictures import COUNTS
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.image_text import counting_images
from hf_bayes.models.language.causal_members import CausalMembers
from tests import multimodal, runs
from tests.members.reference import scattered, separate_gradients
from tests.models.trained import from_disk
from tests.multimodal import IMAGE
from tests.tiny_models import PAD, VOCABULARY, tiny_llama, with_lora

WIDE, HIGH, SQUARE = (8, 16), (16, 8), (16, 16)
CROPS = {WIDE: 3, HIGH: 3, SQUARE: 5}
TOKENS = {WIDE: 4 + 2 * 5, HIGH: 4 + 4 * 3, SQUARE: 4 + 4 * 5}
"""An image's patches as a whole and in crops, and a token after each line."""
SIZES = ((WIDE, SQUARE), (HIGH,), (WIDE,), (SQUARE, HIGH), (), (SQUARE,), (WIDE,), (HIGH,))
BOTH = r".*(multi_modal_projector.linear_1|language_model.*q_proj)"


def rows_of(sizes: tuple[tuple[tuple[int, int], ...], ...] = SIZES, dtype: torch.dtype = torch.float64) -> list[Any]:
    found = []
    for seed, own in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(8, VOCABULARY, (5 + seed % 2,), generator=generator).tolist()
        ids = [text[0], *[IMAGE] * sum(TOKENS[size] for size in own), *text[1:]]
        images = [torch.randn(CROPS[size], 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype) for size in own]
        found.append({"input_ids": ids, "images": images, "sizes": own})
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch as the processor makes it: the images of all rows, each with the largest number of crops."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, PAD)
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if images := [image for row in rows for image in row["images"]]:
        sizes = torch.tensor([size for row in rows for size in row["sizes"]])
        batch |= {"pixel_values": nn.utils.rnn.pad_sequence(images, True), "image_sizes": sizes}
    return {**batch, "labels": ids.masked_fill((ids == IMAGE) | (ids == PAD), -100)}


class Rows(torch.utils.data.Dataset):
    """Rows for collators that take images of any size."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.rows = rows_of(dtype=dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def adapted(target: str = BOTH) -> nn.Module:
    return with_lora(multimodal.llava_next(torch.float64).eval(), target_modules=target)


@pytest.mark.parametrize("target", [r".*language_model.*q_proj", BOTH])
def test_each_chain_reads_the_images_of_its_own_rows(target: str) -> None:
    model = adapted(target)
    theta = scattered(model, select(model), 2)
    bayesian, rows = attach(model, theta).eval(), rows_of()[:6]
    with pytest.raises(ValueError, match=r"6 rows has 7 images.* give each row one image"):
        bayesian.take_rows(collate(rows), torch.arange(3))
    batch = counting_images(bayesian, collate)(rows)
    assert batch[COUNTS].tolist() == [2, 1, 1, 2, 0, 1]
    leaf = theta.clone().requires_grad_()
    loss = bayesian(**batch, theta=leaf, folded=True).loss
    loss.sum().backward()
    own = [collate(rows[:3]), collate(rows[3:])]
    expected = separate_gradients(adapted(target), bayesian.layout, theta, own)
    for found, wanted in zip((loss.detach(), leaf.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # positions are rotated in float32
    for member, rest in enumerate(own):
        taken = bayesian.take_rows(batch, torch.arange(3 * member, 3 * member + 3))
        assert torch.equal(taken["image_sizes"], rest["image_sizes"])


def test_a_wrapped_model_does_not_get_the_counts() -> None:
    core = multimodal.llava_next()
    bayesian = attach(core, subspace="last_block", num_members=2).eval()
    batch = counting_images(bayesian, collate)(rows_of(dtype=torch.float32)[:4])
    seen: list[str] = []
    core.model.register_forward_pre_hook(lambda _, args, kwargs: seen.extend(kwargs), with_kwargs=True)
    assert bayesian(**batch).loss.isfinite()
    assert bayesian(**batch, theta=bayesian.theta, folded=True).loss.isfinite().all()
    assert bayesian.score(**{name: value for name, value in batch.items() if name != "labels"}).total.isfinite().any()
    assert "image_sizes" in seen
    assert COUNTS not in seen


def test_row_gradients_do_not_depend_on_batches() -> None:
    model = adapted()
    theta = scattered(model, select(model), 1)
    bayesian, rows = attach(model, theta).eval(), rows_of()
    found, alone = (
        torch.cat(list(row_gradients_of_model(bayesian, rows, collate=collate, batch_size=size))) for size in (4, 1)
    )
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def test_a_laplace_fit_does_not_depend_on_batches(tmp_path: Path) -> None:
    model = with_lora(from_disk(multimodal.llava_next(), tmp_path / "base"), target_modules=BOTH)
    config = LaplaceConfig(structure="diagonal")
    fits = [fit_laplace(model, Rows(), config, collate=collate, batch_size=size) for size in (8, 1)]
    found, alone = (fit.approximation.covariances[0].std for fit in fits)
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-5)


def test_chains_with_rows_of_their_own_are_trained(tmp_path: Path) -> None:
    found = []
    for number, fields in enumerate(({}, {"members_per_pass": 1})):
        base = from_disk(multimodal.llava_next(), tmp_path / f"base{number}")
        trainer = runs.trainer(
            tmp_path / f"posterior{number}", SGHMCConfig(num_chains=2, draws_per_chain=1), train=Rows(),
            collator=collate, model=with_lora(base, target_modules=BOTH), max_steps=8, per_device_train_batch_size=2,
            remove_unused_columns=False, **fields,
        )  # fmt: skip
        trainer.train()
        found.append(trainer.posterior.sample(None))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def prompts() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Prompts with the padding in front, with the numbers of their images and without."""
    batch = collate(rows_of(dtype=torch.float32)[:4])
    shifts = (batch["attention_mask"] == 0).sum(1).tolist()
    for name in ("input_ids", "attention_mask"):
        batch[name] = torch.stack([row.roll(shift) for row, shift in zip(batch[name], shifts, strict=True)])
    del batch["labels"]
    return {**batch, COUNTS: torch.tensor([2, 1, 1, 2])}, batch


def test_beams_and_samples_take_the_images_that_are_counted() -> None:
    bayesian = attach(multimodal.llava_next(), subspace="last_block", num_members=2).eval()
    counted, batch = prompts()
    settings = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    found = bayesian.generate(**counted, **settings, num_beams=2)
    for row in range(4):
        alone = bayesian.generate(**bayesian.take_rows(counted, torch.tensor([row])), **settings, num_beams=2)
        assert torch.equal(found.sequences[row], alone.sequences[0])
        torch.testing.assert_close(found.total[row], alone.total[0], rtol=1e-4, atol=1e-4)
    assert len(bayesian.generate(**counted, max_new_tokens=2, do_sample=True, num_return_sequences=2)) == 8
    with pytest.raises(ValueError, match=r"4 rows has 6 images.*as images_per_row"):
        bayesian.generate(**batch, **settings, num_beams=2)


def one_by_one(self: CausalMembers, model: Any, inputs: dict[str, Any], tensors_per_state: int) -> Iterator[Any]:
    """The slices of a model without memory."""
    for row in range(len(inputs["input_ids"])):
        yield model.take_rows(inputs, torch.tensor([row]))


def test_rows_with_images_that_are_not_counted_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bayesian = attach(multimodal.llava_next(), subspace="last_block", num_members=2).eval()
    expected = bayesian.score(**prompts()[1]).total
    monkeypatch.setattr(CausalMembers, "row_slices", one_by_one)
    counted, batch = prompts()
    assert [len(rows["input_ids"]) for rows in bayesian.row_slices(counted)] == [1, 1, 1, 1]
    assert [len(rows["input_ids"]) for rows in bayesian.row_slices(batch)] == [4]
    for inputs in (counted, batch):
        torch.testing.assert_close(bayesian.score(**inputs).total, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    text = {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")}
    assert len(list(bayesian.row_slices(text))) == 4


@pytest.mark.parametrize(
    ("method", "fields", "counts"),
    [
        (SGHMCConfig(num_chains=2), {}, True),
        (SGHMCConfig(num_chains=2), {"minibatch": "shared"}, True),  # parts of a batch give the noise
        (SGHMCConfig(num_chains=2, measure_gradient_noise=False), {"minibatch": "shared"}, False),
        (SGHMCConfig(num_chains=1, measure_gradient_noise=False), {}, False),
    ],
)
def test_images_are_counted_only_where_updates_read_rows_apart(
    tmp_path: Path, method: SGHMCConfig, fields: dict[str, Any], counts: bool
) -> None:
    trainer = runs.trainer(
        tmp_path, method, train=Rows(), collator=collate, model=multimodal.llava_next(), subspace="last_block",
        per_device_train_batch_size=8 // method.num_chains, remove_unused_columns=False, **fields,
    )  # fmt: skip
    assert (COUNTS in next(iter(trainer.get_train_dataloader()))) is counts


def test_a_probe_and_held_out_rows_read_images_of_their_own_rows(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = runs.trainer(
        tmp_path, SGHMCConfig(num_chains=1), train=Rows(), collator=collate, model=multimodal.llava_next(),
        subspace="last_block", remove_unused_columns=False, eval_dataset=Rows(), per_device_eval_batch_size=8,
    )  # fmt: skip
    assert all(COUNTS in batch for batch in trainer.rows.first_terms(100, most_rows=8))
    expected = trainer.evaluate()["eval_nll"]
    monkeypatch.setattr(CausalMembers, "row_slices", one_by_one)
    assert trainer.evaluate()["eval_nll"] == pytest.approx(expected, rel=1e-5)


def test_a_model_without_images_keeps_its_collator() -> None:
    assert counting_images(attach(tiny_llama(), subspace="last_layer"), collate) is collate
    rows = multimodal.idefics3()
    assert counting_images(attach(rows, subspace="last_layer"), collate) is collate

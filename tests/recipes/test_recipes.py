"""Each recipe against a loop by hand, bit for bit, and as users start it: from YAML, or by overriding one method."""

import ast
import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  # sets an environment variable, which a recipe's import would do inside a test
import torch
import torch.nn.functional as F
import yaml
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

import dream_trainer as dt
from dream_trainer import recipes
from tests.examples.launch import ROOT
from tests.programs import run_programs

YAML = ROOT / "examples" / "recipes"
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LLAMA = {"model_type": "llama", **SIZES}
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, its tokenizer, token files, and lines of prompts and answers."""
    directory = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(directory / "base")
    ByT5Tokenizer().save_pretrained(directory / "base")
    for name, count in {"train": 64, "val": 16}.items():
        lines = [{"prompt": f"{n} + 1 = ", "answer": f"{n + 1}"} for n in range(count)]
        lines = [{**line, "chosen": line["answer"], "rejected": "7" * (n % 5)} for n, line in enumerate(lines)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with dt.data.TokenFileWriter(directory / f"tokens/{name}/1.bin", vocabulary_size=384) as writer:
            for line in lines:
                writer.add([*line["prompt"].encode(), *line["answer"].encode(), 0])
    return directory


RUN: dict[str, Any] = {
    "experiment": "one",
    "training_parameters": dt.TrainingParameters(
        max_steps=4, val_every_n_steps=4, global_batch_size=4, train_batch_size=2
    ),
    "device_parameters": dt.DeviceParameters(device="cpu"),
    "optimizer": dt.OptimizerParameters(lr=0.01, weight_decay=0.0),
    "schedule": dt.ScheduleParameters(),
}


@contextmanager
def trained(recipe: type[Any], config: dt.DreamTrainerConfig) -> Iterator[tuple[Any, dict[str, nn.Module], list[Any]]]:
    """A trainer of four steps of two micro-batches, its models as they began, and its batches."""
    begun: dict[str, nn.Module] = {}
    batches = []

    class Recorded(recipe):
        def pre_fit(self) -> None:
            begun.update(copy.deepcopy(self.named_models()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.append(copy.deepcopy(batch))
            return super().training_step(batch, batch_idx)

    with Recorded(config) as trainer:
        trainer.fit()
        assert len(batches) == 8
        yield trainer, begun, batches


def by_hand(model: nn.Module, batches: list[Any], loss_of: Callable[[Any], tuple[Tensor, Any]]) -> nn.Module:
    """Four steps of AdamW under a constant rate, each over two micro-batches and their weights."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=0.01, weight_decay=0.0, fused=True)
    for step in range(4):
        total: Any = 0
        for batch in batches[2 * step : 2 * step + 2]:
            loss, weight = loss_of(batch)
            (loss * weight).backward()
            total = total + weight
        for parameter in learned:
            if parameter.grad is not None:
                parameter.grad *= 1 / total
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def next_token_loss(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """The mean over labels that are not -100, of rows in which each document sees itself."""

    def loss(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        documents, length = batch["documents"], batch["tokens"].shape[1]
        same = documents[:, :, None] == documents[:, None, :]
        mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
        logits = model(input_ids=batch["tokens"], attention_mask=mask, position_ids=batch["positions"]).logits
        count = (batch["labels"] != -100).sum()
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return losses.sum() / count, count

    return loss


def language_config(files: Path, **fields: Any) -> recipes.LanguageModelConfig:
    data = {"train_data": str(files / "tokens/train"), "val_data": str(files / "tokens/val")}
    return recipes.LanguageModelConfig(**RUN, row_length=32, **data, **fields)


def test_a_language_model_learns_as_by_hand(files: Path) -> None:
    config = language_config(files, architecture=LLAMA)
    with trained(recipes.LanguageModel, config) as (trainer, begun, batches):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        model.load_state_dict(begun["model"].state_dict())
        assert_same(trainer.model, by_hand(model, batches, next_token_loss(model)))


def test_adapters_learn_as_by_hand_on_the_bases_weights(files: Path) -> None:
    config = language_config(files, pretrained=str(files / "base"), lora=LORA)
    with trained(recipes.LanguageModel, config) as (trainer, begun, batches):
        base = AutoModelForCausalLM.from_pretrained(files / "base")
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **LORA))
        model.load_state_dict(
            {name: value for name, value in begun["model"].state_dict().items() if "lora_" in name}, strict=False
        )
        assert_same(trainer.model, by_hand(model, batches, next_token_loss(model)))


def test_perplexity_is_that_of_all_tokens(files: Path) -> None:
    config = language_config(files, architecture=LLAMA)
    with trained(recipes.LanguageModel, config) as (trainer, _, _):
        rows = dt.data.PackedRows(trainer.documents()[1], 32)
        batches = [{name: value[None] for name, value in rows[number].items()} for number in range(len(rows))]
        losses, counts = zip(*map(next_token_loss(trainer.model.eval()), batches), strict=True)
        mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        ((_, found),) = trainer.history_of("val/perplexity")
        assert found == pytest.approx(math.exp(mean), rel=1e-5)


def test_it_generates_the_likeliest_token_at_a_low_temperature(files: Path) -> None:
    config = language_config(files, architecture=LLAMA)
    with trained(recipes.LanguageModel, config) as (trainer, _, _):
        found = trainer.generate([5, 6], 4, temperature=1e-6)
        assert trainer.model.training
        tokens = torch.tensor([[5, 6]])
        for _ in range(4):
            tokens = torch.cat([tokens, trainer.model.eval()(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
        assert found == tokens[0].tolist()
        assert trainer.generate([5, 6], 4, seed=1) == trainer.generate([5, 6], 4, seed=1)


def tuning(config: type[Any], files: Path, **fields: Any) -> Any:
    data = {"train_data": str(files / "train.jsonl"), "val_data": str(files / "val.jsonl")}
    return config(**RUN, pretrained=str(files / "base"), row_length=32, **data, **fields)


def test_fine_tuning_learns_answers_only_as_by_hand(files: Path) -> None:
    config = tuning(recipes.SupervisedFineTuningConfig, files)
    with trained(recipes.SupervisedFineTuning, config) as (trainer, _, batches):
        model = AutoModelForCausalLM.from_pretrained(files / "base").train()
        assert_same(trainer.model, by_hand(model, batches, next_token_loss(model)))
        tokenizer = ByT5Tokenizer()
        for batch in batches:
            texts = [str(tokenizer.decode(row[row >= 0])) for row in batch["labels"]]
            # The ends of answers tell them apart.
            learned = [text for row in texts for text in row.split("</s>") if text]
            assert all(text.isdigit() for text in learned)
            assert learned


def test_dpo_learns_as_by_hand(files: Path) -> None:
    """Equation 7 of Rafailov et al. 2023; with smoothed labels, equation 3 of Mitchell's note of 2023."""
    config = tuning(recipes.DPOConfig, files, beta=0.3, label_smoothing=0.2)
    with trained(recipes.DPO, config) as (trainer, _, batches):
        policy, reference = (AutoModelForCausalLM.from_pretrained(files / "base").train() for _ in range(2))

        def likelihood(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = model(input_ids=tokens).logits[:, :-1].transpose(1, 2)
            return -F.cross_entropy(logits, labels[:, 1:], ignore_index=-100, reduction="none").sum(1)

        def loss(batch: dict[str, Tensor]) -> tuple[Tensor, int]:
            tokens, labels = batch["tokens"].flatten(0, 1), batch["labels"].flatten(0, 1)
            with torch.no_grad():
                before = likelihood(reference, tokens, labels)
            better, worse = (0.3 * (likelihood(policy, tokens, labels) - before).view(-1, 2)).T
            odds = better - worse
            return (-0.8 * F.logsigmoid(odds) - 0.2 * F.logsigmoid(-odds)).mean(), 1

        assert_same(trainer.model, by_hand(policy, batches, loss))
        assert_same(trainer.reference, reference)
        tokens, labels = batches[0]["tokens"], batches[0]["labels"]
        assert torch.equal(tokens[labels >= 0], labels[labels >= 0])
        first = ByT5Tokenizer().batch_decode(tokens[0])
        prompt = first[0].split("= ")[0]
        assert first[1].startswith(prompt)
        preferred = first[0].split("= ")[1].split("<")[0]
        assert int(preferred) == int(prompt.split(" +")[0]) + 1


def test_dpo_says_which_pairs_it_cuts_off(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tuning(recipes.DPOConfig, files)
    config.row_length = 8
    trainer = recipes.DPO(config)
    pair = trainer.encode({"prompt": "ab", "chosen": "cd", "rejected": "cdefghi"})  # and the token of an end
    assert [len(tokens) for tokens in pair["tokens"]] == [5, 8]
    assert "token 10" in caplog.text
    assert "row_length=8" in caplog.text


def test_a_classifier_learns_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(YAML))
    fields: dict[str, Any] = {"model": "digits:network", "model_arguments": {"width": 8}, "data": "digits:digits"}
    config = recipes.ClassifierConfig(**RUN, label_smoothing=0.1, **fields)
    with trained(recipes.Classifier, config) as (trainer, begun, batches):
        model = begun["model"]

        def loss(batch: list[Tensor]) -> tuple[Tensor, int]:
            return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1), 1

        assert_same(trainer.model, by_hand(model, batches, loss))
        images, labels = sys.modules.pop("digits").digits()[1].tensors
        probabilities = model(images).softmax(1)
        torch.testing.assert_close(trainer.predict("val"), probabilities.detach())
        accuracy = (probabilities.argmax(1) == labels).float().mean()
        assert trainer.evaluate()["val/accuracy"] == pytest.approx(float(accuracy))
        assert trainer.collate is torch.utils.data.default_collate  # not a method: its trainer cannot be pickled


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("classifier", "val/accuracy"),
        ("language_model", "val/perplexity"),
        ("fine_tuning", "val/perplexity"),
        ("preferences", "val/margin"),
    ],
)
def test_it_runs_from_a_yaml_file(name: str, metric: str, files: Path, tmp_path: Path) -> None:
    """As `python -m` does with the module and `--config`."""
    for file in ("base", "train.jsonl", "val.jsonl", "tokens"):
        (tmp_path / file).symlink_to(files / file)
    few = "--training.max-steps 2 --training.val-every-n-steps 2 --training.global-batch-size 8"
    words = [
        name,
        "--config",
        str(YAML / f"{name}.yaml"),
        *few.split(),
        "--training.train-batch-size=8",
        *(["--row-length", "32"] if name != "classifier" else []),
    ]
    code = (
        f"import runpy, sys\nsys.argv = {words!r}\nsys.path.insert(0, {str(YAML)!r})\n"
        f"runpy.run_module('dream_trainer.recipes.{name}', run_name='__main__', alter_sys=True)"
    )
    (ended,) = run_programs(code, 1, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, 150.0)
    assert ended.status == 0, ended
    (lines,) = (tmp_path / "runs").rglob("metrics.jsonl")
    assert metric in lines.read_text()
    assert lines.parent.name == yaml.safe_load((YAML / f"{name}.yaml").read_text())["experiment"]


def test_one_method_makes_another_trainer(files: Path, tmp_path: Path) -> None:
    class Names(recipes.SupervisedFineTuning):
        def encode(self, line: Mapping[str, Any]) -> dict[str, Any]:
            return super().encode({"prompt": line["name"], "answer": line["greeting"]})

    (tmp_path / "names.jsonl").write_text("".join(f'{{"name": "{n}", "greeting": "hello"}}\n' for n in range(16)))
    words = f"--experiment one --pretrained {files / 'base'} --train-data names.jsonl --row-length 8"
    limits = "--training.max-steps 1 --training.train-batch-size 4 --device.device cpu"
    with Names.from_cli(args=[*words.split(), *limits.split()]) as trainer:
        trainer.fit()
    assert trainer.global_step == 1


RECIPES = sorted((ROOT / "dream_trainer" / "recipes").glob("[a-z]*.py"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_it_is_short_and_built_on_what_users_have(file: Path) -> None:
    source = file.read_text()
    assert len(source.splitlines()) < 150
    # Not by `dt.`, as users write it: mypy would see one cycle of the whole package, and lose types in it.
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module and node.module.startswith("dream_trainer.")]
    names = {alias.name for node in ours if ".recipes." not in f"{node.module}." for alias in node.names}
    assert names <= {*dt.__all__, *dt.data.__all__, *dt.optim.__all__}
    assert "._" not in source.replace("self._", "._")

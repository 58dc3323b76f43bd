"""Events: who hears what, in which order, with which arguments; and `describe()`, which tells it beforehand."""

import inspect
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import EVENTS
from tests.callbacks.factories import FACTORIES
from tests.trainer.small import Alone, Spread, Validates, batches, fit, make_config, weights


class Hears(dt.Callback):
    def __init__(self, book: list[Any], name: str, order: int = 0) -> None:
        self.book, self.name, self.order = book, name, order


def hearing(event: str) -> Any:
    def method(self: Hears, trainer: Any, *args: Any) -> None:
        self.book.append((event, self.name, *args))

    return method


HearsAll = type("HearsAll", (Hears,), {event: hearing(event) for event in EVENTS})


class Checked(Validates, Alone, dt.EvalMixin, dt.CheckpointMixin, dt.LoggerMixin):
    pass


def test_events_come_in_their_documented_order() -> None:
    book: list[Any] = []
    config = make_config(n_epochs=1, gradient_accumulation_steps=2, callbacks=[HearsAll(book, "c")], log_every=1)
    with Checked(config, batches(2), batches(1)) as trainer:
        trainer.fit()
        trainer.save_checkpoint()
    assert [event for event, *_ in book] == [
        *("pre_launch", "post_launch", "pre_configure", "post_configure", "pre_setup", "post_setup", "pre_fit"),
        *("pre_epoch", "pre_train_batch", "post_train_batch", "pre_train_batch"),
        *("pre_optimizer_step", "post_optimizer_step", "post_train_batch", "post_train_step", "on_log"),
        *("pre_val_epoch", "pre_val_batch", "post_val_batch", "on_log", "post_val_epoch", "post_epoch", "post_fit"),
        *("on_save", "teardown"),
    ]


@pytest.mark.pitfall(50)
def test_two_callbacks_of_one_class_both_hear_and_the_first_is_found() -> None:
    """After the trainer, by order and then by position; the first that was given is found."""
    book: list[Any] = []
    callbacks = [HearsAll(book, "late", 5), HearsAll(book, "a"), HearsAll(book, "b"), HearsAll(book, "early", -1)]

    class Trainer(Alone):
        def post_train_step(self) -> None:
            book.append(("post_train_step", "trainer"))

    trainer = fit(Trainer(make_config(n_epochs=1, callbacks=callbacks), batches(1)))
    heard = [name for event, name, *_ in book if event == "post_train_step"]
    assert heard == ["trainer", "early", "a", "b", "late"]
    assert trainer.get_callback(HearsAll) is callbacks[0]
    with pytest.raises(KeyError, match="Missing"):
        trainer.get_callback(type("Missing", (dt.Callback,), {}))


def test_batch_events_get_the_batch_its_number_and_a_detached_result() -> None:
    class Nested(Validates, Alone):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            result = super().training_step(batch, batch_idx)
            return result | {"nested": {"list": [self.model(batch[0])]}, "number": batch_idx * 10}

    book: list[Any] = []
    fit(Nested(make_config(n_epochs=1, callbacks=[HearsAll(book, "c")]), batches(2), batches(1)))
    seen = []
    for event, _, given, batch_idx in (heard for heard in book if heard[0].endswith("_batch")):
        if event == "post_train_batch":
            assert not given["loss"].requires_grad
            assert not given["nested"]["list"][0].requires_grad
        told = given[2].tolist() if event.startswith("pre") else given.get("number", sorted(given))
        seen.append((event, told, batch_idx))
    assert seen == [
        ("pre_train_batch", [0, 1], 0),
        ("post_train_batch", 0, 0),
        ("pre_train_batch", [2, 3], 1),
        ("post_train_batch", 10, 1),
        ("pre_val_batch", [0, 1], 0),
        ("post_val_batch", ["loss"], 0),
    ]


def test_optimizer_step_events_get_the_model_and_the_optimizer() -> None:
    class Looks(dt.Callback):
        def pre_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            before.append(weights(model))
            assert (model, optimizer) == (trainer.model, trainer.optimizer)

        def post_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            assert all(p.grad is not None for p in model.parameters())
            assert not any(torch.equal(value, before[-1][name]) for name, value in weights(model).items())

    before: list[Any] = []
    fit(Alone(make_config(n_epochs=1, callbacks=[Looks()]), batches(2)))
    assert len(before) == 2


@pytest.mark.pitfall(50)
def test_callbacks_replace_no_method_of_the_trainer() -> None:
    built = [make() for name, make in FACTORIES.items() if name != "WeightTransfer"]  # it wants two models
    with Checked(make_config(n_epochs=1, callbacks=built), batches(2), batches(1)) as trainer:
        methods = {name for name, value in inspect.getmembers(type(trainer), inspect.isfunction)}
        trainer.fit()
    assert methods & set(vars(trainer)) == set()


def test_something_that_is_no_callback_is_refused() -> None:
    with pytest.raises(TypeError, match="not a Callback"):
        dt.CallbackCollection([object()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"Progress.* is not a Callback: build it"):
        dt.CallbackCollection([dt.callbacks.Progress])  # type: ignore[list-item]


def test_describe_shows_setup_order_and_listeners_before_launch(capsys: pytest.CaptureFixture[str]) -> None:
    class Late(dt.Callback):
        order = 7
        main_process_only = True

        def post_train_step(self, trainer: Any) -> None: ...

        def post_fit(self, trainer: Any) -> None: ...

    class Trainer(Spread):
        def post_train_step(self) -> None: ...

    trainer = Trainer(make_config(callbacks=[Late()]))
    text = trainer.describe()
    assert capsys.readouterr().out.strip() == text.strip()
    for stage in ("fully_shard / replicate", "materialise", "resume"):
        assert f"| {stage} |" in text
    assert "| post_train_step | Trainer | first | all |\n|  | Late | 7 | 0 |" in text
    assert "| post_fit | Late | 7 | 0 |" in text
    assert "| pre_fit | SanityChecks | 1000 | all |" in text
    assert "pre_epoch" not in text


@pytest.mark.pitfall(60)
def test_the_setup_order_that_describe_prints_is_the_order_in_which_hooks_run() -> None:
    ran: list[str] = []

    class Trainer(Spread):
        pass

    hooks = [
        *("configure_models", "init_weights", "load_pretrained", "configure_dataloaders"),
        *("configure_optimizers", "configure_schedulers", "configure_metrics"),
    ]
    for hook in hooks:

        def run(self: Any, hook: str = hook) -> Any:
            ran.append(hook)
            return getattr(super(Trainer, self), hook)()

        setattr(Trainer, hook, run)
    with Trainer(make_config(n_epochs=1), batches(1)) as trainer:
        text = trainer.describe()
        trainer.fit()
    assert ran == hooks
    places = [text.index(f"| {hook} |") for hook in hooks]
    assert places == sorted(places)


def test_validation_events_come_in_pairs_in_sanity_validation_in_training_and_in_evaluate() -> None:
    book: list[Any] = []
    config = make_config(n_epochs=2, num_sanity_val_steps=1, callbacks=[HearsAll(book, "c")])
    with Checked(config, batches(2), batches(1)) as trainer:
        for validate, count in ((trainer.evaluate, 1), (trainer.fit, 3), (lambda: trainer.evaluate(batches(1)), 1)):
            book.clear()
            validate()
            heard = [event for event, *_ in book if "_val_" in event]
            assert heard == ["pre_val_epoch", "pre_val_batch", "post_val_batch", "post_val_epoch"] * count

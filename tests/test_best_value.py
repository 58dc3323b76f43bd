"""Which values of a metric are best, by what is known of it."""

from __future__ import annotations

import pytest

from tests.api import ConfigError, mode_by_name, mode_of

LOWER = """val/loss loss val/near/loss val/val_loss val/reward_loss val/accuracy_loss val/perplexity val/nll val/rmse
val/WER val/word_error_rate val/cross_entropy val/crossEntropy val/bits_per_byte val/error val/loss.0""".split()
HIGHER = """val/accuracy accuracy val/near/accuracy val/loss/accuracy val/acc@1 val/top5 val/token_accuracy val/f1
val/f1_score val/F1 val/BinaryAUROC val/auc val/mAP val/mAP50 val/mIoU val/mean_reward val/R2 val/rougeL val/bleu
val/win_rate val/f1_macro val/recall_at_5 val/acc_top1 val/accuracy_val""".split()
UNKNOWN = ["val/score", "val/negative_loss", "val/x", "", "val/error_accuracy_x", "val/length", "val/f", "val/lossy"]
# Known words beside others that change what they mean.
UNKNOWN += """accuracy_drop recall_gap auc_std return_std accuracy_variance acc_diff 1-accuracy time_to_success
steps_to_success success_time rewards_rejected reward_kl accuracy_rank feature_map loss_reduction error_reduction
perplexity_drop error_free no_loss win_loss""".split()


@pytest.mark.parametrize(
    ("metric", "mode"),
    [*((name, "min") for name in LOWER), *((name, "max") for name in HIGHER), *((name, None) for name in UNKNOWN)],
)
def test_the_words_of_the_last_part_of_a_name_say_which_values_are_better(metric: str, mode: str | None) -> None:
    assert mode_by_name(metric) == mode


def test_what_was_said_counts_over_the_metrics_object_and_that_over_its_name() -> None:
    def found(metric: str, mode: str | None, higher_is_better: bool | None) -> str:
        return mode_of(
            metric,
            mode,  # type: ignore[arg-type]
            higher_is_better=higher_is_better,
            named_by="monitor",
            set_by="mode",
        )

    assert found("val/accuracy", "min", True) == "min"
    assert found("val/accuracy", None, False) == "min"
    assert found("val/x", None, True) == "max"
    assert found("val/accuracy", None, None) == "max"
    with pytest.raises(ConfigError, match=r'^monitor=\'val/x\' does not say whether.*Set mode="min" or "max"\.$'):
        found("val/x", None, None)

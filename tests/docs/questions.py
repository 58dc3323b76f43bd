"""Thirty questions of users: the page of `llms.txt` that answers each, and what its text must have for that."""

from typing import NamedTuple


class Question(NamedTuple):
    """One question.

    Attributes:
        asked: As a user asks it.
        page: The page of docs/ that answers it.
        answer: Parts of the answer; each is in the page's text.
    """

    asked: str
    page: str
    answer: tuple[str, ...]


QUESTIONS = [
    Question("Which Python and PyTorch does it need?", "install.md", ("Python 3.11", "PyTorch 2.11")),
    Question("Has it been tested on GPUs?", "faq.md", ("an H200", "several GPUs yet")),
    Question("How do I resume a run after it was killed?", "checkpoints.md", ("run the same command again",)),
    Question("Which checkpoint does a restart take if the newest is damaged?", "checkpoints.md", ("next older one",)),
    Question("How do I keep the last 2 and the best checkpoint?", "checkpoints.md", ("keep_last=2", "keep_best=1")),
    Question("Can I resume on another number of GPUs?", "checkpoints/resuming.md", ("global_batch_size", "any layout")),
    Question("What does SIGTERM do?", "checkpoints/signals.md", ("SIGTERM", "143", "finished and saved")),
    Question("How do I save my own counters?", "checkpoints/your-own-state.md", ("load_state_dict", "rank_state_dict")),
    Question("How much host memory does a background save take?", "checkpoints/background.md", ("one more copy",)),
    Question("How do I load only weights from another checkpoint?", "pretrained.md", ("init_from",)),
    Question("How do I use FSDP, and how DDP?", "replicas-and-shards.md", ("DeviceParameters.ddp()", "fsdp()")),
    Question("How do I train in bf16?", "precision.md", ('"bf16"', "--device.precision bf16")),
    Question("How do I train in float8?", "float8.md", ("torchao", "tensorwise")),
    Question(
        "What do I do about CUDA out of memory?", "troubleshooting.md", ("CUDA out of memory", "train_batch_size")
    ),
    Question("My run hangs. Which rank is to blame?", "debug-hangs.md", ("stacks", "hang_timeout_seconds")),
    Question("How do I train a GAN?", "several-models.md", ("A GAN", "self.frozen(")),
    Question("How do I weight a loss by tokens?", "api/methods.md", ("weight",)),
    Question("How do I accumulate gradients?", "api/methods.md", ("gradient_accumulation_steps",)),
    Question("How do I set a cosine schedule with warm-up?", "schedules.md", ("cosine", "warmup_steps")),
    Question("How do I exclude biases from weight decay?", "optimizers.md", ("weight_decay", "GroupParameters")),
    Question("How do I log to Weights & Biases?", "trackers.md", ("WandbParameters", '"wandb"')),
    Question("How do I stop early?", "callbacks/early-stopping.md", ("EarlyStopping", "patience")),
    Question("How do I see tokens per second and MFU?", "callbacks/throughput.md", ("tokens_per_second", "mfu")),
    Question("How do I write a callback?", "callbacks/your-own.md", ("Callback", "post_train_step")),
    Question("How do I train LoRA adapters?", "fine-tuning.md", ("get_peft_model", "load_base_weights")),
    Question("How do I train with DPO?", "preferences.md", ("reference", "beta")),
    Question("How do I use an IterableDataset on several ranks?", "data.md", ("StreamLoader", "PerRankLoader")),
    Question(
        "How do I pack sequences without attention between documents?",
        "language-data.md",
        ("PackedRows", "packed_attention"),
    ),
    Question("How do I start on two nodes?", "hosts.md", ("--nnodes=2",)),
    Question(
        "What is `dataloader_shuffle` or `save_dir` of my small trainer called here?",
        "coming-from/small-trainers.md",
        ("dataloader_shuffle", "save_dir", "name"),
    ),
]

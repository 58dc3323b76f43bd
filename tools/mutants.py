"""Applies one-line faults to a copy of the repository, one at a time, and runs the tests that must notice each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` in `file` becomes `new`, and `tests` (pytest arguments) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


TRAINER, DATA, META, SAVED = (
    "dream_trainer/trainer",
    "dream_trainer/data",
    "dream_trainer/meta",
    "dream_trainer/checkpoint",
)
PARITY = "tests/trainer/test_arithmetic_parity.py"
TURNS = "tests/trainer/test_turns.py"
UNEVEN = "tests/trainer/test_uneven_use.py"
MUON = "tests/optim/test_muon.py"

LOCAL_SGD = "tests/trainer/test_local_sgd.py"
LOCAL_CHECKPOINTS = "tests/checkpoint/test_local_checkpoints.py"

MUTANTS = [
    Mutant(
        "short window scaled by the full one",
        "dream_trainer/trainer/step/accumulation.py",
        "self.counted_batches = size",
        "self.counted_batches = self._trainer.accumulation_steps",
        f"{PARITY} -k [1]",
    ),
    Mutant(
        "a step that is refused counts",
        "dream_trainer/trainer/step/optimizer_step.py",
        "        self._accumulation.check_step()\n",
        "        self._accumulation.check_step()\n        self._accumulation.begin_step()\n",
        "tests/trainer/test_edges.py",
    ),
    Mutant(
        "compiled code takes what a collective has not given yet",
        "dream_trainer/compat/async_collectives.py",
        "return _Waited.apply(value) if isinstance(value, AsyncCollectiveTensor) else value",
        "return value",
        "tests/compat/test_async_collectives.py",
    ),
    Mutant(
        "weights not summed over ranks",
        "dream_trainer/trainer/step/optimizer_step.py",
        "torch.zeros_like(total), ranks / total)",
        "torch.zeros_like(total), 1 / total)",
        f"{PARITY} -k [2]",
    ),
    Mutant(
        "replicated elements counted twice in the norm",
        "dream_trainer/trainer/step/gradients.py",
        ".square() / group.copies",
        ".square()",
        f"{PARITY} -k [2]",
    ),
    Mutant(
        "gradients scaled up to the clipping limit",
        "dream_trainer/trainer/step/optimizer_step.py",
        "for value in (limit, 1e-6, 1.0)",
        "for value in (limit, 1e-6, 1e9)",
        "tests/trainer/test_accumulation.py",
    ),
    Mutant(
        "steps counted without a step",
        "dream_trainer/trainer/counters.py",
        "self.global_step += stepped",
        "self.global_step += 1",
        "tests/trainer/test_accumulation.py tests/trainer/test_loop.py",
    ),
    Mutant(
        "steps after a non-finite one train on",
        "dream_trainer/trainer/step/nonfinite.py",
        "self._latch.add_(weighed, alpha=0)",
        "weighed * 0",
        "tests/trainer/test_nonfinite.py",
    ),
    Mutant(
        "modules kept in eval mode flipped to train",
        "dream_trainer/trainer/validation.py",
        "module.training = mode",
        "module.training = True",
        "tests/trainer/test_validation.py",
    ),
    Mutant(
        "validation moves training's random stream",
        "dream_trainer/distributed/seeds.py",
        "torch_state.raw, of_python, numpy_generator = states",
        "_, of_python, numpy_generator = states",
        "tests/trainer/test_validation.py tests/data",
    ),
    Mutant(
        "a rank brings nothing for what it did not use",
        "dream_trainer/compat/fully_shard.py",
        "elif gathered.requires_grad:",
        "elif False:",
        UNEVEN,
    ),
    Mutant(
        "what no rank used decays under sharding",
        "dream_trainer/trainer/step/optimizer_step.py",
        "plan.shared[place].grad = None",
        "pass",
        UNEVEN,
    ),
    Mutant(
        "one rank works on every matrix",
        "dream_trainer/optim/matrix_exchange.py",
        "        heapq.heapreplace(hands, (load + costs[i], owners[i]))\n",
        "",
        MUON,
    ),
    Mutant(
        "the momentum of matrices that other replicas work on stands still",
        "dream_trainer/optim/muon.py",
        "        for place, (parameter, group) in enumerate(members):\n            update",
        "        for place, (parameter, group) in enumerate(members):\n"
        "            if place not in exchange.wanted:\n                continue\n            update",
        MUON,
    ),
    Mutant(
        "Adafactor's statistics are those of a shard",
        "dream_trainer/optim/adafactor.py",
        "        dist.all_reduce(flat, group=group)\n",
        "        pass\n",
        "tests/optim/test_adafactor.py",
    ),
    Mutant(
        "a save of other tensors takes the last one's plan",
        "dream_trainer/checkpoint/dcp_writer.py",
        "return self._known.plan is not None and self._known.layout == self._layout",
        "return self._known.plan is not None",
        "tests/checkpoint/test_known_plan.py",
    ),
    Mutant(
        "replicas do not share Muon's work",
        "dream_trainer/trainer/mixins/setup.py",
        "            optimizer.replicas = trainer.world.averaging_group()\n",
        "            pass\n",
        "tests/optim/test_in_a_trainer.py",
    ),
    Mutant(
        "what no rank used decays in replicas",
        "dream_trainer/trainer/step/buckets.py",
        "if there[i]:",
        "if True:",
        UNEVEN,
    ),
    Mutant(
        "a half type rounds the weights of a window",
        "dream_trainer/trainer/step/buckets.py",
        "last.dtype not in (torch.float32, torch.float64) or last.n_ranks",
        "last.n_ranks",
        "tests/trainer/test_replicas.py",
    ),
    Mutant(
        "a gradient that was sent may still change",
        "dream_trainer/trainer/step/overlap.py",
        "self._refuse_changes()",
        "pass",
        "tests/trainer/test_replicas.py",
    ),
    Mutant(
        "a bucket leaves before backward has given all of it",
        "dream_trainer/trainer/step/overlap.py",
        "and not self._awaited[len(self._sent)]",
        "and True",
        "tests/trainer/test_replicas.py",
    ),
    Mutant(
        "what is frozen at its step is not averaged",
        "dream_trainer/trainer/step/buckets.py",
        "if p not in asleep] if asleep else b.parameters",
        "if p.requires_grad or p.grad is not None]",
        "tests/trainer/test_replicas.py",
    ),
    Mutant(
        "a sharded block that one rank left out is no error",
        "dream_trainer/trainer/step/optimizer_step.py",
        "not in self._local_gradients.ran",
        "is None",
        UNEVEN,
    ),
    Mutant(
        "a model of earlier micro-batches alone is never reduced",
        "dream_trainer/trainer/step/optimizer_step.py",
        "self._parallel.reduce_what_waits(plan.parameters)",
        "pass",
        TURNS,
    ),
    Mutant(
        "a window may leave gradients in a model",
        "dream_trainer/trainer/step/accumulation.py",
        "self.turns.finish_window(self.size)",
        "pass",
        TURNS,
    ),
    Mutant(
        "a critic's turn uses what the generator's loss left",
        "dream_trainer/trainer/step/turns.py",
        "if self._mark(optimizer) != self._marks[optimizer]:",
        "if False:",
        TURNS,
    ),
    Mutant(
        "a window that runs again counts gradients twice",
        "dream_trainer/trainer/base.py",
        "self._parallel.gradients.drop_what_waits()",
        "pass",
        TURNS,
    ),
    Mutant(
        "a second turn scaled by the first's micro-batches",
        "dream_trainer/trainer/step/optimizer_step.py",
        "n_batches = 1 if",
        "n_batches = self._window.counted_batches if",
        TURNS,
    ),
    Mutant(
        "what was frozen takes gradients when it is computed again",
        "dream_trainer/modules/recompute.py",
        "if parameter.requires_grad is not required]",
        "if False]",
        TURNS,
    ),
    Mutant(
        "the graph of a gradient loses its weights",
        "dream_trainer/compat/fully_shard.py",
        "self.reshard_after_backward = False",
        "pass",
        "tests/trainer/test_double_backward.py",
    ),
    Mutant(
        "batch norm's statistics differ by rank",
        "dream_trainer/trainer/base.py",
        "self._parallel.average_statistics()",
        "pass",
        "tests/trainer/test_odd_parameters.py",
    ),
    Mutant(
        "max_norm is lost on several ranks",
        "dream_trainer/modules/sharding.py",
        "module.max_norm is not None:",
        "False:",
        "tests/trainer/test_odd_parameters.py",
    ),
    Mutant(
        "scalars are sharded",
        "dream_trainer/modules/sharding.py",
        "if parameter.ndim == 0 or is_shared",
        "if is_shared",
        "tests/trainer/test_odd_parameters.py",
    ),
    Mutant(
        "gathered parameters stay frozen",
        "dream_trainer/modules/sharding.py",
        "gathered.requires_grad_(sharded.requires_grad)",
        "pass",
        "tests/modules/test_sharding.py",
    ),
    Mutant(
        "every epoch in the same order",
        "dream_trainer/data/order.py",
        'hash_seed(b"order", seed, epoch)',
        'hash_seed(b"order", seed)',
        "tests/data",
    ),
    Mutant(
        "loader draws from the global generator",
        "dream_trainer/data/loader.py",
        "generator=self.generator,",
        "",
        "tests/data",
    ),
    Mutant(
        "a loader's state kept by reference",
        "dream_trainer/data/foreign_stream.py",
        "copy.deepcopy(self._stateful.state_dict())",
        "self._stateful.state_dict()",
        "tests/data/test_foreign_resume.py",
    ),
    Mutant(
        "a pass's first draw comes from the batch before",
        "dream_trainer/data/pass_draws.py",
        "            set_python_state(self._python_start)\n            default_generator",
        "            default_generator",
        "tests/data/test_pass_draws.py",
    ),
    Mutant(
        "a sample that begins to draw is not seeded",
        "dream_trainer/data/sample_seeds.py",
        "            if not more:\n",
        "            if True:\n",
        "tests/data/test_seeding.py",
    ),
    Mutant(
        "loaders of one's own draw unseeded",
        "dream_trainer/data/foreign.py",
        "if type(loader) in (list, tuple, range):",
        "if not isinstance(loader, DataLoader):",
        "tests/data/test_foreign_resume.py",
    ),
    Mutant(
        "on another number of ranks a pass is read again by batches",
        "dream_trainer/data/foreign_stream.py",
        "while batches < position.batches if samples is None else self._samples < samples:",
        "while batches < position.batches:",
        "tests/data/test_foreign_resume.py",
    ),
    Mutant(
        "a finished pass is read again",
        "dream_trainer/data/foreign_stream.py",
        "        elif is_pass_over:\n            self._begin_pass(position.epoch + 1)\n            return\n",
        "",
        "tests/data/test_foreign_resume.py",
    ),
    Mutant(
        "a loader that is at its end has an empty pass",
        "dream_trainer/data/foreign_stream.py",
        "if not batches and self._holds_end:",
        "if False:",
        "tests/data/test_foreign_resume.py",
    ),
    Mutant(
        "configs of ranks are not compared",
        "dream_trainer/trainer/launch.py",
        "    refuse_different_configs(trainer)\n",
        "",
        "tests/trainer/test_rank_differences.py",
    ),
    Mutant(
        "each rank plans by its own loader's length",
        "dream_trainer/trainer/rank_differences.py",
        "return None if None in steps else min(steps)",
        "return stream.steps_per_epoch",
        "tests/trainer/test_rank_differences.py",
    ),
    Mutant(
        "optimizers of ranks are not compared",
        "dream_trainer/trainer/mixins/setup.py",
        "    refuse_different_optimizers(trainer)\n",
        "",
        "tests/trainer/test_rank_differences.py",
    ),
    Mutant(
        "data that ranks split already are split again",
        "dream_trainer/trainer/rank_differences.py",
        "    _refuse_other_samples(trainer, known, [summaries for _, _, summaries in data_of_ranks])\n",
        "",
        "tests/trainer/test_rank_differences.py",
    ),
    Mutant(
        "a dataset keeps the length of its first pass",
        "dream_trainer/data/stream.py",
        "self._length = len(dataset)\n            if position.samples",
        "self._length = before\n            if position.samples",
        "tests/trainer/test_changing_data.py",
    ),
    Mutant(
        "a pass goes on over a dataset of another length",
        "dream_trainer/data/stream.py",
        "if position.samples and position.length not in (None, self._length):",
        "if False:",
        "tests/trainer/test_changing_data.py",
    ),
    Mutant(
        "a loader assigned between epochs is ignored",
        "dream_trainer/trainer/base.py",
        "        follow_train_dataloader(self)\n",
        "",
        "tests/trainer/test_changing_data.py",
    ),
    Mutant(
        "metrics of training start anew after a resume",
        "dream_trainer/checkpoint/metric_state.py",
        "        setattr(part, key, value)\n",
        "        pass\n",
        "tests/trainer/test_training_metrics.py",
    ),
    Mutant(
        "fewer ranks lose the metrics of the others",
        "dream_trainer/trainer/restored_state.py",
        "[world.data_rank :: world.data_size]",
        "[world.data_rank : world.data_rank + 1]",
        "tests/trainer/test_training_metrics.py",
    ),
    Mutant(
        "another optimizer goes on with the last one's options",
        "dream_trainer/checkpoint/optimizer_state.py",
        "if saved not in (None, current):",
        "if False:",
        "tests/trainer/test_training_metrics.py",
    ),
    Mutant(
        "a run whose steps nobody counts goes on for ever",
        "dream_trainer/trainer/nothing_trained.py",
        "trains = self._writes() != self._writes_before",
        "trains = False",
        "tests/trainer/test_endless.py",
    ),
    Mutant(
        "an order that ends too early is waited for",
        "dream_trainer/data/feed.py",
        "if len(window.batches) != window.size:",
        "if False:",
        "tests/trainer/test_endless.py",
    ),
    Mutant(
        "a signal to the job ends a worker that was just forked",
        "dream_trainer/distributed/signals.py",
        "if number == signal.SIGTERM and _starts_workers:",
        "if False:",
        "tests/data/test_worker_start.py",
    ),
    Mutant(
        "a worker that hangs in its fork is waited for",
        "dream_trainer/compat/forked_start.py",
        "    return bool(said)\n",
        "    return True\n",
        "tests/compat/test_forked_start.py",
    ),
    Mutant(
        "a scheduler's signal kills the workers of foreign loaders",
        "dream_trainer/data/foreign.py",
        "    loader.worker_init_fn = WorkerInit(worker_init_fn)\n",
        "",
        "tests/faults/test_foreign_workers.py",
    ),
    Mutant(
        "one augmentation for a whole epoch",
        "dream_trainer/data/order.py",
        'hash_seed(b"sample", seed, epoch, index)',
        'hash_seed(b"sample", seed, epoch)',
        "tests/data",
    ),
    Mutant(
        "cut window takes the wrong batches",
        "dream_trainer/data/feed.py",
        "list(window.batches)[:size]",
        "list(window.batches)[-size:]",
        "tests/trainer/test_feed.py -k [2]",
    ),
    Mutant(
        "counters not restored",
        "dream_trainer/trainer/restored_state.py",
        'trainer.progress.load_state_dict(_progress(shared["progress"], branch))',
        "pass",
        "tests/trainer/test_checkpoint_mixin.py",
    ),
    Mutant(
        "random states not restored",
        "dream_trainer/trainer/restored_state.py",
        'set_random_state(state["random"], tensors, world.device)',
        "pass",
        "tests/trainer/test_resume.py",
    ),
    Mutant(
        "an extended schedule climbs back",
        "dream_trainer/trainer/branched_rates.py",
        "return lambda step: min(cap, form(step))",
        "return form",
        "tests/trainer/test_branching.py -k extended_cosine",
    ),
    Mutant(
        "a scheduler of PyTorch goes on with the arguments of before",
        "dream_trainer/trainer/schedule_arguments.py",
        "if then is None or now is None or not changed:",
        "if True:",
        "tests/trainer/test_schedule_arguments.py -k in_a_branch",
    ),
    Mutant(
        "a scheduler of other arguments goes on from the rate of before",
        "dream_trainer/trainer/schedule_arguments.py",
        "for _ in range(steps):",
        "for _ in range(0):",
        "tests/trainer/test_schedule_arguments.py -k in_a_branch",
    ),
    Mutant(
        "a schedule by tokens ignores its word",
        "dream_trainer/trainer/branched_rates.py",
        "set_token_origin(scheduler, now - passed)",
        "pass",
        "tests/trainer/test_branched_parts.py -k has_its_word",
    ),
    Mutant(
        "a branch waits on with another run's patience",
        "dream_trainer/trainer/callback_state.py",
        "if begins is not None:",
        "if False:",
        "tests/trainer/test_branched_parts.py -k patience",
    ),
    Mutant(
        "the checkpoint's learning rate silently wins in a branch",
        "dream_trainer/checkpoint/optimizer_state.py",
        "saved if with_options else {}",
        "saved",
        "tests/trainer/test_branching.py -k outlives",
    ),
    Mutant(
        "another seed resumes",
        "dream_trainer/trainer/other_run.py",
        "if shared[name] != value:",
        "if False:",
        "tests/trainer/test_checkpoint_mixin.py",
    ),
    Mutant(
        "a store that ignores conditions is used",
        "dream_trainer/stores/ownership.py",
        "if place.store.create(place.key, self._content()):",
        "if False:",
        "tests/stores/test_object_store.py -k ignores",
    ),
    Mutant(
        "a run in a store that was lost is written on",
        "dream_trainer/stores/ownership.py",
        "return self._highest() > self._number",
        "return False",
        "tests/stores/test_object_store.py -k belongs",
    ),
    Mutant(
        "truncated files pass for whole",
        "dream_trainer/checkpoint/files.py",
        "if size_there != size:",
        "if False:",
        "tests/checkpoint",
    ),
    Mutant(
        "metrics not weighted",
        "dream_trainer/loggers/buffer.py",
        "value += new_value * new_weight",
        "value += new_value",
        "tests/loggers",
    ),
    Mutant(
        "rank 0's callbacks on every rank",
        "dream_trainer/trainer/event_table.py",
        "if is_main or not callback.main_process_only",
        "if True",
        "tests/trainer/test_events.py tests/trainer/test_loop_ranks.py",
    ),
    Mutant(
        "mixins' config fields not checked",
        "dream_trainer/trainer/user_class/class_checks.py",
        "    _check_config_classes(cls, config)\n",
        "",
        "tests/trainer/test_mixins.py",
    ),
    Mutant(
        "draws of initial weights not seeded by their number",
        "dream_trainer/meta/recorded_calls.py",
        "(self._first_seed + number)",
        "self._first_seed",
        "tests/meta",
    ),
    Mutant(
        "padding batches counted by metrics",
        "dream_trainer/trainer/validation_metrics.py",
        "self._attributes.update(copy.deepcopy(originals))",
        "pass",
        "tests/trainer/test_evaluation.py",
    ),
    Mutant(
        "a NaN metric is best",
        "dream_trainer/best_value.py",
        "not isinstance(value, bool) and not math.isnan(value)",
        "not isinstance(value, bool)",
        "tests/checkpoint/test_retention.py",
    ),
    Mutant(
        "retention counts from the oldest",
        "dream_trainer/checkpoint/retention.py",
        "steps[-(retention.keep_last or 1) :]",
        "steps[: retention.keep_last or 1]",
        "tests/checkpoint/test_retention.py",
    ),
    Mutant(
        "a background save refers to the live tensors",
        "dream_trainer/checkpoint/staging.py",
        "return with_local(tensor, copy)",
        "return tensor",
        "tests/checkpoint/test_staging.py tests/trainer/test_saving.py -k moment",
    ),
    Mutant(
        "the loader's state is that of the window ahead",
        "dream_trainer/data/feed.py",
        "        self.rank_state = window.rank_state\n",
        "        self.rank_state = (self._ahead or window).rank_state\n",
        "tests/trainer/test_resume.py tests/trainer/test_branches.py -k stateful",
    ),
    Mutant(
        "a save that failed is forgotten",
        "dream_trainer/checkpoint/saver.py",
        '        if on_error == "raise":\n            raise error\n',
        "",
        "tests/trainer/test_saving.py -k error",
    ),
    Mutant(
        "what an interrupted validation owes is not saved",
        "dream_trainer/trainer/schedule.py",
        "if validates or epoch_ended else None",
        "if False else None",
        "tests/trainer/test_resume_choice.py -k signal",
    ),
    Mutant(
        "a signal does not end a wait for data",
        "dream_trainer/distributed/signals.py",
        "            raise Interrupted\n        self._waits_since = since",
        "            pass\n        self._waits_since = since",
        "tests/distributed/test_signals.py -k ends_a_wait",
    ),
    Mutant(
        "shards are not hashed while they are read",
        "dream_trainer/checkpoint/loading.py",
        "shards = own_share(manifest.shards, manifest.path, world)",
        "shards = manifest.shards[:0]",
        "tests/checkpoint/test_damage.py tests/checkpoint/test_store.py",
    ),
    Mutant(
        "averages start from random weights",
        "dream_trainer/callbacks/weight_average.py",
        "        self._has_started = True\n",
        "        self._has_started = False\n",
        "tests/callbacks/test_ema.py",
    ),
    Mutant(
        "tied weights come apart under a tensor-parallel plan",
        "dream_trainer/modules/sharding.py",
        "            module.register_parameter(alias, parameter_now)\n",
        "",
        "tests/trainer/test_tensor_parallel.py",
    ),
    Mutant(
        "ranks that share sequences take parts in one order and attend in another",
        "dream_trainer/modules/sequence_parts.py",
        "        self._chunks_of = [(r, 2 * size - 1 - r) if is_balanced else (r,) for r in range(size)]\n",
        "        self._chunks_of = [(2 * r, 2 * r + 1) if is_balanced else (r,) for r in range(size)]\n",
        "tests/modules/test_context_attention.py -k balanced",
    ),
    Mutant(
        "queries of the front see keys of the end",
        "dream_trainer/modules/context_attention.py",
        "            seen = (chunk + 1) * length\n",
        "            seen = key.shape[-2]\n",
        "tests/modules/test_context_attention.py -k whole",
    ),
    Mutant(
        "blocks that are computed again attend within a rank's part",
        "dream_trainer/modules/recompute.py",
        "        for mode in modes[len(function_modes()) :]:\n",
        "        for mode in ():\n",
        "tests/trainer/test_context_parallel.py -k written_by_hand",
    ),
    Mutant(
        "ranks that share sequences need no weight",
        "dream_trainer/trainer/step/accumulation.py",
        "            if self._context_ranks > 1:\n",
        "            if False:\n",
        "tests/trainer/test_context_mistakes.py -k weights",
    ),
    Mutant(
        "the biases of experts weigh, too",
        "dream_trainer/modules/mixture_of_experts.py",
        "            weights = scores.gather(1, chosen)\n",
        "            weights = (scores + self.balance_bias).gather(1, chosen)\n",
        "tests/modules/test_mixture_of_experts.py",
    ),
    Mutant(
        "tokens of experts that are computed again count twice",
        "dream_trainer/modules/mixture_of_experts.py",
        "self.loads.add_(counts, alpha=self.counts_tokens)",
        "self.loads.add_(counts)",
        "tests/modules/test_mixture_of_experts.py",
    ),
    Mutant(
        "biases of experts follow the loads of a rank's own",
        "dream_trainer/modules/expert_balance.py",
        "        if self._world.step_size > 1:\n",
        "        if False:\n",
        "tests/trainer/test_experts.py -k by_hand",
    ),
    Mutant(
        "shards of experts are averaged over too few ranks",
        "dream_trainer/trainer/step/optimizer_step.py",
        "            divide_sums(plan, grads)\n",
        "            pass\n",
        "tests/trainer/test_expert_parallel.py -k by_hand",
    ),
    Mutant(
        "copies of experts are averaged over the ranks that share experts",
        "dream_trainer/trainer/step/buckets.py",
        "            return gradients.expert_copies, 1 if gradients.expert_copies is None else world.step_size\n",
        "            return None, world.step_size\n",
        "tests/trainer/test_expert_parallel.py -k by_hand",
    ),
    Mutant(
        "rows come back to other tokens",
        "dream_trainer/modules/expert_exchange.py",
        "        by_rank = torch.empty_like(rows).index_copy(0, self._order, rows)\n",
        "        by_rank = rows\n",
        "tests/trainer/test_expert_parallel.py -k by_hand",
    ),
    Mutant(
        "a tensor-parallel plan trains what was frozen",
        "dream_trainer/modules/sharding.py",
        "            parameter_now.requires_grad_(False)\n",
        "            pass\n",
        "tests/trainer/test_tensor_parallel.py -k written_by_hand",
    ),
    Mutant(
        "backward runs under autocast",
        "dream_trainer/trainer/step/accumulation.py",
        "self._backward_context = without_autocast(devices, self._world.device)",
        "self._backward_context = None",
        "tests/trainer/test_precision.py",
    ),
    Mutant(
        "an overflow keeps the scale",
        "dream_trainer/trainer/step/loss_scale.py",
        "        self._overflowed |= bad\n",
        "",
        "tests/trainer/test_loss_scale.py",
    ),
    Mutant(
        "the loss scale is not resumed",
        "dream_trainer/trainer/restored_state.py",
        '    trainer._accumulation.load_loss_scale_state(shared.get("loss_scale"))\n',
        "",
        "tests/trainer/test_loss_scale.py",
    ),
    Mutant(
        "parts of a sharded model are called past it",
        "dream_trainer/trainer/mixins/setup.py",
        "        enter_by_parts(model, trainer.forward_methods)\n",
        "",
        "tests/trainer/test_precision.py",
    ),
    Mutant(
        "gradients are reduced in half precision",
        "dream_trainer/modules/precision.py",
        "param_dtype=dtype, reduce_dtype=torch.float32 if reduce is None else reduce)",
        "param_dtype=dtype, reduce_dtype=dtype if reduce is None else reduce)",
        "tests/trainer/test_precision.py",
    ),
    Mutant(
        "a value of no weight counts in a mean",
        "dream_trainer/loggers/buffer.py",
        "        if new_weight != 0:\n",
        "        if True:\n",
        "tests/loggers/test_buffer.py",
    ),
    Mutant(
        "a value of no weight counts",
        "dream_trainer/loggers/buffer.py",
        "        if new_weight == 0:\n            continue\n",
        "",
        "tests/loggers/test_buffer.py",
    ),
    Mutant(
        "a window that runs again is logged twice",
        "dream_trainer/loggers/buffer.py",
        "            del column.values[-1]\n",
        "            pass\n",
        "tests/loggers/test_buffer.py tests/trainer/test_logger_mixin.py",
    ),
    Mutant(
        "lines after the resumed step stay",
        "dream_trainer/loggers/line_files.py",
        'if record["step"] <= resumed_step',
        'if record["step"] <= resumed_step + 1',
        "tests/loggers/test_jsonl.py",
    ),
    Mutant(
        "TensorBoard forgets one step too many",
        "dream_trainer/loggers/tensorboard.py",
        "else resumed_step + 1, session_log",
        "else resumed_step, session_log",
        "tests/loggers/test_tensorboard.py",
    ),
    Mutant(
        "TensorBoard's earlier files keep a step that comes again",
        "dream_trainer/loggers/tensorboard.py",
        ".step <= last_step",
        ".step <= last_step + 1",
        "tests/loggers/test_tensorboard.py",
    ),
    Mutant(
        "lists of a metric are filled up to the length of the first rank's alone",
        "dream_trainer/modules/metrics.py",
        "other.length for other in described) - len(state)",
        "other.length for other in described[:1]) - len(state)",
        "tests/trainer/test_evaluation.py",
    ),
    Mutant(
        "a resumed W&B run is a new one",
        "dream_trainer/loggers/weights_and_biases.py",
        "id=self._id",
        "id=None",
        "tests/loggers/test_weights_and_biases.py",
    ),
    Mutant(
        "the weights do not come back after a validation on averages",
        "dream_trainer/callbacks/weight_average.py",
        "                    average.set_weights(former_weights)\n",
        "                    pass\n",
        "tests/callbacks/test_ema.py",
    ),
    Mutant(
        "any improvement is enough to go on",
        "dream_trainer/callbacks/early_stopping.py",
        "value < self.best - self.min_delta",
        "value < self.best",
        "tests/callbacks/test_early_stopping.py",
    ),
    Mutant(
        "throughput counts validations",
        "dream_trainer/callbacks/throughput.py",
        "seconds = end.clock - start.clock - self._validating",
        "seconds = end.clock - start.clock",
        "tests/callbacks/test_throughput.py",
    ),
    Mutant(
        "the collector stays off after training",
        "dream_trainer/callbacks/garbage_collection.py",
        "        if self._turned_off:\n            gc.enable()\n",
        "",
        "tests/callbacks/test_garbage_collection.py",
    ),
    Mutant(
        "the rate logged is the next step's",
        "dream_trainer/trainer/step/optimizer_step.py",
        "        if not skipped and self._after_step:\n            for optimizer in optimizers:\n",
        "        for scheduler in schedulers:\n            scheduler.step()\n        schedulers = ()\n"
        "        if not skipped and self._after_step:\n            for optimizer in optimizers:\n",
        "tests/callbacks/test_learning_rate.py",
    ),
    Mutant(
        "events behind the trainer go unheard",
        "dream_trainer/trainer/user_class/overrides.py",
        "            is_reached = False\n            continue",
        "            break",
        "tests/trainer/test_overrides.py",
    ),
    Mutant(
        "of two classes with one event the first is heard",
        "dream_trainer/trainer/user_class/overrides.py",
        "is_reached = hands_on(part, event)",
        "is_reached = True",
        "tests/trainer/test_overrides.py",
    ),
    Mutant(
        "real weights are left unequal on ranks",
        "dream_trainer/modules/equal_weights.py",
        "if len(set(values)) > 1]",
        "if not values]",
        "tests/trainer/test_whole_weights.py",
    ),
    Mutant(
        "optimizers of strangers are accepted",
        "dream_trainer/trainer/registry.py",
        "            if id(parameter) in known:",
        "            if True:",
        "tests/trainer/test_whole_weights.py",
    ),
    Mutant(
        "saving gathers",
        "dream_trainer/modules/entry_points.py",
        "(save|load|push",
        "(load|push",
        "tests/trainer/test_whole_weights.py",
    ),
    Mutant(
        "names of the framework's may be assigned",
        "dream_trainer/trainer/user_class/taken_names.py",
        "if attributes[name] is not value and name not in _FOLLOWED:",
        "if False:",
        "tests/trainer/test_names.py",
    ),
    Mutant(
        "a config in use may be changed",
        "dream_trainer/config/trainer_config.py",
        "in_use = vars(self).get(_USERS, ())",
        "in_use = ()",
        "tests/trainer/test_names.py",
    ),
    Mutant(
        "a batch is lost where a lot of batches ends",
        "dream_trainer/data/sampler.py",
        "full[block : block + 64]",
        "full[block : block + 63]",
        "tests/data/test_sampler.py",
    ),
    Mutant(
        "every rank's clock makes a validation due",
        "dream_trainer/trainer/agreement.py",
        "goes_by_the_clock and self._is_main and schedule",
        "goes_by_the_clock and schedule",
        "tests/trainer/test_by_the_clock.py",
    ),
    Mutant(
        "minutes between validations are seconds",
        "dream_trainer/cadence.py",
        "else 60 * minutes",
        "else minutes",
        "tests/trainer/test_by_the_clock.py",
    ),
    Mutant(
        "averages of an earlier version are counted anew",
        "dream_trainer/callbacks/weight_average.py",
        'average.resume(state["updates"][name], has_stepped=has_stepped)',
        "average.resume(0, has_stepped=has_stepped)",
        "tests/checkpoint/test_written_before.py -k went_on",
    ),
    Mutant(
        "a file that a comment names is not looked for",
        "tools/constraints.txt",
        "What tools/demo.sh and",
        "What tools/demonstration.sh and",
        "tests/docs/test_references.py",
    ),
    Mutant(
        "the disk is not waited for to hold a checkpoint's name",
        "dream_trainer/checkpoint/files.py",
        "        temporary.rename(final)\n        sync_directory(final.parent)\n",
        "        temporary.rename(final)\n",
        "tests/checkpoint/test_store.py -k disk_holds",
    ),
    Mutant(
        "a checkpoint's files go before the disk holds that it is discarded",
        "dream_trainer/checkpoint/files.py",
        "    path.rename(hidden)\n    sync_directory(path.parent)\n",
        "    path.rename(hidden)\n",
        "tests/checkpoint/test_store.py -k disk_holds",
    ),
    Mutant(
        "the step does not seed what goes on at another layout",
        "dream_trainer/trainer/restored_state.py",
        'hash_seed(b"resumed", trainer.config.seed, progress.global_step, world.data_rank)',
        'hash_seed(b"resumed", trainer.config.seed, world.data_rank)',
        "tests/trainer/test_branches.py -k random_layers",
    ),
    Mutant(
        "ranks draw alike after a resume at another layout",
        "dream_trainer/trainer/restored_state.py",
        'hash_seed(b"resumed", trainer.config.seed, progress.global_step, world.data_rank)',
        'hash_seed(b"resumed", trainer.config.seed, progress.global_step)',
        "tests/trainer/test_branches.py -k random_layers",
    ),
    Mutant(
        "groups of a mesh keep the long time-out",
        "dream_trainer/distributed/world.py",
        "(*data_groups, *worker_groups, *self.further_groups, *of_meshes)",
        "(*data_groups, *worker_groups, *self.further_groups)",
        "tests/trainer/test_by_the_clock.py",
    ),
    Mutant(
        "groups of a mesh have torch's time-out until the first step",
        "dream_trainer/distributed/world.py",
        "        self._set_time_outs(parameters.start_timeout_seconds)\n",
        "",
        "tests/trainer/test_by_the_clock.py",
    ),
    Mutant(
        "the watchdog has no patience with the first window",
        "dream_trainer/trainer/watch.py",
        "lambda: patient_limit if trainer._session.is_first_window else limit",
        "lambda: limit",
        "tests/trainer/test_by_the_clock.py",
    ),
    Mutant(
        "NaN is a positive number",
        "dream_trainer/checks.py",
        "or math.isnan(value) or value <= 0",
        "or value <= 0",
        "tests/config/test_checks.py",
    ),
    Mutant(
        "True is a number between two",
        "dream_trainer/checks.py",
        "        and not isinstance(value, bool)\n",
        "",
        "tests/config/test_checks.py",
    ),
    Mutant(
        "an upper limit that is left out is let in",
        "dream_trainer/checks.py",
        "(value == high and not below)",
        "value == high",
        "tests/config/test_checks.py",
    ),
    Mutant(
        "a dead rank is not looked for",
        "dream_trainer/distributed/lost_ranks.py",
        "if host == this_host and not _is_alive(int(number))",
        "if not host",
        "tests/trainer/test_failures.py -k killed",
    ),
    Mutant(
        "a fit that goes on skips what was loaded",
        "dream_trainer/trainer/session.py",
        "        if self.has_failed or signals.broke_a_wait:",
        "        if False:",
        "tests/trainer/test_notebook.py",
    ),
    Mutant(
        "a user's signal handler is not called",
        "dream_trainer/distributed/signals.py",
        "if number != signal.SIGINT and callable(before) and not isinstance(before, _Exits):",
        "if False:",
        "tests/trainer/test_notebook.py",
    ),
    Mutant(
        "ranks that ran blocks in different orders go on",
        "dream_trainer/trainer/agreement.py",
        "if flags.order_squared * trainer.world.world_size != flags.order * flags.order:",
        "if False:",
        "tests/trainer/test_uneven_use.py -k different_orders",
    ),
    Mutant(
        "what was mixed up over ranks is saved",
        "dream_trainer/trainer/mixins/checkpointing.py",
        "    trainer._agreement.check_order()\n",
        "",
        "tests/trainer/test_uneven_use.py -k different_orders",
    ),
    Mutant(
        "batch norm's statistics move twice under recomputation",
        "dream_trainer/modules/recompute.py",
        "_again(norms, mixtures, modes) if has_run else",
        "_again(norms, mixtures, modes) if False else",
        "tests/trainer/test_activation_checkpointing.py -k batch_norm",
    ),
    Mutant(
        "a window that runs again counts twice in metrics",
        "dream_trainer/trainer/base.py",
        "                moved.put_back()\n",
        "",
        "tests/trainer/test_nonfinite.py -k counts_once",
    ),
    Mutant(
        "a validation keeps the first length of its data",
        "dream_trainer/data/validation_data.py",
        "        length = len(self._dataset)",
        "        length = self.reader.sampler.length",
        "tests/data/test_validation.py",
    ),
    Mutant(
        "seeds of persistent workers shift an order",
        "dream_trainer/data/foreign.py",
        "    loader.generator = torch.Generator().manual_seed(seed)",
        "    pass",
        "tests/data/test_foreign_resume.py -k persist",
    ),
    Mutant(
        "a block begins a sample late",
        "dream_trainer/data/streams/lane_reader.py",
        "if state.yielded > consumed:",
        "if state.yielded >= consumed:",
        "tests/data/test_lanes.py -k at_any_step",
    ),
    Mutant(
        "lanes go by the place of a worker",
        "dream_trainer/data/streams/lane_stream.py",
        "number % num_readers for number, chain",
        "number // num_readers % num_readers for number, chain",
        "tests/data/test_lanes.py -k hand_written",
    ),
    Mutant(
        "a resume forgets the lanes of other ranks",
        "dream_trainer/trainer/restored_state.py",
        "for rank in ranks])",
        "for rank in ranks[:1]])",
        "tests/trainer/test_stream_resume.py -k live",
    ),
    Mutant(
        "a cut tar file is a shorter one",
        "dream_trainer/data/sources/stream_sources.py",
        "if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):",
        "if False:",
        "tests/data/test_lane_refusals.py -k damaged_tar",
    ),
    Mutant(
        "two transforms draw the same numbers for a sample",
        "dream_trainer/data/transforms.py",
        "self.calls.lane, item.number, self.stage)",
        "self.calls.lane, item.number)",
        "tests/data/test_lanes.py -k draws_depend",
    ),
    Mutant(
        "statistics of a layer in eval mode are averaged in",
        "dream_trainer/modules/norm_statistics.py",
        "sums = torch.stack((flat * trains, trains))",
        "sums = torch.stack((flat, trains))",
        "tests/trainer/test_odd_parameters.py -k only_some_ranks",
    ),
    Mutant(
        "gradients that zero_grad hides go unnoticed",
        "dream_trainer/trainer/step/turns.py",
        "if n_batches > 1 and optimizer in self._stepped and optimizer in self._origins:",
        "if False:",
        "tests/trainer/test_turns.py -k hides",
    ),
    Mutant(
        "a mixture's blocks all round alike",
        "dream_trainer/data/mixtures/mixture_order.py",
        "        offset = _reversed_bits(block)\n",
        "        offset = 0\n",
        "tests/data/test_mixture.py",
    ),
    Mutant(
        "each epoch of a source has the same order",
        "dream_trainer/data/mixtures/permutation.py",
        "keys = scrambled(base + scrambled(epochs.reshape(-1)",
        "keys = scrambled(base + scrambled(0 * epochs.reshape(-1)",
        "tests/data/test_permutation.py tests/data/test_mixture.py",
    ),
    Mutant(
        "a mixture's changed weights are forgotten by a resume",
        "dream_trainer/data/mixtures/mixture.py",
        """            self._changes = [(at, dict(weights)) for at, weights in state["changes"]]\n""",
        "            self._changes = []\n",
        "tests/data/test_mixture_resume.py",
    ),
    Mutant(
        "what was loaded ahead is trained after weights changed",
        "dream_trainer/data/stream.py",
        "if ordered.may_change and ordered.changes_at(position.samples, marked.newest(position.samples)):",
        "if ordered.may_change and ordered.changes_at(position.samples, marked.newest(position.samples)) and False:",
        "tests/data/test_mixture_resume.py tests/data/test_ordered.py",
    ),
    Mutant(
        "the last token of a cut piece predicts nothing",
        "dream_trainer/data/packing/packed_rows.py",
        "num_labels = min(size, len(loaded.labels) - start)",
        "num_labels = min(size - 1, len(loaded.labels) - start)",
        "tests/data/test_packed_rows.py",
    ),
    Mutant(
        "packed documents see each other",
        "dream_trainer/data/packing/attention_mask.py",
        "mask = documents[:, None, :, None] == documents[:, None, None, :]",
        "mask = documents[:, None, :, None] == documents[:, None, :, None]",
        "tests/data/test_attention_mask.py",
    ),
    Mutant(
        "packed rows go on without what their documents were",
        "dream_trainer/data/packing/document_blocks.py",
        """self.documents.begin(seed, None if state is None else state["documents"])""",
        "self.documents.begin(seed, None)",
        "tests/data/test_packed_mixture.py tests/data/test_packed_resume.py",
    ),
    Mutant(
        "adapters of another config resumed",
        "dream_trainer/trainer/restored_state.py",
        '    refuse_other_adapters(path, models, shared.get("adapters"), world=world)\n',
        "",
        "tests/weights/test_adapter_config.py -k does_not_go_on",
    ),
    Mutant(
        "adapters of another scaling loaded",
        "dream_trainer/weights/adapter_config.py",
        "        and before.get(name) != now.get(name)\n",
        "        and type(before.get(name)) is not type(now.get(name))\n",
        "tests/weights/test_adapter_config.py -k compared_too",
    ),
    Mutant(
        "a base that nobody loaded passed over",
        "dream_trainer/trainer/unloaded_base.py",
        "2 * drawn > total",
        "drawn > total",
        "tests/trainer/test_unloaded_base.py -k numbers",
    ),
    Mutant(
        "weights copied by hand taken for drawn",
        "dream_trainer/trainer/unloaded_base.py",
        "torch.equal(_some_of(parameter), self._drawn[name])",
        "parameter.shape is not None",
        "tests/trainer/test_unloaded_base.py -k no_fault",
    ),
    Mutant(
        "what a rank waits in a gather counts as its own work",
        "dream_trainer/compat/fully_shard.py",
        "        super().unshard(async_op)\n        own_time.leave_collective()",
        "        super().unshard(async_op)",
        "tests/trainer/test_stragglers.py -k named_once",
    ),
    Mutant(
        "a rank on a host that nobody told to stop ends as if it had been told",
        "dream_trainer/trainer/exit_status.py",
        "restart=world.host_number not in hosts",
        "restart=False",
        "tests/faults/test_hosts.py -k told_to_stop",
    ),
    Mutant(
        "a rank that did not run for a while takes the job's store for lost",
        "dream_trainer/distributed/heartbeat.py",
        "silent + min(slept, 2 * pause) if",
        "silent + slept if",
        "tests/distributed/test_heartbeat.py -k lock",
    ),
    Mutant(
        "hosts share a directory of local checkpoints",
        "dream_trainer/checkpoint/local_checkpoints.py",
        "lambda: self._parts() != [self._part]",
        "lambda: False",
        "tests/faults/test_local_checkpoints.py -k share_is_refused",
    ),
    Mutant(
        "a host that is silent in its setup is taken for lost as in training",
        "dream_trainer/distributed/heartbeat.py",
        "(1.0 if self.is_training else LIMITS_OF_A_SETUP)",
        "1.0",
        "tests/distributed/test_heartbeat.py -k silent_for_longer",
    ),
    Mutant(
        "a ring's links between hosts are taken for links inside",
        "dream_trainer/trainer/traffic.py",
        "sent[world.host_of(following) == world.host_number] += n_bytes",
        "sent[True] += n_bytes",
        "tests/faults/test_traffic.py",
    ),
    Mutant(
        "workers average gradients with one another",
        "dream_trainer/trainer/step/buckets.py",
        "(world.step_group, world.step_size)",
        "(None, world.world_size)",
        f"{LOCAL_SGD} -k by_hand",
    ),
    Mutant(
        "a worker goes on from another one's optimizer",
        "dream_trainer/trainer/saved_state.py",
        "return optimizer if worker == 0 else",
        "return optimizer if worker >= 0 else",
        f"{LOCAL_SGD} -k lost_its_last_steps",
    ),
    Mutant(
        "a worker's own weights are validated",
        "dream_trainer/trainer/mixins/local_sgd.py",
        "with self._rounds.as_one_model(), super()._validation_context():",
        "with super()._validation_context():",
        f"{LOCAL_SGD} -k exports_have_the_average",
    ),
    Mutant(
        "one host takes what it kept and the other reads the store",
        f"{SAVED}/local_checkpoints.py",
        "common = set.intersection(*map(set, found))",
        "common = set(found[0])",
        f"{LOCAL_CHECKPOINTS} -k alone",
    ),
    Mutant(
        "a kept state is taken whatever checkpoint the run has since",
        f"{SAVED}/local_checkpoints.py",
        'if entry.name.startswith(f"{digest}-") else None',
        "if entry.is_dir() else None",
        f"{LOCAL_CHECKPOINTS} -k follows",
    ),
    Mutant(
        "a failed write takes the last kept state along",
        f"{SAVED}/local_checkpoints.py",
        "            self._has_failed = True",
        "            self._has_failed, self._kept = True, None",
        f"{LOCAL_CHECKPOINTS} -k room",
    ),
    Mutant(
        "half a kept state is taken",
        f"{SAVED}/manifest.py",
        "    compare_sizes(path, {name: entry.size for name, entry in manifest.files.items()})\n",
        "",
        f"{LOCAL_CHECKPOINTS} -k half",
    ),
    Mutant(
        "the outer momentum begins anew on a resume",
        "dream_trainer/trainer/rounds.py",
        "targets[_MOMENTUM + name] = with_local(averaged[name], self._momentum(start))",
        "targets[_MOMENTUM + name] = with_local(averaged[name], self._momentum(start).clone())",
        f"{LOCAL_SGD} -k lost_its_last_steps",
    ),
]


def run_tests(folder: Path, tests: str) -> bool:
    """Whether the tests pass on the copy in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    if finished.returncode not in (0, 1):
        raise SystemExit(f"the tests {tests!r} did not run:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
    return finished.returncode == 0


def copy_repository(folder: Path) -> None:
    """Copies what the tests need, without the environment and the history."""
    skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs", "shared")
    shutil.copytree(ROOT, folder, ignore=skipped, dirs_exist_ok=True)


def kills(mutant: Mutant) -> bool:
    """Whether the tests notice the fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        path = folder / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            count = text.count(mutant.old)
            raise SystemExit(f"mutant {mutant.name}: {mutant.old!r} is {count} times in {mutant.file}, not once.")
        path.write_text(text.replace(mutant.old, mutant.new))
        return not run_tests(folder, mutant.tests)


def main() -> None:
    wanted = set(sys.argv[1:])
    unknown = wanted - {mutant.name for mutant in MUTANTS}
    if unknown:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    survivors = []
    for mutant in MUTANTS:
        if wanted and mutant.name not in wanted:
            continue
        killed = kills(mutant)
        print(f"{'red' if killed else 'SURVIVED':10}{mutant.name:55}{mutant.file}", flush=True)
        if not killed:
            survivors.append(mutant.name)
    if survivors:
        raise SystemExit(f"{len(survivors)} faults went unnoticed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()

"""Options and guards of the whole test run: what a test changes outside itself makes that test fail."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import worlds
from tests.api import forget_meshes
from tests.kept_ranks import torch_settings
from tests.late_norms import norms_are_read_late

ROOT = Path(__file__).parent.parent
# Written by the tools themselves while tests run.
TOOL_FILES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".coverage", ".git", ".venv", "__pycache__"}
# Not in the ordinary run, which is to take 12 minutes: what took the most CPU time, and is seen by shorter tests too.
CI_ONLY = tuple(
    f"tests/{start}"
    for start in """
        callbacks/test_every_callback.py callbacks/test_on_ranks.py::test_all callbacks/test_two_ranks.py
        checkpoint/test_retention.py::test_killed checkpoint/test_written_before.py::test_a_run_goes_on_in
        cli/test_new_command.py::test_a_project_trains compat/test_pipelining.py data/test_foreign_resume.py
        data/test_loader_group.py::test_a_group_goes_on data/test_mixture_resume.py
        data/test_packed_mixture.py data/test_packed_resume.py data/test_stream.py::test_samples_and_draws docs/
        examples/ faults/test_disk.py faults/test_foreign_workers.py faults/test_kills.py::test_under_torchrun
        faults/test_local_checkpoints.py faults/test_signals.py::test_sigterm_to_torchrun faults/test_terminals.py
        loggers/test_mlflow_and_trackio.py loggers/test_weights_and_biases.py
        meta/test_worlds.py::test_every_mesh_gets_the_bits_of_one_process[3
        meta/test_worlds.py::test_every_mesh_gets_the_bits_of_one_process[4 modules/test_compiled_attention_ranks.py
        optim/test_muon.py::test_weights_and_momentum_are_pytorchs_bits_in_one_process[rows simple/test_load_best.py
        stores/test_local_checkpoints.py stores/test_other_stores.py stores/test_runs.py testing/ tools/test_gpu.py
        trainer/test_arithmetic_parity.py::test_training_equals_a_loop_written_by_hand[1
        trainer/test_branching.py::test_a_branch_of trainer/test_branching.py::test_a_schedule
        trainer/test_branching.py::test_a_user trainer/test_branching.py::test_each_word
        trainer/test_branching.py::test_the_history trainer/test_branching.py::test_with_new
        trainer/test_changed_form.py::test_on_two trainer/test_changed_form.py::test_two_ranks
        trainer/test_changing_data.py trainer/test_compile.py::test_compiled_blocks
        trainer/test_compile.py::test_modules_of trainer/test_context_draws.py
        trainer/test_context_parallel.py::test_training_on_parts_of_sequences_equals_a_loop_written_by_hand[4
        trainer/test_double_backward.py trainer/test_drawn.py trainer/test_equal_metrics.py
        trainer/test_expert_parallel.py::test_a_run
        trainer/test_expert_parallel.py::test_a_window trainer/test_expert_parallel.py::test_stages
        trainer/test_expert_parallel.py::test_training_equals_a_loop_written_by_hand[4
        trainer/test_expert_parallel.py::test_training_equals_a_loop_written_by_hand[alone
        trainer/test_expert_parallel.py::test_training_equals_a_loop_written_by_hand[compiled
        trainer/test_expert_parallel.py::test_training_equals_a_loop_written_by_hand[with
        trainer/test_expert_parallel.py::test_whole
        trainer/test_loop_ranks.py::test_uneven_loaders_train_what_every_rank_has_and_end_together[4
        trainer/test_float8.py trainer/test_frozen_weights.py::test_a_run trainer/test_gradient_hooks.py
        trainer/test_joined_buffers.py
        trainer/test_limits.py::test_on_two trainer/test_loader_groups.py
        trainer/test_local_sgd.py trainer/test_loop_ranks.py::test_a_plain trainer/test_mixins.py
        trainer/test_notebook.py trainer/test_optimizer_resume.py::test_two_ranks
        trainer/test_own_axis.py::test_a_run trainer/test_pipeline_meshes.py
        trainer/test_pipeline_models.py::test_losses trainer/test_pipeline_models.py::test_models_that
        trainer/test_pipeline_models.py::test_several trainer/test_pipeline_parallel.py::test_half
        trainer/test_pipeline_parallel.py::test_shards
        trainer/test_pipeline_parallel.py::test_training_in_stages_equals_a_loop_written_by_hand[4
        trainer/test_pipeline_user_models.py trainer/test_plain_steps.py trainer/test_precision.py::test_whatever
        trainer/test_random_parts.py trainer/test_rank_differences.py::test_what_must trainer/test_recomputed_state.py
        trainer/test_reduce_gradients.py trainer/test_resume.py::test_live trainer/test_resume.py::test_other_loaders
        trainer/test_resumed_rates.py trainer/test_run_record.py::test_a_run_that_was_killed
        trainer/test_several_models.py::test_models_in_turns_train_as_by_hand[2 trainer/test_step_cost.py::test_sharded
        trainer/test_stream_resume.py
        trainer/test_tensor_parallel.py::test_training_on_split_layers_equals_a_loop_written_by_hand[4
        trainer/test_uneven_use.py trainer/test_verify.py::test_models_that trainer/test_verify.py::test_what_looks
        trainer/test_verify.py::test_whatever trainer/test_when_to_save.py trainer/test_whole_trainers.py
        trainer/test_whole_weights.py typing/ weights/test_adapters.py
        weights/test_weights_ranks.py
    """.split()
)
# Nor in the quick tier: programs, servers, processes, and imports that take seconds (torchmetrics, transformers).
NOT_QUICK = tuple(
    f"tests/{start}"
    for start in """
        callbacks/test_garbage checkpoint/test_damage checkpoint/test_retention checkpoint/test_store
        checkpoint/test_written_before compat/test_forked_start compat/test_huggingface data/test_mixture_resume
        data/test_shard_files distributed/test_watchdog faults/ gpu/ meta/test_from_pretrained recipes/
        simple/test_mistakes simple/test_simple.py::test_metrics_are simple/test_simple.py::test_the_best stores/
        trainer/test_best_mode trainer/test_branch trainer/test_evaluation trainer/test_limits
        trainer/test_mixins trainer/test_optimizer_resume trainer/test_rank_differences trainer/test_resume
        trainer/test_training_metrics weights/test_adapter weights/test_first_values
    """.split()
)
# pytest sets the first around every test; torch sets the others once, when the part that reads them is imported.
RUNNER_VARIABLES = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "KMP_DUPLICATE_LIB_OK")
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case: slow tests and full matrices too")
    parser.addoption("--ordinary", action="store_true", help="leave out what CI runs besides: CI_ONLY in conftest.py")
    parser.addoption("--quick", action="store_true", help="run one case of each test, as far as it starts no process")
    parser.addoption("--on-cpu", action="store_true", help="run tests marked gpu on the CPU, as far as they go")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and by all that is started then
    if config.getoption("--all"):
        worlds.start_method = "spawn"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test would run are not imported either."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    return True if name.endswith(".py") and name.startswith(_left_out(config)) else None


def _left_out(config: pytest.Config) -> tuple[str, ...]:
    if config.getoption("--quick"):
        return CI_ONLY + NOT_QUICK
    return CI_ONLY if config.getoption("--ordinary") else ()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available() and not config.getoption("--on-cpu"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--all"):
        _deselect(config, items, {item.nodeid for item in items if item.get_closest_marker("slow")})
    _deselect(config, items, {item.nodeid for item in items if item.nodeid.startswith(_left_out(config))})
    if config.getoption("--quick"):
        first = {item.nodeid.partition("[")[0]: item.nodeid for item in reversed(items)}
        _deselect(config, items, {item.nodeid for item in items} - set(first.values()))
    # The longest begin first, so that no worker is left with one of them at the end.
    items.sort(key=lambda item: not item.nodeid.startswith((*CI_ONLY, "tests/faults/", "tests/trainer/")))


def _deselect(config: pytest.Config, items: list[pytest.Item], names: set[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


@pytest.fixture(autouse=True, scope="session")
def is_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--quick` a test that starts a process, or compiles, is skipped there."""

    def skip(*_: object, **__: object) -> None:
        pytest.skip("--quick starts no process and compiles nothing")

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--quick"):
            patch.setattr(subprocess.Popen, "__init__", skip)
            patch.setattr(BaseProcess, "start", skip)
            patch.setattr(torch, "compile", skip)
            patch.setattr(torch.nn.Module, "compile", skip)
        yield


@pytest.fixture(scope="session")
def all_cases(request: pytest.FixtureRequest) -> bool:
    """Whether `--all` asks for full matrices."""
    return bool(request.config.getoption("--all"))


@pytest.fixture
def late_norms() -> Iterator[None]:
    """Gradient norms are kept on the device and read late, as on an accelerator."""
    with norms_are_read_late():
        yield


@pytest.fixture(autouse=True, scope="session")
def leaves_the_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of a module, too, work elsewhere."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def works_in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trainer writes down what it does, in `runs` of the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def environment_is_left_alone() -> Iterator[None]:
    """Fails a test that leaves environment variables changed, and puts them back."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} - RUNNER_VARIABLES
    for name in changed - before.keys():
        del os.environ[name]
    os.environ |= {name: before[name] for name in changed & before.keys()}
    assert not changed, f"environment variables left changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """Fails a test that leaves a thread behind which would keep the process from ending."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in left:
        thread.join(timeout=5)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads left running: {alive}"


@pytest.fixture
def own_children() -> Callable[[], set[BaseProcess]]:
    """The child processes that the test has started and that are alive: others may still be on their way out."""
    others = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - others - {rank.process for rank in worlds.kept.ranks}


@pytest.fixture(autouse=True)
def child_processes_end(own_children: Callable[[], set[BaseProcess]]) -> Iterator[None]:
    """Fails a test that leaves child processes behind, such as the workers of a loader."""
    yield
    if own_children():
        gc.collect()  # a cycle may still hold their loader
    for child in own_children():
        child.join(timeout=5)
    alive = [child.name for child in own_children()]
    assert not alive, f"child processes left running: {alive}"


@pytest.fixture(autouse=True)
def signals_are_handled_as_before() -> Iterator[None]:
    """Puts the handler of SIGTERM back: a run that a signal ended keeps its own, since its process is to end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def process_group_is_destroyed() -> Iterator[None]:
    """Fails a test that leaves `torch.distributed` initialised, and destroys it for the next one."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the default process group was left initialised")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, collected before a later test forks: a child that did it would hang."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    forget_meshes()
    gc.collect()


@pytest.fixture(autouse=True)
def repository_root_stays_clean() -> Iterator[None]:
    """Fails a test that writes into the repository root or into a `runs` folder of the working directory."""
    before = _top_level_files()
    yield
    added = _top_level_files() - before
    assert not added, f"files left in {ROOT}: {sorted(added)}"


def _top_level_files() -> set[str]:
    return {path.name for path in ROOT.iterdir()} - TOOL_FILES


@pytest.fixture(autouse=True)
def torch_settings_are_left_alone() -> Iterator[None]:
    """Fails a test that leaves global torch settings changed, and puts them back."""
    before = torch_settings()
    yield
    after = torch_settings()
    torch.set_default_dtype(before["default dtype"])
    torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["deterministic warn only"])
    torch.set_grad_enabled(before["grad enabled"])
    torch.set_num_threads(before["threads"])
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"torch settings left changed (before, after): {changed}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or in any order."""
    random.seed(0)
    torch.manual_seed(0)

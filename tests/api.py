"""What tests use of the package's own modules, so that moving code changes this file alone."""

from importlib import import_module
from typing import Any

_NAMES = {
    "dream_trainer.best_value": "mode_by_name mode_of",
    "dream_trainer.callbacks": (
        "ActivationStats EarlyStopping Every GarbageCollection GradientStats LearningRate Memory "
        "EMA ModelSummary NonFiniteReport Profiler Progress SWA Throughput TrainerSummary "
        "WeightStats WeightTransfer"
    ),
    "dream_trainer.callbacks.memory": "GIB memory_numbers",
    "dream_trainer.loggers.progress": "Look Pace",
    "dream_trainer.callbacks.summary": "forward_flops",
    "dream_trainer.callbacks.tensor_stats": "group_of",
    "dream_trainer.callbacks.throughput": "dtype_at_work peak_flops",
    "dream_trainer.checkpoint.files": "FileEntry NewFile checksum named_step step_directories",
    "dream_trainer.checkpoint.store": (
        "KnownPlan Snapshot load_tensors read_rank read_shared tensor_metadata write_checkpoint"
    ),
    "dream_trainer.checkpoint.local_checkpoints": "LocalCheckpoints",
    "dream_trainer.checkpoint.manifest": (
        "Manifest SCHEMA_VERSION best_checkpoint encode_manifest kept list_checkpoints read_manifest retire "
        "verify_checkpoint"
    ),
    "dream_trainer.checkpoint.model_state": (
        "load_model_extra_state load_rank_buffers model_extra_state model_tensors parameter_fqns rank_buffers "
        "value_digests"
    ),
    "dream_trainer.checkpoint.optimizer_state": "of_all_stages optimizer_state prepare_optimizer_state",
    "dream_trainer.checkpoint.run_directory": "claim is_claimed release",
    "dream_trainer.checkpoint.safe_dcp": "parse_metadata",
    "dream_trainer.checkpoint.saver": "HostCopies",
    "dream_trainer.checks": "divisors",
    "dream_trainer.cli.main": "main",
    "dream_trainer.cli.new": "EXAMPLES LAUNCH",
    "dream_trainer.cli.plot": "draw panels read_log",
    "dream_trainer.compat.attention": "BlockMask causal_to_the_last_key",
    "dream_trainer.compat.compiler": "is_compiled waited why_memory_is_not_shared",
    "dream_trainer.compat.forked_start": "sure_to_start",
    "dream_trainer.compat.fully_shard": "as_one_backward watch_gradients",
    "dream_trainer.gradient_state": "GradientState",
    "dream_trainer.compat.pipelining": (
        "ScheduledStage as_tuple new_schedule ranks_of_stages refresh_copy shallow_copy"
    ),
    "dream_trainer.compat.pytorch": (
        "EXPENSIVE_OPERATIONS TCPStore ValueReads all_gather_flat gathered_twins "
        "forget_meshes in_backward local_tensor local_tensors operation "
        "reading_waits set_group_timeout shard_dim"
    ),
    "dream_trainer.compat.touched_shards": "TouchableShards",
    "dream_trainer.config": "TrainingParameters from_dict to_dict",
    "dream_trainer.config.combinations": "Combination UNSUPPORTED refuse_combinations",
    "dream_trainer.config.checkpoint_parameters": "BranchParameters",
    "dream_trainer.config.command_line": "parse",
    "dream_trainer.config.device_parameters": "DeviceParameters MeshShape resolve_mesh",
    "dream_trainer.config.logger_parameters": ("LoggerParameters MLflowParameters TrackioParameters WandbParameters"),
    "dream_trainer.data": "AlternatingLoaders LoaderGroup",
    "dream_trainer.data.feed": "WindowFeed on_device",
    "dream_trainer.data.foreign": "SeededPass draws_at_start_only",
    "dream_trainer.data.loader": "DistributedDataLoader PerRankLoader loader_batch_size rebuild",
    "dream_trainer.data.loader_groups": "turns",
    "dream_trainer.data.mixture": "Mixture BLOCK IndexPermutation Stage weights_by_position",
    "dream_trainer.data.sampler": (
        "ENDLESS OrderedDataset KeyedDataset RankBatchSampler Sharding draws_nothing epoch_order sample_seed"
    ),
    "dream_trainer.data.packing.attention_mask": "PackedSegments handlers packed_attention packed_attention_mask",
    "dream_trainer.data.packing.packed_rows": ("PADDING PackedRows PaddedRows Row pack_best_fit pack_concatenated"),
    "dream_trainer.data.sample_count": "IGNORED SampleCount count_tokens",
    "dream_trainer.data.sources.shard_files": "JsonLines ParquetRows ShardFiles TarSamples WithLengths measure_lengths",
    "dream_trainer.data.sources.stream_sources": "IterableShards WebDatasetShards",
    "dream_trainer.data.sources.token_file": "TokenFile TokenFileWriter",
    "dream_trainer.data.stream": "TrainStream train_stream validation_batches",
    "dream_trainer.data.lane_stream": "StreamLoader lane_plan",
    "dream_trainer.data.transforms": "Batch Filter Map Pack Shuffle TransformedDataset Unbatch",
    "dream_trainer.data.window": "DataPosition",
    "dream_trainer.data.worker_start": "started",
    "dream_trainer.distributed.heartbeat": "Heartbeat",
    "dream_trainer.distributed.hosts": "HostPlace",
    "dream_trainer.distributed.pulse": "Flags Requests",
    "dream_trainer.distributed.ranks": "Ranks",
    "dream_trainer.distributed.signals": "Signals relayed",
    "dream_trainer.distributed.seeds": (
        "GENERATORS WatchedSeeds hash_seed preserved_random_state random_state seed_cpu set_random_state "
        "undisturbed_cpu_state watched_random_state"
    ),
    "dream_trainer.distributed.watchdog": "Watchdog",
    "dream_trainer.distributed.world": "World",
    "dream_trainer.parallel.axis": "AXES options_of_overlap lay_mesh_among_data",
    "dream_trainer.errors": (
        "CheckpointError ConfigError DamagedCheckpointError DataError HookError InitError NonFiniteError "
        "RanksDifferError StepError"
    ),
    "dream_trainer.events.callback": "Callback",
    "dream_trainer.loggers.buffer": "MetricBuffer Stamp TrainingRecord Record Records",
    "dream_trainer.loggers.run_log": "LoggerGroup RunLog check_loggers",
    "dream_trainer.loggers.interface": "Logger Audio Histogram Image Images Media Table Text Video",
    "dream_trainer.loggers.line_files": "ConsoleLogger CSVLogger JSONLLogger read_jsonl ImageFilesLogger pil_image",
    "dream_trainer.loggers.tensorboard": "TensorBoardLogger",
    "dream_trainer.loggers.trackers": "MLflowLogger WandbLogger",
    "dream_trainer.meta.realize": "default_init Plan materialize remember",
    "dream_trainer.meta.tape": "Tape",
    "dream_trainer.modules": "ExpertExchange split_experts",
    "dream_trainer.parallel.context_attention": (
        "AttentionTakeover ContextAttention GatheredAttention SequenceParts UlyssesAttention "
        "compile_with_shared_attention"
    ),
    "dream_trainer.modules.class_change": "own_class",
    "dream_trainer.parallel.mixture_of_experts": "GatedExperts MoE _grouped",
    "dream_trainer.parallel.joined_buffers": "JoinedBuffers",
    "dream_trainer.modules.metrics": "computed",
    "dream_trainer.parallel.pipeline_stages": (
        "NumberedAsWhole check_stages even_stages keep_only number_lists stages_of_models"
    ),
    "dream_trainer.parallel.tensor_layers": "EqualParts declare_random_layer undeclared_dropouts",
    "dream_trainer.modules.recompute": "Recomputed recompute",
    "dream_trainer.parallel.sharding": (
        "frozen fsdp_modules refuse_unsupported remember_cut repeated_blocks shard_by_blocks"
    ),
    "dream_trainer.nested": "to_device",
    "dream_trainer.optim": (
        "OptimizerParameters ScheduleParameters build_optimizer build_optimizers build_schedule "
        "freeze refuse_unshardable"
    ),
    "dream_trainer.optim.optimizers": "GroupParameters parameter_groups values_in_whole",
    "dream_trainer.optim.learning_rates": "TokenAxis rate_factor",
    "dream_trainer.optim.muon": "Muon deal",
    "dream_trainer.simple": "Trainer",
    "dream_trainer.screen": "format_bytes format_count format_duration format_number",
    "dream_trainer.stores.store_path": "open_store without_secrets StorePath as_path",
    "dream_trainer.stores.ownership": "Ownership",
    "dream_trainer.testing.findings": "TrainerChecks differences",
    "dream_trainer.testing.program": "Program",
    "dream_trainer.testing.suite": "CHECKS findings",
    "dream_trainer.trainer.abstract": "AbstractTrainer",
    "dream_trainer.trainer.base": "BaseTrainer",
    "dream_trainer.trainer.run_record": "RunRecord Start is_alive read_record receipt write_record",
    "dream_trainer.trainer.event_table": "mesh_lines",
    "dream_trainer.trainer.hooks": "EVENTS Hooks MixinHooks",
    "dream_trainer.trainer.session": "Limits launch start",
    "dream_trainer.parallel.micro_batches": "cut shapes_of",
    "dream_trainer.trainer.mixins.activation_checkpointing": "ActivationCheckpointingParameters",
    "dream_trainer.trainer.mixins.checkpointing": "CheckpointParameters",
    "dream_trainer.trainer.mixins.context_parallel": "SequenceCut",
    "dream_trainer.trainer.mixins.evaluation": "EvalParameters",
    "dream_trainer.trainer.mixins.setup": "CONFIGURE SETUP",
    "dream_trainer.trainer.resume": "resume",
    "dream_trainer.trainer.step.nonfinite": "GROWTH_INTERVAL INITIAL_SCALE LossScale WEIGHT_DIVISOR",
    "dream_trainer.version": "__version__",
    "dream_trainer.weights.adapters": "refuse_other_adapters",
    "dream_trainer.weights.export": "export_checkpoint export_model",
    "dream_trainer.weights.load": "load_weights",
    "dream_trainer.weights.weight_files": "DTYPE_NAMES TensorSpec file_order write_safetensors",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"tests/api.py has no {name!r}. Add it to the module that defines it.")
    return getattr(import_module(_MODULES[name]), name)

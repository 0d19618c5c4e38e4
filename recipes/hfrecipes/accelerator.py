"""accelerate's Accelerator as the training recipes want it."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, parse_flag_from_env

from .corpus import RecipeError


def make_accelerator(config: Any) -> Accelerator:
    """One that shares a batch among the processes, by the settings of a run.

    Raises:
        RecipeError: accelerate refuses the settings, or a batch can't be shared by the processes.
    """
    shard_on_cpu()
    try:
        accelerator = Accelerator(
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            log_with=None if config.tracker == "none" else config.tracker,
            project_dir=Path(config.output_dir),
            dataloader_config=DataLoaderConfiguration(split_batches=True),  # a batch is shared, not multiplied
        )
    except ValueError as error:  # a precision that the device lacks, for one
        raise RecipeError(f"accelerate refuses: {error}") from None
    processes = accelerator.num_processes
    if config.batch_size % processes:
        raise RecipeError(f"--batch_size {config.batch_size} can't be shared by {processes} processes")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = config.batch_size // processes  # it asks before it sees a loader
        settings["gradient_clipping"] = config.max_grad_norm  # it clips itself, 0: not at all
    return accelerator


def shard_on_cpu() -> None:
    """FSDP on CPUs, where it is asked for: accelerate 1.15 would train whole copies there, without a word."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and parse_flag_from_env("ACCELERATE_USE_CPU"):
        state = PartialState(cpu=True)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU  # as which it reads FSDP's settings; the device stays

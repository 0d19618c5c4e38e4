"""Settings of recipes, from flags and YAML files, checked before any work.

They are fields of dataclasses, each with its help and the range that it is checked against.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from methods import CONTROL, STARTS, request_of
from texts import RecipeError, refusing
from transformers import HfArgumentParser

from .tasks import TASKS, find_task


class Range:
    """Numbers that a setting may be, as argparse's choices; neither NaN nor infinite."""

    def __init__(self, words: str, holds: Callable[[float], bool]) -> None:
        self.words, self.holds = words, holds

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.holds(number)

    def __iter__(self) -> Iterator[str]:  # what --help and errors show
        yield self.words


def at_least(least: float) -> Range:
    return Range(f"at least {least}", lambda number: number >= least)


def multiple_of(unit: int) -> Range:
    """Widths that are cut into heads of one size."""
    return Range(f"a multiple of {unit}", lambda number: number > 0 and number % unit == 0)


COUNT, NOT_NEGATIVE = at_least(1), at_least(0)
POSITIVE = Range("above 0", lambda number: number > 0)
SHARE = Range("above 0, at most 1", lambda number: 0 < number <= 1)
RATE = Range("from 0 to below 1", lambda number: 0 <= number < 1)


def option(default: Any, help: str, choices: Range | Collection | None = None) -> Any:
    """A field: its default, or a function that makes it; what --help says; what it, or each of its items, may be."""
    if isinstance(default, list):
        default = default.copy
    kind = "default_factory" if callable(default) else "default"
    metadata = {"help": help} if choices is None else {"help": help, "choices": choices}
    return field(**{kind: default}, metadata=metadata)


@dataclass
class RunConfig:
    """Settings of training in general; a task adds its own."""

    task: str = option("lm", "what is learnt; each task has flags of its own: --task classify --help", TASKS)
    variants: list[str] = option(
        ["rms", "dyt", "rope", "rms+rope", CONTROL],
        "what to compare: a norm, a position scheme or norm+position, by registered name, with options as in "
        "dyt:alpha=0.8; 'control' is the unpatched copy",
    )
    output_dir: str = option("runs/finetune", "where results, models and states go")
    baseline_steps: int | None = option(
        None, "steps before the copies are made; none: 900 from scratch, 0 for --model", NOT_NEGATIVE
    )
    steps: int = option(150, "steps after the patch, the same for every variant", COUNT)
    start: str = option(
        "repaired",
        "how a patched copy begins: repaired on --calibration training inputs; auto: the closest that takes no data; "
        "copied: gains and shifts as they were, nothing else touched; reset: fresh, for training from scratch",
        STARTS,
    )
    keep: list[str] = option(
        [], "modules that stay, by name; auto:0.25: as many norms go as leave 0.25 nats, by prices on --calibration"
    )
    calibration: int = option(64, "training items that a repair takes", at_least(2))
    batch_size: int = option(16, "items in a batch", COUNT)
    learning_rate: float = option(2e-3, "peak of AdamW's learning rate", POSITIVE)
    warmup_steps: int = option(
        10, "steps of linear warmup; then constant (baseline) or cosine to 0 (after the patch)", NOT_NEGATIVE
    )
    keep_dropout: bool = option(
        False,
        "train given models and patched copies with their dropout, the control too; repaired weights lose by it "
        "(measured). What is trained from scratch always has the task's",
    )
    weight_decay: float = option(0.01, "AdamW's decay, on matrices only", NOT_NEGATIVE)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: not at all", NOT_NEGATIVE)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(None, "none: as accelerate launch says, else no")
    eval_every: int = option(10, "steps between points of the curves", COUNT)
    save_every: int = option(50, "steps between saved states", COUNT)
    seed: int = option(0, "of weights and of the order of the data; never of the split", NOT_NEGATIVE)
    resume: bool = option(False, "go on where a run with the same settings stopped")
    stop_after: int | None = option(None, "save and stop after so many steps, for machines with a time limit", COUNT)

    def check(self) -> None:
        if self.model is None and self.baseline_steps == 0 and self.start != "reset":
            raise RecipeError(
                "--baseline_steps 0 leaves a model from scratch untrained: there is nothing to heal back to "
                "(--start reset compares models that are all trained from scratch)"
            )
        if len(set(self.variants)) < len(self.variants):
            raise RecipeError(f"a variant is named twice in --variants {' '.join(self.variants)}")
        for variant in self.variants:
            request_of(variant)


# Settings that may change between a stopped run and its continuation without making its figures incomparable.
FREE_TO_CHANGE = {"variants", "output_dir", "save_every", "stop_after"}


def spell_out(argv: list[str]) -> list[str]:
    """Flags alone: those of a YAML file that comes first, then the others, which win."""
    if not (argv and argv[0].endswith((".yaml", ".yml"))):
        return argv
    path, argv = argv[0], argv[1:]
    with refusing(f"can't read 'name: value' lines in {path}"):
        items = (yaml.safe_load(Path(path).read_text("utf-8")) or {}).items()
    flags = []
    for name, value in items:  # through the parser, so that YAML and flags are checked alike
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *map(str, values)] if value is not None else []
    return flags + argv


class Parser(HfArgumentParser):
    """Flags of dataclasses; what is wrong with them is a RecipeError."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message} (see {self.prog} --help; a YAML file comes first)")


def read_settings(
    kinds: type | tuple[type, ...], argv: list[str], recipe: str, about: str = "", unused: Iterable[str] = ()
) -> Any:
    """Settings from flags, or from a YAML file followed by flags, which win.

    Several dataclasses make one flat object; where two have a field of the same name, the first one's holds. --help
    doesn't speak of the `unused` ones.
    """
    if isinstance(kinds, tuple):
        kinds = dataclass(type("Settings", kinds, {}))
    usage = "%(prog)s [CONFIG.yaml] [--flag value ...]"
    more = "CONFIG.yaml holds the same names; flags override it."
    parser = Parser(kinds, prog=recipe, usage=usage, description=about, epilog=more, allow_abbrev=False)
    for action in parser._actions:
        if action.dest in unused:
            action.help = argparse.SUPPRESS
    return kinds(**vars(parser.parse_args(spell_out(argv))))


def read_run(argv: list[str], recipe: str, about: str = "", more: tuple[type, ...] = ()) -> Any:
    """Settings of a recipe that trains: its own (`more`), the task's and training's."""
    flags = spell_out(argv)
    return read_settings((*more, chosen_task(flags).Config, RunConfig), flags, recipe, about)


def chosen_task(flags: list[str]) -> Any:
    """The class of the task that the flags name last; its own flags aren't known before."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", default="lm")
    return find_task(parser.parse_known_args(flags)[0].task)


def parse_variants(names: str) -> list[dict[str, str]]:
    """Those of patches one after the other: "rms then folded". None of the control, which isn't patched."""
    return [request for name in names.split(" then ") if (request := request_of(name))]


def check(config: Any) -> None:
    """Refuse what can't work before anything is read, trained or written: by the `check` of each of its dataclasses.

    The output folder is made, or refused where it can't be written to.
    """
    for kind in type(config).__mro__:
        if "check" in vars(kind):
            kind.check(config)
    path = config.output_dir
    with refusing(f"can't write to the output folder {path}"):
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()

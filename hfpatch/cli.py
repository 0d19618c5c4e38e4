"""The command line: `hfpatch families`, `plan MODEL`, `patch MODEL OUT`, `verify MODEL REF`, `export`, `push`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import typer
import typer.core
from transformers import AutoConfig

import hfpatch

from .checkpoint.auto_classes import auto_classes_of, class_to_build
from .core.plan_table import table
from .core.progress import show_progress
from .core.registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS
from .errors import NotPreservedWarning
from .export import export_model
from .export.files import require_free, staged
from .hub.push import push_patched
from .measure.text_batches import processor_of, text_batches, tokenizer_of
from .patch import patch_model, repair_report
from .plan import plan_patch
from .repairs.sample import generates, sample_batches
from .runtime.errors import PatchError, first_line
from .runtime.lens import host_class
from .runtime.qk_layouts import Fused
from .schemes.positions import Position
from .verification import verify as verification
from .verification.report import Report


class _Commands(typer.core.TyperGroup):
    """The commands, with errors that a user can put right as one line and exit status 1; others keep a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _own_warnings():
                return super().invoke(ctx)
        except (PatchError, OSError, ValueError) as error:
            message = str(error) if isinstance(error, PatchError) else first_line(error)
            if "trust_remote_code=True" in str(error):
                message += " Pass --trust-remote-code to run it."
            typer.echo(f"Error: {message}", err=True)
            raise typer.Exit(1) from None


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """hfpatch's warnings as one line each on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", NotPreservedWarning)
        show = warnings.showwarning

        def print_own(message: Any, category: Any, *rest: Any) -> None:
            if issubclass(category, NotPreservedWarning):
                typer.echo(f"Warning: {message}", err=True)
            else:
                show(message, category, *rest)

        warnings.showwarning = print_own  # type: ignore[assignment]
        yield


app = typer.Typer(
    cls=_Commands,
    help="Architecture surgery for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fills paragraphs
)


def _one_of(names: Any) -> str:
    return f"One of: {', '.join(names)}."


def _option(text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, **settings)


Model = Annotated[str, typer.Argument(help="A Hub id, a folder, or config:FAMILY for random weights (config:gpt2).")]
Patched = Annotated[str, typer.Argument(help="The patched checkpoint: a Hub id or a folder.")]
Norm = Annotated[str | None, _option(f"Norm scheme, with options as dyt:alpha=0.8. {_one_of(NORMS)}")]
Pos = Annotated[str | None, _option(f"Position scheme, with options as rope:theta=5e5. {_one_of(POSITIONS)}")]
Mlp = Annotated[str | None, _option(f"MLP scheme, with options as swiglu:d_ff=2048. {_one_of(MLPS)}")]
Placement = Annotated[str | None, _option(f"Where norms stand, for training from scratch. {_one_of(PLACEMENTS)}")]
Only = Annotated[list[str] | None, _option("Glob over module names; others are kept. Repeatable.")]
Keep = Annotated[list[str] | None, _option("Glob over module names that stay as they are. Repeatable.")]
Init = Annotated[Literal["auto", "exact", "copy", "reset"], _option("How new parameters start; reset: afresh.")]
Head = Annotated[str | None, _option("Auto class to build, such as AutoModel; default: what it was saved as.")]
Trust = Annotated[bool, _option("Run the code in the model's repository.", "--trust-remote-code")]
Shard = Annotated[str, _option("Largest file of weights, such as 2GB.")]
Length = Annotated[int, _option("Most tokens of a sequence; longer ones are cut.", "--length", "--tokens", min=2)]
Overwrite = Annotated[bool, _option("Replace OUT, with everything in it, once all has gone well.", "--overwrite")]
Form = Literal["native", "remote", "plugin"]
_CALIBRATION = (
    "What repairs a lossy swap: 'self' (sequences drawn from the model: the default where it generates and has "
    "weights), a text file with one example a line, or 'none'."
)
_FIT = "What a repair of positions fits to attention maps: weights and biases of queries and keys, or their biases."
_TO = (
    "What opens it: 'native' transformers alone, as a stock architecture of equal outputs, where there is one; "
    "'remote' trust_remote_code=True; 'plugin' import hfpatch."
)


def _version(wanted: bool) -> None:
    if wanted:
        libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
        typer.echo(f"hfpatch {hfpatch.__version__} ({libraries})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, _option("Print versions.", "--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Swap the norms, positions and MLPs of pretrained models, and save checkpoints that open again."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@app.command()
def families() -> None:
    """List the families whose positions can be changed; norms and MLPs can be changed in any model."""
    lines = [("family", "position-owning class", "table", "queries and keys", "example")]
    for name, record in ARCHITECTURES.items():
        for stack in record.stacks:
            p = stack.projections
            projections = f"{p.name} (fused)" if isinstance(p, Fused) else f"{p.query}, {p.key}"
            lines.append((name, stack.owner, stack.table, projections, record.example))
    typer.echo(table(lines))
    typer.echo(f"\n{len(ARCHITECTURES)} families for pos= ({', '.join(POSITIONS)}).")
    typer.echo(f"norm= ({', '.join(NORMS)}) works on every model with LayerNorm-like modules.")
    typer.echo(f"mlp= ({', '.join(MLPS)}) works on every model whose MLPs aren't gated yet or mixtures.")


@app.command()
def plan(
    model: Model,
    norm: Norm = None,
    pos: Pos = None,
    mlp: Mlp = None,
    only: Only = None,
    keep: Keep = None,
    init: Init = "auto",
    placement: Placement = None,
    head: Head = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show what a patch would change, what it would keep, and why. Reads the config only: no weights are loaded."""
    with torch.device("meta"):
        built = _random(_config(model, trust_remote_code), head, trust_remote_code)
    typer.echo(str(plan_patch(built, norm, pos, only, keep, init, mlp=mlp, placement=placement)))


@app.command()
def patch(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder for the patched checkpoint.")],
    norm: Norm = None,
    pos: Pos = None,
    mlp: Mlp = None,
    only: Only = None,
    keep: Keep = None,
    init: Init = "auto",
    placement: Placement = None,
    head: Head = None,
    calibration: Annotated[str | None, _option(_CALIBRATION)] = None,
    sequences: Annotated[int, _option("How many sequences a repair takes.", min=2)] = 256,
    length: Length = 128,
    fit: Annotated[Literal["qk", "bias"], _option(_FIT)] = "qk",
    report: Annotated[Path | None, _option("Save what the repair did as this .json file.")] = None,
    seed: Annotated[int, _option("Seed of random weights (config:FAMILY) and of samples.")] = 0,
    max_shard_size: Shard = "50GB",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Patch a model and save it, with its tokenizer or processor, as a checkpoint: all of it, or nothing."""
    _require_apart(out, model, calibration)
    require_free(out, overwrite)
    torch.manual_seed(seed)
    built = _open(model, head, trust_remote_code)
    request: dict[str, Any] = {"norm": norm, "pos": pos, "mlp": mlp, "only": only, "keep": keep, "init": init}
    request["placement"] = placement
    planned = plan_patch(built, **request)
    typer.echo(str(planned))
    processor = None if _is_config(model) else processor_of(model, trust_remote_code)
    with show_progress():
        if calibration is None:
            calibration = "self" if not _is_config(model) and generates(built) else "none"
        if planned.losses() and init != "reset" and calibration != "none":
            most = f"up to {sequences} sequences of {length} tokens"
            typer.echo(f"\nRepairs on {most} (--sequences, --length: fewer take less time).")
            request["calibration"] = (
                sample_batches(built, sequences, length, seed)
                if calibration == "self"
                else text_batches(Path(calibration), built, processor, sequences, length)
            )
        scheme = Position.resolve(pos)
        has_length = scheme is not None and scheme.max_positions is not None
        patch_model(built, **request, fit=fit, tokenizer=tokenizer_of(processor) if has_length else None)
    repaired = repair_report(built)
    if repaired is not None:
        typer.echo(f"\n{repaired}")
    with staged(out, overwrite) as folder:
        built.save_pretrained(folder, max_shard_size=max_shard_size)
        if processor is not None:
            processor.save_pretrained(folder)
    if repaired is not None and report is not None:
        repaired.save(report)
    carried = "with its tokenizer or processor" if processor else "(no tokenizer or processor to carry along)"
    typer.echo(f"\nSaved to {out} {carried}.")
    auto = [*auto_classes_of(host_class(type(built)), host_class(type(built.config))), "AutoModel"][0]
    typer.echo(f"Open it with: import hfpatch; transformers.{auto}.from_pretrained({str(out)!r})")


@app.command()
def verify(
    model: Patched,
    reference: Annotated[str, typer.Argument(help="The original's Hub id or folder.")],
    text: Annotated[Path | None, _option("Text file, one example a line; default: random inputs.")] = None,
    json: Annotated[Path | None, _option("Save the report as this .json file.", "--json")] = None,
    plot: Annotated[Path | None, _option("Draw the error layer by layer into this .png file.")] = None,
    examples: Annotated[int, _option("How many lines of the text are used, from its start.", min=1)] = 64,
    length: Length = 128,
    head: Head = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure what a patch changed: modules, outputs by dtype and layers, against the original in float64."""
    if json is not None and json.suffix != ".json":
        raise PatchError(f"--json {json}: the name must end in .json.")
    if _is_config(model) or _is_config(reference):
        raise PatchError("verify compares two checkpoints; random weights (config:FAMILY) have no original.")
    built = _open(model, head, trust_remote_code)
    original = _open(reference, head, trust_remote_code) if trust_remote_code else reference
    batches = None
    if text is not None:
        processor = processor_of(model, trust_remote_code) or processor_of(reference, trust_remote_code)
        batches = text_batches(text, built, processor, examples, length)
    report = verification.verify(built, original, batches)
    typer.echo(str(report))
    if json is not None:
        report.save(json)
        typer.echo(f"\nSaved to {json}.")
    if plot is not None:
        report.plot(plot)
        typer.echo(f"\nPlotted to {plot}.")


@app.command()
def export(
    model: Patched,
    out: Annotated[Path, typer.Argument(help="Folder for what is written.")],
    to: Annotated[Form, _option(_TO)] = "native",
    architecture: Annotated[str | None, _option("Of --to native: the only one to try, such as gpt_neox.")] = None,
    head: Head = None,
    max_shard_size: Shard = "50GB",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a patched checkpoint for whoever is to open it, with its tokenizer or processor.

    A native export is measured before it is saved: the stock architecture's outputs against the patched model's, on
    random inputs. Where no architecture is equal, nothing is written, and the reason is given for each.
    """
    if _is_config(model):
        raise PatchError("export writes a checkpoint for others; random weights (config:FAMILY) are none.")
    _require_apart(out, model)
    built = _open(model, head, trust_remote_code)
    processor = processor_of(model, trust_remote_code)
    how: dict[str, Any] = {"tokenizer": processor, "overwrite": overwrite, "max_shard_size": max_shard_size}
    typer.echo(str(export_model(built, out, to, architecture=architecture, **how)))
    if processor is None:
        typer.echo("No tokenizer or processor was found to carry along.")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="The patched checkpoint's folder.")],
    repo: Annotated[str, typer.Argument(help="The Hub id of the repository: user/name, or name for one's own.")],
    base: Annotated[str | None, _option("The model that was patched: its Hub id or folder, for the card.")] = None,
    license: Annotated[str | None, _option("The licence's id on the Hub; default: the base's, where known.")] = None,
    report: Annotated[Path | None, _option("A .json file that verify saved, for the card.")] = None,
    tokenizer: Annotated[str | None, _option("Its Hub id or folder, where the checkpoint's folder has none.")] = None,
    form: Annotated[Form | None, _option("What it is exported as first, as in export --to; default: as it is.")] = None,
    native: Annotated[bool, _option("The folder is a native export, without a record.", "--native")] = False,
    public: Annotated[bool, _option("A repository that is made is public, not private.", "--public")] = False,
    revision: Annotated[str | None, _option("The branch; it is made where it doesn't exist.")] = None,
    subfolder: Annotated[str, _option("The folder in the repository.")] = "",
    create_pr: Annotated[bool, _option("Open a pull request instead of committing.", "--create-pr")] = False,
    message: Annotated[str | None, _option("The commit's first line.")] = None,
    dry_run: Annotated[bool, _option("Send nothing; list what would be uploaded.", "--dry-run")] = False,
) -> None:
    """Push a patched checkpoint to the Hub, with a model card, as one commit; resumed where it broke off."""
    push = push_patched(
        folder,
        repo,
        form=form,
        native=native,
        tokenizer=tokenizer,
        base_model=base,
        license=license,
        report=None if report is None else Report.load(report),
        private=not public,
        revision=revision,
        subfolder=subfolder,
        create_pr=create_pr,
        commit_message=message,
        dry_run=dry_run,
    )
    typer.echo(str(push))


def _require_apart(out: Path, *sources: str | None) -> None:
    """Refuse a folder that would be replaced while it holds what is read, a checkpoint or a text."""
    for source in sources:
        if source and Path(source).exists() and Path(source).resolve().is_relative_to(out.resolve()):
            raise PatchError(f"OUT ({out}) holds {source}, which it would replace. Choose another folder.")


def _is_config(model: str) -> bool:
    return model.startswith("config:")


def _config(model: str, trust: bool) -> Any:
    if not _is_config(model):
        return AutoConfig.from_pretrained(model, trust_remote_code=trust)
    family = model.removeprefix("config:")
    try:
        return AutoConfig.for_model(family)
    except ValueError:
        raise PatchError(f"transformers {transformers.__version__} has no family {family!r}.") from None


def _random(config: Any, head: str | None, trust: bool) -> Any:
    cls = class_to_build(config, head)
    if hasattr(cls, "from_config"):
        return cls.from_config(config, trust_remote_code=trust).eval()
    return cls._from_config(config).eval()


def _open(model: str, head: str | None, trust: bool) -> Any:
    config = _config(model, trust)
    if _is_config(model):
        return _random(config, head, trust)
    return class_to_build(config, head).from_pretrained(model, config=config, dtype="auto", trust_remote_code=trust)


if __name__ == "__main__":
    sys.exit(app())

"""The command line: `hfpatch families`, `plan MODEL`, `patch MODEL OUT`, `verify MODEL REF`, `export`, `push`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig

import hfpatch

from .checkpoint.auto_classes import auto_classes_of, class_to_build
from .core.plan_table import table
from .core.progress import show_progress
from .core.registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS
from .errors import NotPreservedWarning
from .export import FORMS, export_model
from .export.files import require_free, staged
from .hub.push import push_patched
from .measure.text_batches import processor_of, set_length, text_batches
from .patch import patch_model, repair_report
from .plan import plan_patch
from .repairs.sample import generates, sample_batches
from .runtime.errors import PatchError, first_line
from .runtime.lens import host_class
from .runtime.qk_layouts import Fused
from .schemes.positions import Position
from .verification import verify as verifying
from .verification.report import Report

app = typer.Typer(
    help="Architecture surgery for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _one_of(names: Any) -> str:
    return f"One of: {', '.join(names)}."


Model = Annotated[str, typer.Argument(help="A Hub id, a folder, or config:FAMILY for random weights (config:gpt2).")]
Patched = Annotated[str, typer.Argument(help="The patched checkpoint: a Hub id or a folder.")]
_NORM = f"Norm scheme, with options as dyt:alpha=0.8. {_one_of(NORMS)}"
NormOption = Annotated[str | None, typer.Option("--norm", help=_NORM)]
_POS = f"Position scheme, with options as rope:theta=5e5 or rope:max_positions=8192. {_one_of(POSITIONS)}"
PosOption = Annotated[str | None, typer.Option("--pos", help=_POS)]
_MLP = f"MLP scheme, with options as swiglu:d_ff=2048. {_one_of(MLPS)}"
MlpOption = Annotated[str | None, typer.Option("--mlp", help=_MLP)]
_PLACEMENT = f"Where norms stand, for training from scratch. {_one_of(PLACEMENTS)}"
PlacementOption = Annotated[str | None, typer.Option("--placement", help=_PLACEMENT)]
_ONLY = "Glob over module names; others are kept. Repeatable."
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help=_ONLY)]
_KEEP = "Glob over module names that stay as they are. Repeatable."
KeepOption = Annotated[list[str] | None, typer.Option("--keep", help=_KEEP)]
InitOption = Annotated[str, typer.Option("--init", help="How new parameters start: auto, exact, copy or reset.")]
_HEAD = "Auto class to build, such as AutoModel; default: what the checkpoint was saved as."
HeadOption = Annotated[str | None, typer.Option("--head", help=_HEAD)]
_TRUST = "Run the code in the model's repository, for models that aren't part of transformers."
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help=_TRUST)]
_SHARD = "Largest file of weights, such as 2GB."
ShardOption = Annotated[str, typer.Option("--max-shard-size", help=_SHARD)]
LengthOption = Annotated[
    int, typer.Option("--length", "--tokens", min=2, help="Most tokens of a sequence; longer ones are cut.")
]
_CALIBRATION = (
    "What repairs a lossy swap: 'self' (sequences drawn from the model: the default where it generates and has "
    "weights), a text file with one example a line, or 'none'."
)
_FIT = (
    "What a repair of positions fits to the original's attention maps: 'qk', weights and biases of queries and keys, "
    "or 'bias', their biases alone."
)
_TO = (
    "What opens it: 'native' transformers alone, as a stock architecture of equal outputs, where there is one; "
    "'remote' trust_remote_code=True; 'plugin' import hfpatch."
)
_ARCHITECTURE = "Of --to native: the only architecture to try, such as gpt_neox; default: the first equal one."
_OVERWRITE = "Replace OUT, with everything in it, once all has gone well."
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help=_OVERWRITE)]


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    """hfpatch's warnings on stderr, and one line and exit status 1 for errors that a user can put right.

    Everything else keeps its traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", NotPreservedWarning)
            show = warnings.showwarning

            def print_ours(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
                if issubclass(category, NotPreservedWarning):
                    typer.echo(f"Warning: {message}", err=True)
                else:
                    show(message, category, filename, lineno, *rest)

            warnings.showwarning = print_ours  # type: ignore[assignment]
            yield
    except (PatchError, OSError, ValueError) as error:
        message = str(error) if isinstance(error, PatchError) else first_line(error)
        if "trust_remote_code=True" in str(error):
            message += " Pass --trust-remote-code to run it."
        typer.echo(f"Error: {message}", err=True)
        raise typer.Exit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
        typer.echo(f"hfpatch {hfpatch.__version__} ({libraries})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions.")
    ] = False,
) -> None:
    """Swap the norms, positions and MLPs of pretrained models, and save checkpoints that open again."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@app.command()
def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="The README's support table.")] = False,
) -> None:
    """List the families whose positions can be changed; norms and MLPs can be changed in any model."""
    lines = [("family", "position-owning class", "table", "queries and keys", "example")]
    for name, record in ARCHITECTURES.items():
        for stack in record.stacks:
            p = stack.projections
            projections = f"{p.name} (fused)" if isinstance(p, Fused) else f"{p.query}, {p.key}"
            lines.append((name, stack.owner, stack.table, projections, record.example))
    if markdown:
        code = [lines[0], ("---",) * len(lines[0]), *(tuple(f"`{cell}`" for cell in line) for line in lines[1:])]
        typer.echo("\n".join(f"| {' | '.join(line)} |" for line in code))
        return
    typer.echo(table(lines))
    typer.echo(f"\n{len(ARCHITECTURES)} families for pos= ({', '.join(POSITIONS)}).")
    typer.echo(f"norm= ({', '.join(NORMS)}) works on every model with LayerNorm-like modules.")
    typer.echo(f"mlp= ({', '.join(MLPS)}) works on every model whose MLPs aren't gated yet or mixtures.")


@app.command()
def plan(
    model: Model,
    norm: NormOption = None,
    pos: PosOption = None,
    mlp: MlpOption = None,
    only: OnlyOption = None,
    keep: KeepOption = None,
    init: InitOption = "auto",
    placement: PlacementOption = None,
    head: HeadOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Show what a patch would change, what it would keep, and why. Reads the config only: no weights are loaded."""
    with _messages():
        with torch.device("meta"):
            built = _random(_config(model, trust_remote_code), head, trust_remote_code)
        typer.echo(str(plan_patch(built, norm, pos, only, keep, init, mlp=mlp, placement=placement)))


@app.command()
def patch(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder for the patched checkpoint.")],
    norm: NormOption = None,
    pos: PosOption = None,
    mlp: MlpOption = None,
    only: OnlyOption = None,
    keep: KeepOption = None,
    init: InitOption = "auto",
    placement: PlacementOption = None,
    head: HeadOption = None,
    calibration: Annotated[str | None, typer.Option(help=_CALIBRATION)] = None,
    sequences: Annotated[int, typer.Option(min=1, help="How many sequences a repair takes.")] = 256,
    length: LengthOption = 128,
    fit: Annotated[str, typer.Option(help=_FIT)] = "qk",
    report: Annotated[Path | None, typer.Option(help="Save what the repair did as this .json file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights (config:FAMILY) and of samples.")] = 0,
    max_shard_size: ShardOption = "50GB",
    trust_remote_code: TrustOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Patch a model and save it, with its tokenizer or processor, as a checkpoint: all of it, or nothing."""
    with _messages():
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
            patch_model(built, **request, fit=fit)
        repaired = repair_report(built)
        if repaired is not None:
            typer.echo(f"\n{repaired}")
        with staged(out, overwrite) as folder:
            built.save_pretrained(folder, max_shard_size=max_shard_size)
            if processor is not None:
                scheme = Position.resolve(pos)
                if scheme is not None and scheme.max_positions is not None:
                    set_length(processor, scheme.max_positions)
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
    text: Annotated[
        Path | None, typer.Option(help="Text file, one example a line; without it the inputs are random.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Save the report as this .json file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the error layer by layer into this .png file.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="How many lines of the text are used, from its start.")] = 64,
    length: LengthOption = 128,
    head: HeadOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure what a patch changed: modules, outputs by dtype and layers, against the original in float64."""
    with _messages():
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
        report = verifying.verify(built, original, batches)
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
    to: Annotated[str, typer.Option("--to", help=_TO)] = "native",
    architecture: Annotated[str | None, typer.Option(help=_ARCHITECTURE)] = None,
    head: HeadOption = None,
    max_shard_size: ShardOption = "50GB",
    trust_remote_code: TrustOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Write a patched checkpoint for whoever is to open it, with its tokenizer or processor.

    A native export is measured before it is saved: the stock architecture's outputs against the patched model's, on
    random inputs. Where no architecture is equal, nothing is written, and the reason is given for each.
    """
    with _messages():
        if to not in FORMS:
            raise PatchError(f"--to {to}: choose one of {', '.join(FORMS)}.")
        if _is_config(model):
            raise PatchError("export writes a checkpoint for others; random weights (config:FAMILY) are none.")
        _require_apart(out, model)
        built = _open(model, head, trust_remote_code)
        processor = processor_of(model, trust_remote_code)
        options: dict[str, Any] = {
            "architecture": architecture,
            "overwrite": overwrite,
            "max_shard_size": max_shard_size,
        }
        typer.echo(str(export_model(built, out, to, tokenizer=processor, **options)))
        if processor is None:
            typer.echo("No tokenizer or processor was found to carry along.")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="The patched checkpoint's folder.")],
    repo: Annotated[str, typer.Argument(help="The Hub id of the repository: user/name, or name for one's own.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The model that was patched: its Hub id or folder, for the card.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="The licence's id on the Hub; default: the base's, where its card can be read.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="A .json file that verify saved, for the card.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub id or folder of the tokenizer or processor, where the folder has none.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="What it is exported as first: 'native', 'remote' or 'plugin', as in export; default: as it is."
        ),
    ] = None,
    native: Annotated[bool, typer.Option("--native", help="The folder is a native export, without a record.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A repository that is made is public, not private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; it is made where it doesn't exist.")] = None,
    subfolder: Annotated[str, typer.Option(help="The folder in the repository.")] = "",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option(help="The commit's first line.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; list what would be uploaded.")] = False,
) -> None:
    """Push a patched checkpoint to the Hub, with a model card, as one commit; resumed where it broke off."""
    with _messages():
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

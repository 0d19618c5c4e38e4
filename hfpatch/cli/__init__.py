"""The command line: `hfpatch families`, `plan`, `patch`, `verify`, `report`, `export`, `push`, `run`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import typer

import hfpatch

from ..checkpoint.auto_classes import auto_classes_of
from ..checkpoint.by_name import config_of, is_config, open_model, random_weights
from ..checkpoint.file_digests import compare, read_digests
from ..checkpoint.sentence_modules import with_modules
from ..checkpoint.stored_config import OPENED
from ..core.mapped import unload_after_forward
from ..core.registry import ARCHITECTURES, MLPS, NORMS, POSITIONS
from ..core.results import Table
from ..core.staging import require_free, stage_folder
from ..errors import OptionError
from ..export import export_model
from ..export.runtimes import RUNTIMES
from ..hub.page import default_place, write_page
from ..hub.push import push_patched
from ..measure.batches import LENGTH, SEQUENCES
from ..measure.text_batches import processor_of, tokenizer_of
from ..patch import patch_model, repair_report
from ..plan import plan_patch
from ..repairs.repair import repair
from ..repairs.sample import generates
from ..runtime.errors import PatchError
from ..runtime.lens import host_class
from ..runtime.qk_layouts import Fused
from ..runtime.record import KEY
from ..schemes.positions import Position
from ..schemes.request import EXACT, MEASUREMENT_NOTE, Record
from ..verification import verify as verification
from ..verification.report import Report
from .launcher import launch
from .options import (
    Commands,
    Examples,
    Form,
    Head,
    Init,
    Keep,
    Length,
    Mlp,
    Model,
    Norm,
    Only,
    Overwrite,
    Patched,
    Placement,
    Pos,
    Reference,
    Shard,
    Text,
    Trust,
    inputs_of_repair,
    one_of,
    option,
    require_apart,
    require_size,
    require_writable,
    texts_of,
)

app = typer.Typer(
    cls=Commands,
    help="Architecture surgery for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fills paragraphs
)


_CALIBRATION = (
    "Data for the repair of a lossy swap: 'self' (sequences that the model generates; the default if it generates and "
    "has weights), a text file with one example a line, or 'none' for no repair."
)
_FIT = "What a repair of positions fits to attention maps: weights and biases of queries and keys, or their biases."
_TO = (
    "What opens it: 'native' transformers alone, as a stock architecture of equal outputs, where there is one; "
    "'remote' trust_remote_code=True; 'plugin' import hfpatch."
)


def _version(requested: bool) -> None:
    if requested:
        libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
        typer.echo(f"hfpatch {hfpatch.__version__} ({libraries})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, option("Print versions.", "--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Swap the norms, positions and MLPs of pretrained models, and save checkpoints that open again."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
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
    typer.echo(str(Table(lines)))
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
        built = random_weights(config_of(model, trust_remote_code), head, trust_remote_code)
    typer.echo(str(plan_patch(built, norm, pos, mlp=mlp, placement=placement, only=only, keep=keep, init=init)))


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
    calibration: Annotated[str | None, option(_CALIBRATION)] = None,
    sequences: Annotated[int, option("How many sequences a repair takes.", min=2)] = SEQUENCES,
    length: Length = LENGTH,
    fit: Annotated[Literal["qk", "bias"], option(_FIT)] = "qk",
    report: Annotated[Path | None, option("Save what the repair did as this .json file.")] = None,
    seed: Annotated[int, option("Seed of random weights (config:FAMILY) and of samples.")] = 0,
    max_shard_size: Annotated[str | None, option("As in export; default: files as those of MODEL.")] = None,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Patch a model, measure what that came to, and save it as a checkpoint, with its tokenizer or processor."""
    for place in (out, report):
        require_apart(place, model, calibration)
    require_free(out, overwrite)
    require_writable(report)
    require_size(max_shard_size)
    torch.manual_seed(seed)
    built = open_model(model, head, trust_remote_code, stored=True)
    kinds = {"norm": norm, "pos": pos, "mlp": mlp, "placement": placement}
    request: dict[str, Any] = {**kinds, "only": only, "keep": keep, "init": init}
    with unload_after_forward(built):
        planned = plan_patch(built, **request)
    typer.echo(str(planned))
    processor = None if is_config(model) else processor_of(model, trust_remote_code)
    if calibration is None:
        calibration = "self" if not is_config(model) and generates(built) else "none"
    repairs = init != "reset" and calibration != "none"
    inputs = functools.partial(inputs_of_repair, str(calibration), processor, sequences, length, seed)
    if repairs and planned.losses():
        request |= {"fit": fit, "calibration": inputs(built)}
    scheme = Position.resolve(pos)
    longest = None if scheme is None else scheme.max_positions
    saved = built if is_config(model) else with_modules(built, model, longest)
    with unload_after_forward(built):
        patch_model(built, **request, tokenizer=None if longest is None else tokenizer_of(processor))
    measured = Record.of(built.config).outcomes(planned.by_kind).values()
    if repairs and planned.changes and not planned.losses() and not all(one.verdict == EXACT for one in measured):
        torch.manual_seed(seed)  # what should have been exact wasn't: patch_model planned it anew
        original = open_model(model, head, trust_remote_code)
        repair(built, original, inputs(original), fit=fit)
    repaired = repair_report(built)
    if repaired is not None:
        typer.echo(f"\n{repaired}")
    outcomes = Record.of(built.config).outcomes()
    found = [(request, outcome.result) for request, outcome in outcomes.items()]
    typer.echo(f"\n{Table([('request', 'measured'), *found])}\n{MEASUREMENT_NOTE}")
    with stage_folder(out, overwrite) as folder:
        saved.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
        if processor is not None:
            processor.save_pretrained(folder)
    if repaired is not None and report is not None:
        repaired.save(report)
    elif report is not None:
        typer.echo(f"Warning: nothing was repaired, so there is no report to save as {report}.", err=True)
    carried = "with its tokenizer or processor" if processor else "(no tokenizer or processor to carry along)"
    summary = ", ".join(f"{request} is {outcome.verdict}" for request, outcome in outcomes.items())
    typer.echo(f"\nSaved to {out} {carried}: {summary}.")
    auto = [*auto_classes_of(host_class(type(built)), host_class(type(built.config))), "AutoModel"][0]
    typer.echo(f"Open it with: import hfpatch; transformers.{auto}.from_pretrained({str(out)!r})")


@app.command()
def verify(
    model: Patched,
    reference: Reference = None,
    text: Text = None,
    json: Annotated[Path | None, option("Save the report as this .json file.", "--json")] = None,
    plot: Annotated[Path | None, option("Draw the error layer by layer into this .png file.")] = None,
    examples: Examples = 64,
    length: Length = LENGTH,
    head: Head = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure what a patch changed: modules, outputs by dtype and layers, against the original in float64.

    Without REFERENCE: check that MODEL is the checkpoint that was saved, by every byte of its weights and a forward.
    """
    if reference is None:
        if text is not None or json is not None or plot is not None:
            raise OptionError("--text, --json and --plot go with a REFERENCE, the original to compare with.")
        _verify_files(model, head, trust_remote_code)
        return
    if json is not None and json.suffix != ".json":
        raise PatchError(f"--json {json}: the name must end in .json.")
    if is_config(model) or is_config(reference):
        raise PatchError("verify compares two checkpoints; random weights (config:FAMILY) have no original.")
    for place in (json, plot):
        require_apart(place, model, reference, text)
    built = open_model(model, head, trust_remote_code)
    report = _compare(built, model, reference, text, examples, length, head, trust_remote_code)
    typer.echo(str(report))
    if json is not None:
        report.save(json)
        typer.echo(f"\nSaved to {json}.")
    if plot is not None:
        report.plot(plot)
        typer.echo(f"\nPlotted to {plot}.")


@app.command()
def report(
    model: Patched,
    reference: Reference = None,
    out: Annotated[Path | None, option("The .html file; default: hfpatch_report.html in MODEL's folder.")] = None,
    json: Annotated[Path | None, option("A .json file that verify saved, instead of measuring.", "--json")] = None,
    text: Text = None,
    examples: Examples = 64,
    length: Length = LENGTH,
    head: Head = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write a page about a patched checkpoint: the block before and after, errors, how to open it and make it again.

    One HTML file that loads nothing. With a REFERENCE, the original, it is measured as by verify; --json takes a report
    that verify saved. A push takes hfpatch_report.html in the folder along, and the model card links to it.
    """
    if is_config(model):
        raise PatchError("report takes a patched checkpoint, not config:FAMILY (random weights).")
    if (json is not None or reference is None) and text is not None:
        raise OptionError("--text is what a REFERENCE is compared on, and --json is a comparison already.")
    place = default_place(model) if out is None else out
    if out is not None:
        require_apart(out, model, reference, text, json)
    saved = None if json is None else Report.load(json)
    built = open_model(model, head, trust_remote_code)
    if saved is None and reference is not None:
        saved = _compare(built, model, reference, text, examples, length, head, trust_remote_code)
    write_page(built, place, checkpoint=model, reference=reference, report=saved, repair=repair_report(built))
    typer.echo(f"Saved to {place}.")


@app.command()
def export(
    model: Patched,
    out: Annotated[Path, typer.Argument(help="Folder for what is written.")],
    to: Annotated[Form, option(_TO)] = "native",
    architecture: Annotated[str | None, option("With --to native: the only one to try, such as gpt_neox.")] = None,
    serve: Annotated[str | None, option(f"With --to native: what has to take it. {one_of(RUNTIMES)}")] = None,
    head: Head = None,
    max_shard_size: Shard = "50GB",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a patched checkpoint that opens with stock transformers or with remote code, with its tokenizer.

    A native export is measured before it is saved: the stock architecture's outputs against the patched model's, on
    random inputs. Where no architecture is equal, nothing is written, and the reason is given for each.
    """
    if is_config(model):
        raise PatchError("export takes a patched checkpoint, not config:FAMILY (random weights).")
    require_apart(out, model)
    require_size(max_shard_size)
    built = open_model(model, head, trust_remote_code, strongest=True)
    processor = processor_of(model, trust_remote_code)
    how: dict[str, Any] = {"tokenizer": processor, "overwrite": overwrite, "max_shard_size": max_shard_size}
    typer.echo(str(export_model(with_modules(built, model), out, to, architecture=architecture, serve=serve, **how)))
    if processor is None:
        typer.echo("No tokenizer or processor was found to save with it.")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="The patched checkpoint's folder.")],
    repo: Annotated[str, typer.Argument(help="The Hub id of the repository: user/name, or name for one's own.")],
    base: Annotated[str | None, option("The model that was patched: its Hub id or folder, for the card.")] = None,
    license: Annotated[str | None, option("The licence's id on the Hub; default: the base's, where known.")] = None,
    report: Annotated[Path | None, option("A .json file that verify saved, for the card.")] = None,
    tokenizer: Annotated[str | None, option("Hub id or folder of a tokenizer, if FOLDER has none.")] = None,
    native: Annotated[bool, option("The folder is a native export, which has no patch record.", "--native")] = False,
    public: Annotated[bool, option("Create the repository as public; default: private.", "--public")] = False,
    revision: Annotated[str | None, option("Branch to push to; created if it doesn't exist.")] = None,
    create_pr: Annotated[bool, option("Open a pull request instead of committing.", "--create-pr")] = False,
    message: Annotated[str | None, option("The commit's first line.")] = None,
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, option("Send nothing; list what would be uploaded.", "--dry-run")] = False,
) -> None:
    """Push a patched checkpoint to the Hub, with a model card, as one commit; run it again to resume a failed push."""
    push = push_patched(
        folder,
        repo,
        native=native,
        tokenizer=tokenizer,
        base_model=base,
        license=license,
        report=None if report is None else Report.load(report),
        private=not public,
        revision=revision,
        create_pr=create_pr,
        commit_message=message,
        trust_remote_code=trust_remote_code,
        dry_run=dry_run,
    )
    typer.echo(str(push))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A program, a .py file, or -m MODULE; then arguments.")
    ] = None,
) -> None:
    """Run another tool with hfpatch imported in every Python process that it starts: hfpatch run -- lm_eval ...

    So the tool opens checkpoints that need hfpatch (the plugin form). What stands behind `run` is the command's own;
    the `--` in front of it may be left out. A program is looked for beside this Python first, then in PATH, and its
    exit status is that of `run`. A Python that has no hfpatch says so on stderr, once it has imported transformers.
    """
    launch(command or [])


def _compare(
    built: Any, model: str, reference: str, text: Path | None, examples: int, length: int, head: str | None, trust: bool
) -> Report:
    """What `verify` measures of an opened model, on random inputs or on a text."""
    original = open_model(reference, head, trust) if trust else reference
    batches = None
    if text is not None:
        processor = processor_of(model, trust) or processor_of(reference, trust)
        batches = texts_of(text, built, processor, examples, length)
    return verification.verify(built, original, batches)


def _verify_files(model: str, head: str | None, trust: bool) -> None:
    """Compare all of a patched checkpoint's files with what was saved, open it, and say what was compared."""
    config = config_of(model, trust)
    if not hasattr(config, KEY):
        raise PatchError(f"{model} isn't a patched checkpoint. To compare two models: hfpatch verify MODEL REFERENCE.")
    saved = read_digests(model, {})
    found = compare(model, {}, saved)
    vars(config)[OPENED].require_unchanged(model, saved and saved.config, refuse=True)
    typer.echo(f"{found.tensors} tensors ({found.size:,} bytes) are those that were saved, byte by byte.")
    built = open_model(model, head, trust, **found.same)
    typer.echo(f"{type(built).__name__} opens, and config.json is the one that was saved.")

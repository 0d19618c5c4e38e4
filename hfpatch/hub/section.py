"""The section of a model card that a push writes: what was patched, how to open it, what was measured, the licence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..schemes.request import KINDS, Part, Record
from ..verification.report import Report, output_lines
from .folder import Folder

KIND_WORDS = {"norm": "norms", "pos": "positions", "mlp": "MLPs", "placement": "places of the norms"}


@dataclass(frozen=True)
class Base:
    """The model that was patched, as far as it is known.

    Attributes:
        repo_id: its id on the Hub; None where it came from a folder or nobody said.
        data: metadata of its card; None where the card wasn't at hand.
    """

    repo_id: str | None = None
    data: ModelCardData | None = None

    def inherited(self) -> dict[str, Any]:
        """What holds for the patched model too: its licence and its languages."""
        if self.data is None:
            return {}
        names = ("license", "license_name", "license_link", "language")
        found = {name: self.data.get(name) for name in names if self.data.get(name)}
        link = found.get("license_link")
        if link and self.repo_id and "://" not in str(link):  # a file beside the base model
            found["license_link"] = f"https://huggingface.co/{self.repo_id}/blob/main/{link}"
        return found


@dataclass(frozen=True)
class Facts:
    """What a card tells besides the checkpoint itself.

    Attributes:
        repo_id: where the checkpoint goes.
        subfolder: in which folder there; empty at its root.
        base: the model that was patched.
        license: as the caller says; None takes the base's.
        report: what `verify` measured.
        eval_results: results for the metadata.
    """

    repo_id: str
    subfolder: str = ""
    base: Base = field(default_factory=Base)
    license: str | None = None
    report: Report | None = None
    eval_results: tuple[EvalResult, ...] = ()


def section(folder: Folder, facts: Facts, auto: str, data: ModelCardData) -> Iterable[str]:
    """Its paragraphs.

    Args:
        auto: the Auto class that opens the checkpoint.
        data: the metadata of the card that the section is in.
    """
    yield _summary(folder, data.base_model)
    if folder.record is not None:
        yield "## What was patched\n\n" + _parts_table(folder.record)
    yield "## How to open it\n\n" + "\n\n".join(_ways(folder, facts, auto))
    if facts.report is not None:
        yield "## What the patch changed, measured\n\n" + _report(facts.report)
    yield "## Licence\n\n" + _licence(facts, data)


def _summary(folder: Folder, base: str | list[str] | None) -> str:
    bases = [base] if isinstance(base, str) else base or []
    of = " and ".join(f"[{one}](https://huggingface.co/{one})" for one in bases) or "a pretrained model"
    if folder.record is None:
        return (
            f"{of[0].upper()}{of[1:]}, patched by hfpatch and exported as a stock `{folder.config.get('model_type')}` "
            "model, which transformers opens by itself."
        )
    host = (folder.config.get("architectures") or [folder.record.base_model_type])[0]
    schemes: dict[str, dict[str, None]] = {}
    for kind, part in parts_of(folder.record):
        schemes.setdefault(KIND_WORDS[kind], {})[f"`{part.scheme.name}`"] = None
    changes = [f"its {what} are {' and '.join(names)}" for what, names in schemes.items()]
    version = folder.config.get("transformers_version")
    made = f" Saved with transformers {version}." if version else ""
    return f"{of[0].upper()}{of[1:]} (`{host}`) with its architecture patched by hfpatch: {', '.join(changes)}.{made}"


def parts_of(record: Record | None) -> list[tuple[str, Part]]:
    """Every part of a record with its kind, kind after kind."""
    return [] if record is None else [(kind, part) for kind in KINDS for part in getattr(record, kind)]


def _parts_table(record: Record) -> str:
    lines = [("what", "scheme", "options", "modules", "where", "started")]
    for kind, part in parts_of(record):
        options = {name: value for name, value in part.scheme.to_json().items() if name != "name" and value is not None}
        where = [f"only {_code(part.only)}"] if part.only else ["everywhere"]
        where += [f"not {_code(part.keep)}"] if part.keep else []
        where += [f"not {_code(part.left)} (would not be exact)"] if part.left else []
        told = ", ".join(f"`{name}={value}`" for name, value in options.items())
        lines.append((kind, f"`{part.scheme.name}`", told, str(part.modules), ", ".join(where), f"`{part.init}`"))
    return _markdown(lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ways(folder: Folder, facts: Facts, auto: str) -> Iterable[str]:
    where = f'"{facts.repo_id}"' + (f', subfolder="{facts.subfolder}"' if facts.subfolder else "")
    head = f"from transformers import {auto}\n"
    if folder.record is None:
        yield f"With transformers alone:\n\n```python\n{head}\nmodel = {auto}.from_pretrained({where})\n```"
        return
    yield (
        "With hfpatch installed; without it transformers refuses the checkpoint, rather than open half of it:\n\n"
        f"```python\nimport hfpatch\n{head}\nmodel = {auto}.from_pretrained({where})\n```"
    )
    if auto in (folder.config.get("auto_map") or {}):
        yield (
            "Without hfpatch, by the code that the repository carries; read it, and give a commit as `revision=`:\n\n"
            f"```python\n{head}\nmodel = {auto}.from_pretrained({where}, trust_remote_code=True)\n```"
        )


def _report(report: Report) -> str:
    size = f"{report.examples} examples" + (f", {report.tokens:,} tokens" if report.tokens else "")
    outputs = dict.fromkeys(row.output for row in report.outputs)
    tables = [_markdown(output_lines([row for row in report.outputs if row.output == name])) for name in outputs]
    told = f"By `hfpatch verify`; the truth is the original (`reference`) in float64. Inputs: {report.inputs} ({size})."
    return "\n\n".join([told, *tables, *(f"Note: {note}" for note in report.notes)])


def _licence(facts: Facts, data: ModelCardData) -> str:
    if not data.license:
        at_hand = facts.base.data is not None
        reason = "the base model's card names none" if at_hand else "the base model's card wasn't at hand"
        return f"Not known: {reason}. Whatever licence the base model has holds here; look it up before use."
    name = f"`{data.license}`" + (f" ({data.license_name})" if data.license_name else "")
    carried = facts.license is None and facts.base.inherited().get("license") == data.license
    return f"{name}, carried over from the base model's card." if carried else f"{name}, as the metadata above says."


def _markdown(lines: Iterable[tuple[str, ...]]) -> str:
    escaped = [tuple(cell.replace("|", "\\|") for cell in line) for line in lines]
    escaped.insert(1, ("---",) * len(escaped[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)

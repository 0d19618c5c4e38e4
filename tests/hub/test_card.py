"""The card: what it says is so, what isn't known is left out, and what its author wrote stays."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import with_config
from hub_checks import NAME
from huggingface_hub import ModelCard, ModelCardData
from local_hub import LICENSES, Blob, LocalHub, Repo
from tiny_models import difference, load, patch, tiny

from hfpatch import push_patched
from hfpatch.checkpoint.files import PAGE
from hfpatch.checkpoint.remote_code import FILE
from hfpatch.errors import OptionError
from hfpatch.export import export_model
from hfpatch.hub.card import BEGIN, END, card
from hfpatch.hub.folder import Checkpoint, read_checkpoint
from hfpatch.runtime.edits import Edit
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE
from hfpatch.verification.verify_report import Report


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "checkpoint"
    model = tiny("gpt2", "AutoModelForCausalLM")
    patch(model, norm=DyT(0.7), only=["transformer.h.0.*"])
    patch(model, norm="rms", keep=["*.ln_f"], init="copy")
    patch(model, pos=RoPE(theta=500.0)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(checkpoint: Path) -> Checkpoint:
    return read_checkpoint(checkpoint)


def parsed(text: str) -> ModelCard:
    """The card as the client reads it back; its licence, base model and tags are such as the Hub takes."""
    card = ModelCard(text)
    data = card.data.to_dict()
    assert data.get("license", "other") in (*LICENSES, "other")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", data.get("base_model", "a/b"))
    assert all(isinstance(tag, str) for tag in data["tags"])
    return card


def of(folder: Checkpoint, written: str | None = None, **known: Any) -> tuple[str, list[str]]:
    return card(folder, "me/gpt2-dyt", written, **known)


def test_what_it_says(folder: Checkpoint) -> None:
    base = ModelCardData(license="mit", tags=["theirs"], pipeline_tag="other")
    report = Report("GPT2LMHeadModel (norm=dyt)", "GPT2LMHeadModel", "none", notes=["random inputs"])
    text, notes = of(folder, base_model="openai/gpt2", base_data=base, report=report)
    read = parsed(text)
    assert read.data.to_dict() == {
        "base_model": "openai/gpt2",
        "library_name": "hfpatch",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["hfpatch", "dyt", "rms", "rope"],
    }
    assert notes == []
    assert read.text.startswith("\n# gpt2-dyt\n")
    assert "[openai/gpt2](https://huggingface.co/openai/gpt2) (`GPT2LMHeadModel`)" in text
    assert "its norms are `dyt` and `rms`, its positions are `rope`." in text
    assert "hfpatch.patch_model(model, norm='dyt:alpha=0.7', only=['transformer.h.0.*'])" in text
    assert "hfpatch.patch_model(model, norm='rms', keep=['*.ln_f'], init='copy')" in text
    assert "hfpatch.patch_model(model, pos='rope:theta=500.0')\n```" in text
    assert "h.0.ln_1 | h.0.ln_2 = DynamicTanh(" in text
    assert "import hfpatch\nfrom transformers import AutoModelForCausalLM\n\nmodel = AutoModel" in text
    assert f"```\n{report}\n```" in text
    assert "trust_remote_code" not in text


def test_a_named_licence_comes_with_its_name_and_link(folder: Checkpoint) -> None:
    theirs = ModelCardData(license="other", license_name="their-terms", license_link="LICENSE")
    text, _ = of(folder, base_model="a/b", base_data=theirs)
    data = parsed(text).data
    assert (data.license, data.license_name) == ("other", "their-terms")
    assert data.license_link == "https://huggingface.co/a/b/blob/main/LICENSE"  # the file stays where it is
    text, _ = of(folder, base_model="a/b", base_data=theirs, license="mit")
    assert (parsed(text).data.license, parsed(text).data.get("license_name")) == ("mit", None)
    text, _ = of(folder, MINE, base_model="a/b", base_data=theirs)
    assert (parsed(text).data.license, parsed(text).data.get("license_name")) == ("gpl-3.0", None)


def test_how_to_open_it(folder: Checkpoint) -> None:
    """By the code in the repository, or after an export; the Hub shows the code of the library that the card names."""
    text, _ = of(folder)
    for form in ("remote", "native"):
        assert f"\nhfpatch export me/gpt2-dyt gpt2-dyt-{form} --to {form}\n" in text
    folder.config["auto_map"] = {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}
    folder.files[FILE] = Path(FILE)
    remote, _ = of(folder)
    assert 'from_pretrained("me/gpt2-dyt", trust_remote_code=True)' in remote
    mine = text.replace("library_name: hfpatch", "library_name: mine")
    for written, library in ((None, "transformers"), (text, "transformers"), (mine, "mine")):
        assert parsed(of(folder, written)[0]).data.library_name == library
    assert PAGE not in text
    text, _ = of(replace(folder, files={**folder.files, PAGE: Path(PAGE)}))
    assert "[hfpatch_report.html](hfpatch_report.html)" in text


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "auto", "task"),
    [
        ("gpt2", "AutoModel", "feature-extraction"),
        ("bert", "AutoModelForTokenClassification", "token-classification"),
        ("vit", "AutoModel", "image-feature-extraction"),
        ("gpt2", "AutoModelForCausalLM", "text-generation"),  # two more tasks have the same head
        ("bert", "AutoModelForSequenceClassification", "text-classification"),  # one more
        ("bert", "AutoModelForQuestionAnswering", "question-answering"),
        ("bart", "AutoModelForSeq2SeqLM", None),
        ("whisper", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    ],
)
def test_task_and_class(family: str, auto: str, task: str | None) -> None:
    model = patch(tiny(family, auto), norm="dyt")
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    text, _ = card(Checkpoint(config, model.config, None, {}, []), "me/model")
    assert f"{auto}.from_pretrained" in text
    assert parsed(text).data.pipeline_tag == task


# A card that is there already


MINE = """---
license: gpl-3.0
tags:
- mine
pipeline_tag: text2text-generation
model-index:
- name: Mine
  results:
  - task:
      type: text-generation
    dataset:
      type: wikitext
      name: WikiText-2
    metrics:
    - type: perplexity
      value: 99.0
    - type: accuracy
      value: 0.5
custom: [1, 2]
---

# My own words

with | a table | and `code`
"""


def test_the_authors_text_stays_and_metadata_is_completed(folder: Checkpoint) -> None:
    text, notes = of(folder, MINE, base_model="a/b", base_data=ModelCardData(license="mit"))
    read = parsed(text)
    assert read.text == ModelCard(MINE).text
    assert read.data.license == "gpl-3.0"
    assert read.data.pipeline_tag == "text2text-generation"
    assert read.data.tags == ["mine", "hfpatch", "dyt", "rms", "rope"]
    assert read.data.base_model == "a/b"
    assert read.data.to_dict()["custom"] == [1, 2]
    assert read.data.model_name == "Mine"
    values = {result.metric_type: result.metric_value for result in read.data.eval_results}
    assert values == {"accuracy": 0.5, "perplexity": 99.0}
    assert notes == ["README.md keeps its text; its metadata is completed"]
    assert of(folder, MINE, license="mit")[0].count("license: mit") == 1
    assert of(folder, text, base_model="a/b")[0] == text


def test_only_the_section_of_an_earlier_push_is_renewed(folder: Checkpoint) -> None:
    first, _ = of(folder, base_model="a/b", base_data=ModelCardData(license="mit"))
    edited = first.replace("# gpt2-dyt\n", "# gpt2-dyt\n\nMine, above.\n")
    edited = edited.replace("- rope", "- rope\n- mine\n- deepnorm")
    edited += "\n## Training\n\nMine, below.\n"
    later = replace(folder, config={**folder.config, "transformers_version": "9.9.9"})
    text, notes = of(later, edited)
    assert notes == []
    assert text.count(BEGIN) == text.count(END) == 1
    assert "Saved with transformers 9.9.9." in text
    above, below = (part.split(mark)[i] for part, mark, i in ((text, BEGIN, 0), (text, END, 1)))
    assert "Mine, above." in above
    assert below == edited.split(END)[1]
    data = parsed(text).data
    assert data.license == "mit"
    assert data.base_model == "a/b"
    assert "[a/b]" in text
    assert data.tags == ["hfpatch", "mine", "dyt", "rms", "rope"]  # deepnorm was another patch's
    assert of(later, text)[0] == text


def test_a_card_without_metadata_and_one_with_broken_metadata(folder: Checkpoint) -> None:
    text, _ = of(folder, "# Only text\n")
    assert parsed(text).text == "# Only text\n"
    assert parsed(text).data.tags == ["hfpatch", "dyt", "rms", "rope"]
    for broken in ("---\n- a list\n---\n", "---\na: [\n---\n", "---\nmodel-index: [{}]\n---\n"):
        with pytest.raises(OptionError, match=r"README\.md"):
            of(folder, broken)


# The code in it


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["plugin", "remote", "native"])
def test_its_code_runs(form: str, tmp_path: Path) -> None:
    """Each block as it is printed, but for the repository's name."""
    base, out = tmp_path / "base", tmp_path / "out"
    original = tiny("gpt2", "AutoModelForCausalLM")
    original.save_pretrained(base)
    model = patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms", pos=RoPE(theta=500.0))
    export_model(model, out, form, **({"verify": False} if form == "remote" else {}))
    found = read_checkpoint(out, native=form == "native")
    text, _ = card(found, "me/gpt2", base_model="openai/gpt2")
    text = text.replace('"me/gpt2"', repr(str(out))).replace('"openai/gpt2"', repr(str(base)))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == {"plugin": 2, "remote": 3, "native": 1}[form]
    for block in blocks:
        scope: dict[str, Any] = {}
        exec(block, scope)
        assert difference(model, scope["model"].eval()) < 1e-5
    assert difference(model, original) > 1e-3  # control


# On the Hub


def pushed(hub: LocalHub, name: str, model: Any, **options: Any) -> tuple[str | None, str | None, str]:
    """The base model and the licence in the card that a push wrote, and what the push says."""
    done = push_patched(model, name, **options)
    data = ModelCard(hub.repos[name].files()["README.md"].decode()).data.to_dict()
    return data.get("base_model"), data.get("license"), str(done)


def test_the_base_and_its_licence(hub: LocalHub, saved: Path, tmp_path: Path) -> None:
    """Of one that can't be seen there is no licence; of a model in memory it is known, but no path of this machine."""
    base, license, said = pushed(hub, "me/a", saved, base_model="strangers/secret")
    assert (base, license) == ("strangers/secret", None)
    assert "the licence isn't known" in said
    assert "a folder has none" not in said
    tiny("gpt2", "AutoModelForCausalLM").save_pretrained(tmp_path / "original")
    (tmp_path / "original/README.md").write_text("---\nlicense: mit\n---\n")
    base, license, said = pushed(hub, "me/b", patch(load(tmp_path / "original", "AutoModelForCausalLM"), norm="dyt"))
    assert (base, license) == (None, "mit")
    assert "doesn't name the model that was patched: pass its id on the Hub as base_model= (--base)" in said
    assert str(tmp_path).encode() not in b"".join(hub.repos["me/b"].files().values())
    repo = hub.repos["me/original"] = Repo("me/original", private=True)
    repo.push("original", {path.name: Blob(path.read_bytes()) for path in (tmp_path / "original").iterdir()})
    model = patch(load(repo.id, "AutoModelForCausalLM"), norm="dyt")
    assert pushed(hub, "me/c", model)[:2] == (repo.id, "mit")
    repo.push("no card", {path: blob for path, blob in repo.head.files.items() if path != "README.md"})
    assert pushed(hub, "me/d", model)[:2] == (repo.id, None)


def test_cards_in_the_folder_and_on_the_hub(hub: LocalHub, copied: Path) -> None:
    (copied / "README.md").write_text(MINE)
    push_patched(copied, NAME)
    assert (copied / "README.md").read_text() == MINE
    assert ModelCard(MINE).text.encode() in hub.repos[NAME].files()["README.md"]
    (copied / "README.md").unlink()
    before = hub.repos[NAME].head.oid
    assert push_patched(copied, NAME).commit == before  # the Hub's own is kept


BAD = "\n\n# Free weights\n\n<script>alert(1)</script> [here](https://example.org) ```"


def test_what_stands_in_config_json_is_no_markup(checkpoint: Path, tmp_path: Path) -> None:
    """The version and the class are outside of every digest; whoever wrote the file could put a page into the card."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    with_config(copy, transformers_version=f"5.0{BAD}", architectures=[f"GPT2LMHeadModel{BAD}"])
    text, _ = of(read_checkpoint(copy))
    assert "Saved with" not in text
    assert "(`gpt2`) with its architecture patched" in text
    original, _ = of(read_checkpoint(checkpoint))
    assert "(`GPT2LMHeadModel`) with its architecture patched" in original, "the control"
    assert "Saved with transformers" in original
    assert outside_code(text).keys() == outside_code(original).keys()
    assert read_checkpoint(copy).title == "gpt2"
    found = read_checkpoint(checkpoint)
    assert found.record is not None
    edits = (*found.record.edits, Edit.of("```", None))  # which looks like the end of a block
    text, _ = of(replace(found, record=replace(found.record, edits=edits)))
    assert outside_code(text) == outside_code(original)


def outside_code(text: str) -> dict[str, int]:
    """What a reader of Markdown finds outside of blocks of code: headings, tags, links and fences, and how often."""
    parts = re.split(r"(?ms)^(`{3,})\w*\n.*?^\1$", text)
    kinds = re.findall(r"(?m)^#+ .*|<[^>]*>|\]\([^)]*\)|```", "".join(parts[::2]))
    return {kind: kinds.count(kind) for kind in kinds}

"""evaluate.py at a size of seconds: its figures, its comparisons and its refusals."""

import json
import math
from pathlib import Path

import evaluate
import pytest
from texts import RecipeError
from transformers import AutoModelForCausalLM, AutoTokenizer


def run(out, text, *models, **flags):
    """The table of a run, by model."""
    words = [word for name, value in flags.items() for word in (f"--{name}", *map(str, value))]
    found = evaluate.main(["--models", *map(str, models), "--text", str(text), "--output_dir", str(out), *words])
    return found.set_index("model")


SMALL = {"block_size": [16], "heldout_blocks": [20]}


def test_against_another_model(finished, text, tmp_path):
    control, other = finished / "control", finished / "rms+rope"
    rows = run(tmp_path, text, control, other, against=[control], lengths=[16, 64], **SMALL)
    trained = json.loads((finished / "results.json").read_text())["variants"]
    for path in (control, other):
        assert rows.loss[str(path)] == pytest.approx(trained[path.name]["end"]["loss"], abs=1e-5)
    same, own = rows.loc[str(control)], rows.loc[str(other)]
    assert same.divergence == pytest.approx(0, abs=1e-6)
    assert same["same answer"] == 1
    assert own.divergence > 1e-3
    difference, low, high = (
        float(part) for part in own.difference.replace("(", "").replace(")", "").replace("to", "").split()
    )
    assert low < difference < high
    assert difference == pytest.approx(own.loss - same.loss, abs=1e-3)
    assert own["loss at 64"] > 0
    assert same["loss at 64"] == "refused (IndexError)"


def test_masked_and_headless(bert, encoder, text, tmp_path):
    assert run(tmp_path, text, bert, **SMALL).loss[bert] > 0
    with pytest.raises(RecipeError, match="give --against"):
        run(tmp_path, text, encoder, **SMALL)
    assert run(tmp_path, text, encoder, against=[encoder], **SMALL).cosine[encoder] == pytest.approx(1)


def test_a_head_that_the_files_lack_isnt_drawn(bert, encoder, text, tmp_path):
    """A config that names a head whose weights aren't there: a random head would say nothing."""
    config = json.loads(Path(encoder, "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    folder = tmp_path / "claims"
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    evaluate.open_model(encoder).model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert evaluate.open_model(str(folder)).kind == "headless"
    assert evaluate.open_model(bert).kind == "masked"  # control


def test_refused(finished, text, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(finished / "control")
    model.transformer.wte.weight.data[0, 0] = math.nan
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(finished / "control").save_pretrained(tmp_path / "broken")
    with pytest.raises(RecipeError, match=r"its weight transformer\.wte\.weight isn't finite"):
        run(tmp_path, text, tmp_path / "broken", **SMALL)
    with pytest.raises(RecipeError, match="give --models"):
        evaluate.main([])
    with pytest.raises(RecipeError, match="can't open"):
        run(tmp_path, text, tmp_path / "nothing", **SMALL)

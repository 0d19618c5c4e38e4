"""PEFT: adapters of a patched base that are saved, opened in a process of their own, and merged.

That process imports hfpatch for the plugin form, and can't for the remote one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from scheme_forms import plain, written
from tiny_models import load, patch

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

TOKENS = torch.randint(5, 97, (2, 12), generator=torch.Generator().manual_seed(0))
RMS, DYT = {"norm": "rms", "pos": "rope:theta=300"}, {"norm": "dyt", "pos": "rope:theta=300"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LoRA, rms and rope": (RMS, {}),
    "LoRA, dyt and rope": (DYT, {}),
    "DoRA, rms and rope": (RMS, {"use_dora": True}),
    "LoRA, unpatched": ({}, {}),
    "DoRA, unpatched": ({}, {"use_dora": True}),
}
PATCHED = [case for case in CASES if not case.endswith("unpatched")]
FORMS = ("plugin", "remote")
OPENER = """
import json, sys
form, tokens, *folders = sys.argv[1:]
if form == "plugin":
    import hfpatch
else:
    sys.modules["hfpatch"] = None
import torch
from peft import AutoPeftModelForCausalLM
torch.set_num_threads(1)
tokens, trust = torch.tensor(json.loads(tokens)), {"trust_remote_code": True} if form == "remote" else {}
for folder in folders:
    adapted = AutoPeftModelForCausalLM.from_pretrained(f"{folder}/adapter", **trust).eval()
    with torch.no_grad():
        found = {"adapted": adapted(input_ids=tokens).logits}
        merged = adapted.merge_and_unload()
        merged.save_pretrained(f"{folder}/merged")
        found["merged"] = merged(input_ids=tokens).logits
    torch.save(found, f"{folder}/found.pt")
"""


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.fixture(scope="module", params=FORMS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A form, and by case the differences from the model that was adapted here: opened elsewhere, merged there, that
    opened here; and what the adapter changes."""
    form, place = request.param, tmp_path_factory.mktemp("peft")
    expected, found = {}, {}
    for index, (case, (asked, options)) in enumerate(CASES.items()):
        model, folder = plain("gpt2"), place / str(index)
        if asked:
            written(patch(model, **asked), form, folder / "base")
        else:
            model.save_pretrained(folder / "base")
        torch.manual_seed(0)
        adapter = {"target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
        config = peft.LoraConfig(task_type="CAUSAL_LM", **adapter, **options)
        adapted = peft.get_peft_model(load(folder / "base", "AutoModelForCausalLM", trust_remote_code=True), config)
        adapted.save_pretrained(folder / "adapter")
        expected[case, folder] = logits(adapted)
        found[case] = {"changed": difference(logits(model), expected[case, folder])}
    env = {**os.environ, "HF_MODULES_CACHE": str(place / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    folders = [str(folder) for _, folder in expected]
    command = [sys.executable, "-c", OPENER, form, json.dumps(TOKENS.tolist()), *folders]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (case, folder), wanted in expected.items():
        here = {"reopened": logits(load(folder / "merged", "AutoModelForCausalLM"))}
        found[case] |= {how: difference(one, wanted) for how, one in (torch.load(folder / "found.pt") | here).items()}
    return form, found


@pytest.mark.parametrize("case", PATCHED)
def test_an_adapter_comes_back_and_is_merged(case: str, opened: tuple[str, dict[str, Any]], record: Any) -> None:
    form, found = opened
    one, control = found[case], found[f"{case.partition(',')[0]}, unpatched"]
    assert one["changed"] > 1e-2  # else nothing of an adapter would be seen
    shown = ("adapted", "merged", "reopened")
    record(
        "peft",
        f"{form}: GPT-2 with {case}; adapter opened elsewhere, merged there, opened again",
        "equal",
        ", ".join(f"{how} {one[how]:.0e}" for how in shown),
        "unpatched: " + ", ".join(f"{how} {control[how]:.0e}" for how in shown),
    )
    assert one["adapted"] == 0
    assert max(one["merged"], one["reopened"]) <= max(1e-5, 2 * control["reopened"])

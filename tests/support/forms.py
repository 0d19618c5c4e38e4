"""A tiny patched model, saved in each form with a tokenizer, and processes that open it as other people's tools do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_models import patch, tiny, word_tokenizer
from transformers import PreTrainedTokenizerFast

from hfpatch.export import export_model
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE

RUN = (str(Path(sys.executable).with_name("hfpatch")), "run", "--")
REFUSED = "hfpatch__install_hfpatch_and_import_it_first"  # what transformers says of the plugin form without hfpatch


def forms_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(bos_token="w1", pad_token="w0")


def sentences(count: int, length: int = 12) -> list[str]:
    return [" ".join(f"w{(7 * i + 3 * j) % 90 + 5}" for j in range(length)) for i in range(count)]


def unpatched(family: str = "gpt2") -> Any:
    """A model without dropout, so that training gives the same losses again."""
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) if family == "gpt2" else {}
    return tiny(family, "AutoModelForCausalLM", **dropout)


def save_forms(folder: Path, family: str = "gpt2") -> Any:
    """Save a patched model in the folders `plugin` and `remote`. Returns it."""
    model, tokenizer = patch(unpatched(family), norm=DyT(0.4), pos=RoPE(theta=300.0)), forms_tokenizer()
    model.save_pretrained(folder / "plugin")
    tokenizer.save_pretrained(folder / "plugin")
    export_model(model, folder / "remote", "remote", tokenizer=tokenizer, verify=False)
    return model


def called(*command: Any, home: Path, hide_hfpatch: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command offline, with its caches in `home`; hidden, hfpatch can't be imported by its processes."""
    settings = {"HF_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if hide_hfpatch:
        (home / "hiding").mkdir(exist_ok=True)
        (home / "hiding/hfpatch.py").write_text("raise ModuleNotFoundError('hfpatch must not be needed here')\n")
        settings["PYTHONPATH"] = f"{home / 'hiding'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words = [str(word) for word in command]
    environment = {**os.environ, **settings}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=home, timeout=900)


def require_refused(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode != 0
    assert REFUSED in done.stderr, done.stderr

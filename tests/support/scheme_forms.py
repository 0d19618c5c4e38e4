"""Every scheme on families that take it, in every form on disk: a tool refuses it, or runs the patched model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import patch, tiny

from hfpatch.export import export_model
from hfpatch.export.native import native_model, write_stock
from hfpatch.runtime.patch_errors import PatchError

FORMS = ("plugin", "remote", "native")
SCHEMES: dict[str, dict[str, Any]] = {
    "layer": {"norm": "layer:bias=false"},
    "rms": {"norm": "rms"},
    "rms, parametrized": {"norm": "rms:mode=parametrize"},
    "dyt": {"norm": "dyt"},
    "derf": {"norm": "derf"},
    "deepnorm": {"norm": "deepnorm"},
    "batch": {"norm": "batch"},
    "fixed": {"norm": "fixed", "init": "reset"},
    "folded": {"norm": "folded"},
    "none": {"norm": "none", "init": "reset"},
    "rope": {"pos": "rope"},
    "rope, theta": {"pos": "rope:theta=300"},
    "rms+rope": {"norm": "rms", "pos": "rope:theta=300"},
    "alibi": {"pos": "alibi"},
    "nope": {"pos": "nope"},
    "sinusoidal": {"pos": "sinusoidal"},
    "learned": {"pos": "learned:max_positions=99"},
    "swiglu": {"mlp": "swiglu"},
    "geglu": {"mlp": "geglu"},
    "reglu": {"mlp": "reglu"},
    "pre": {"placement": "pre"},
    "post": {"placement": "post"},
    "olmo2": {"placement": "olmo2"},
    "sandwich": {"placement": "sandwich"},
}
HEADS = {"bert": "AutoModel"}
_OF_ENCODERS = ("batch", "pre")
_OF_LLAMA = ("layer", "dyt", "derf", "deepnorm", "rope, theta", "nope", "post", "olmo2", "sandwich")
_OF_LLAMA += ("fixed", "folded", "none")
CASES = (
    *(("bert" if scheme in _OF_ENCODERS else "gpt2", scheme) for scheme in SCHEMES),
    *(("llama", scheme) for scheme in _OF_LLAMA),
    *(("bert", scheme) for scheme in ("rms", "rope", "alibi")),
    ("opt", "rms, parametrized"),
)
NATIVE = {  # those that equal a stock architecture
    *(("gpt2", s) for s in ("layer", "rms", "rms, parametrized", "rope", "rope, theta", "rms+rope")),
    *(("gpt2", scheme) for scheme in ("folded", "nope", "sinusoidal", "learned")),
    *(("llama", scheme) for scheme in ("layer", "folded", "rope, theta", "nope")),
    ("bert", "rope"),
    ("opt", "rms, parametrized"),
}


def plain(family: str) -> Any:
    return tiny(family, HEADS.get(family, "AutoModelForCausalLM"))


def patched(case: tuple[str, str]) -> Any:
    family, scheme = case
    return patch(plain(family), **SCHEMES[scheme])


def written(model: Any, form: str, folder: Path, serve: str | None = None) -> bool:
    """Save a patched model in one form; whether it has that form."""
    if form == "plugin":
        model.save_pretrained(folder)
    elif form == "remote":
        export_model(model, folder, "remote", verify=False)
    else:
        try:
            stock = native_model(model, serve=serve)
        except PatchError:
            return False
        write_stock(stock, folder)
    return True


def named(case: tuple[str, str]) -> str:
    return " ".join(case)

"""Which patched models vLLM's and SGLang's Transformers backends compute, emulated on a CPU; neither server is run.

    python tests/sweeps/backends.py            # writes backends.json and backends.md beside it

What a backend does is in tests/support/server_backends.py. Tiny random models in float32, as plugin checkpoints.
"""

from __future__ import annotations

import re
import site
import tempfile
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import scheme_forms
import transformers
import workers
from server_backends import BACKEND, SERVERS, NotServedError, largest_difference, resolved, rounding
from tiny_models import CONFIGS, patch, tiny
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from hfpatch.runtime.errors import PatchError

BOUND = 1e-5  # of the outputs' spread: rounding of another order of sums
_TRIED = ("rms", "rms, no shift", "rms, parametrized", "prms", "dyt", "derf", "deepnorm", "batch", "rope", "rms+rope")
SCHEMES = {name: scheme_forms.SCHEMES[name] for name in (*_TRIED, "nope", "sinusoidal", "alibi", "swiglu")}
SCHEMES["rope"] = scheme_forms.SCHEMES["rope, theta"]
MORE_FAMILIES = {  # beside those of tiny_models
    name: (f"{name}Config", CONFIGS["llama"][1]) for name in ("Qwen2", "Mistral", "ModernBert")
} | {"GPTNeoX": ("GPTNeoXConfig", CONFIGS["llama"][1])}
FAMILIES = [*CONFIGS, *MORE_FAMILIES]


def model_of(family: str) -> Any:
    CONFIGS.update(MORE_FAMILIES)
    name = CONFIGS[family][0]
    causal = getattr(transformers, name) in MODEL_FOR_CAUSAL_LM_MAPPING and family not in ("bert", "roberta", "ernie")
    return tiny(family, "AutoModelForCausalLM" if causal else "AutoModel")


def examine(family: str) -> dict[str, Any]:
    """The family's cells, by scheme."""
    return {"family": family} | {scheme or "unpatched": cell(family, scheme) for scheme in ("", *SCHEMES)}


def cell(family: str, scheme: str) -> dict[str, Any]:
    """For each server a difference, or why it doesn't serve the model; "unpatchable" where hfpatch refuses."""
    model = model_of(family)
    if scheme:
        try:
            patch(model, **SCHEMES[scheme])
        except PatchError as error:
            return {"unpatchable": _short(error)}
    if not hasattr(model.config, "hfpatch") and scheme:
        return {"unpatchable": "nothing to change"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        for server in SERVERS:
            try:
                if resolved(folder, [type(model).__name__] if scheme else [], server) != BACKEND:
                    found[server] = "WRONG: the server's own class"
                    continue
                error = largest_difference(model, folder, server)
                if error > BOUND and error > (bound := 10 * rounding(model)):
                    found[server] = f"WRONG: {error:.1e}, where rounding explains {bound:.1e}"
                else:
                    found[server] = float(f"{error:.1e}")
            except (NotServedError, PatchError) as error:
                found[server] = _short(error)
            except Exception as error:  # the host's own words: some take no packed sequences, patched or not
                found[server] = f"{type(error).__name__}: {_short(error)}"
    return found


def _short(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).partition(". ")[0].rstrip(".")[:160].replace("|", "/")


def answer(found: Any) -> str:
    """yes, no or WRONG."""
    if isinstance(found, str):
        return "WRONG" if found.startswith("WRONG") else "no"
    return "yes"


def to_markdown(rows: list[dict[str, Any]]) -> str:
    families = {row["family"]: row for row in rows}
    able = {name: row for name, row in families.items() if answer(row["unpatched"]["vllm"]) == "yes"}
    cells = [_cell(row[scheme]) for row in able.values() for scheme in SCHEMES]
    reasons = [
        f"| {family} | {scheme} | {server} | {why} |"
        for family, row in able.items()
        for scheme in SCHEMES
        for server, why in row[scheme].items()
        if isinstance(why, str) and server != "unpatchable"
    ]
    return "\n".join(
        [
            "# Patched models behind vLLM's and SGLang's Transformers backends",
            "",
            f"transformers {transformers.__version__}; `python tests/sweeps/backends.py`. Neither server was run: what",
            "their Transformers backends do (vLLM 0.33.0, SGLang 0.5.23) is done on a CPU: the class by",
            "`architectures`, the model on meta, norms and linear layers replaced as there, weights by name, packed",
            "sequences without a mask. A figure is the largest difference from the model's own hidden states, sequence",
            "by sequence, by their spread, in float32: the larger one of both servers'. Where it is above 1e-5 it",
            "is at most ten times what the model's eager attention and its usual one differ by. A dash is",
            "what hfpatch itself doesn't patch.",
            "",
            f"{sum(c[0].isdigit() for c in cells)} served, {sum('no' in c for c in cells)} refused by one or both, "
            f"{sum('WRONG' in c for c in cells)} wrong.",
            "",
            f"| family | unpatched | {' | '.join(SCHEMES)} |",
            f"|---|---|{'---|' * len(SCHEMES)}",
            *(f"| {f} | {' | '.join(_cell(row[s]) for s in ('unpatched', *SCHEMES))} |" for f, row in able.items()),
            "",
            "## Refused, and why",
            "",
            "ALiBi travels in the attention mask, which these backends don't read.",
            "",
            "| family | scheme | server | reason |",
            "|---|---|---|---|",
            *reasons,
            "",
            "## Families that can't be served so, patched or not",
            "",
            "| family | reason |",
            "|---|---|",
            *(f"| {name} | {row['unpatched']['vllm']} |" for name, row in families.items() if name not in able),
            "",
        ]
    )


def _cell(found: dict[str, Any]) -> str:
    if "unpatchable" in found:
        return "-"
    shown = {s: f"{x:.0e}" if answer(x) == "yes" else answer(x) for s, x in found.items()}
    if len({answer(x) for x in found.values()}) == 1:
        return max(shown.values(), key=lambda text: float(text) if text[0].isdigit() else 0)
    return ", ".join(f"{server} {text}" for server, text in shown.items())


SWEEP = workers.Sweep(
    every=lambda: FAMILIES,
    examine=examine,
    failed=lambda family, reason: {"family": family, "unpatched": dict.fromkeys(SERVERS, reason)},
    read=dict,
    to_markdown=to_markdown,
    seconds=600,
)
if __name__ == "__main__":
    SWEEP.main()

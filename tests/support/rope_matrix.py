"""RoPE's settings of a model before and after a request: models opened in every way, and what must come of them.

`expected` says it from the rules of docs/guides/long-inputs.md alone; nothing here calls what hfpatch decides by.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zoo
from rope_proof import difference, floating_tensors
from transformers import AutoModel, PreTrainedConfig

from hfpatch.errors import NothingToPatchError
from hfpatch.export import export_model
from hfpatch.measure.copies import unpatched_config
from hfpatch.measure.randomness import seed_deterministically
from hfpatch.patch import patch_model
from hfpatch.runtime.lens import host_class
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import find_rotations

START, LENGTH, LONGER = 16, 32, 128  # texts that it was trained on; what its config says; what is asked for
LENGTHS = (12, 40, 150)  # of the texts that are compared: within all of these, beyond the second, beyond the last
STATED, MAXIMUM = "original_max_position_embeddings", "max_position_embeddings"
WAYS = ("loaded", "memory", "plugin", "native")
# plain, named by other families' names, parts of heads, several axes of a text, scales of attention, types of layers
HOSTS = (
    *("llama", "qwen3", "gpt_neox", "phi", "cohere", "glm", "jina_embeddings_v3", "qwen2_vl_text", "phi3", "phimoe"),
    *("deepseek_v2", "deepseek_v3", "ministral3", "mistral4", "hunyuan_v1_dense", "gpt_oss", "gemma3_text"),
    *("gemma4_text", "olmo3", "modernbert", "t5gemma", "minicpm3", "apertus"),
)
NAMED: dict[str, dict[str, Any]] = {  # what a start or a request names
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "beta_fast": 8.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9, STATED: START},
    "longrope": {"short_factor": 1.25, "long_factor": 3.0, STATED: START},  # of every pair
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, STATED: START},
}
OWN = {"phimoe": {"short_mscale": 1.1, "long_mscale": 1.2}}  # settings that a family alone reads
OF_SCALING = {name for options in NAMED.values() for name in options} - {STATED} | {"attention_factor", "beta_slow"}


def requests(pairs: int) -> dict[str, RoPE]:
    """Every request by its name; `pairs` of channels are turned."""
    found = {"theta": RoPE(theta=500.0), "longer": RoPE(max_positions=LONGER)}
    for kind in NAMED:
        own = {"rope_type": kind, **_lists(NAMED[kind], pairs)}
        few = {
            name: value for name, value in own.items() if name not in (STATED, "mscale", "mscale_all_dim", "truncate")
        }
        if "factor" in few:
            few["factor"] = 3.0
        found |= {kind: RoPE(scaling=few), f"{kind} longer": RoPE(scaling=few, max_positions=LONGER)}
        if kind in ("linear", "yarn", "dynamic"):
            few.pop("factor")
            found[f"{kind} by length"] = RoPE(scaling=few, max_positions=LONGER)
    return found


def expected(kept: dict[str, Any], scheme: RoPE, stated: int | None) -> dict[str, Any]:
    """The settings that a request must give.

    Args:
        kept: the settings before.
        scheme: the request.
        stated: the config's own original length, which transformers prefers.
    """
    named, before = scheme.scaling, kept.get("rope_type", "default")
    new = {name: value for name, value in kept.items() if name != "type"}
    if scheme.theta is not None:
        new["rope_theta"] = scheme.theta
    if named is None:
        return new
    kind = named["rope_type"]
    if kind != before:
        new = {name: value for name, value in new.items() if name not in OF_SCALING}
    new |= named
    original = stated or kept.get(STATED)
    if kind in ("yarn", "longrope", "llama3"):
        original = original or int(LENGTH / (kept["factor"] if before == "linear" else 1))
        new[STATED] = original
    if scheme.max_positions is not None and "factor" not in named and kind in ("linear", "yarn", "longrope", "dynamic"):
        if original:
            new["factor"] = max(LONGER / original, 1.0)
        else:
            new["factor"] = (kept["factor"] if before == "linear" else 1.0) * LONGER / LENGTH
    return new


def _lists(options: dict[str, Any], pairs: int) -> dict[str, Any]:
    return {
        name: [value + 0.25 * i for i in range(pairs)] if name in ("short_factor", "long_factor") else value
        for name, value in options.items()
    }


# --- configs ----------------------------------------------------------------------------------------------------------


def parts(config: Any) -> Iterator[Any]:
    """The parts of a config that say how to rotate."""
    if isinstance(getattr(config, "rope_parameters", None), dict):
        yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def settings_of(part: Any) -> dict[str | None, dict[str, Any]]:
    """The settings of each type of layers, None where there is one for all."""
    nested = {name: value for name, value in part.rope_parameters.items() if isinstance(value, dict)}
    return nested or {None: part.rope_parameters}


def with_settings(
    config: Any, change: Callable[[dict[str, Any], int | None], dict[str, Any]], length: int | None = None
) -> Any:
    """A copy of a config with other settings everywhere, and another length."""
    config = copy.deepcopy(config)
    for part in list(parts(config)):
        found = settings_of(part)
        stated = None if None not in found else getattr(part, STATED, None)
        new = {name: change(copy.deepcopy(settings), stated) for name, settings in found.items()}
        part.rope_parameters = new.get(None, {**part.rope_parameters, **new})
        if length is not None:
            setattr(part, MAXIMUM, length)
        if stated is not None and STATED in new[None]:
            setattr(part, STATED, new[None][STATED])
    return config


def built(model: Any, config: Any) -> Any:
    """The host with a config and a model's weights, in float64."""
    with seed_deterministically(0):
        other = host_class(type(model))(copy.deepcopy(config)).double().eval()
    other.set_experts_implementation("eager")  # others have no float64
    other.load_state_dict(model.state_dict())
    return other


def pairs_of(model: Any) -> int:
    counts = {rotation.frequencies(rotation.module).numel() for rotation in find_rotations(model)}
    return counts.pop() if len(counts) == 1 else 1


def plain(model_type: str) -> Any:
    """A tiny host in float64 without scaling."""
    model, _ = zoo.tiny(model_type)

    def change(settings: dict[str, Any], stated: int | None) -> dict[str, Any]:
        kept = {name: value for name, value in settings.items() if name not in {*OF_SCALING, "type"}}
        kept |= {STATED: START} if STATED in kept else {}
        kept |= OWN.get(model_type, {})
        return kept if kept["rope_type"] in ("axial", "proportional") else {**kept, "rope_type": "default"}

    return built(model, with_settings(model.config, change, LENGTH))


def opened(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()


class NoStartError(Exception):
    """The host itself doesn't run with this type of scaling, or no patch gives it to it."""


def begun(model_type: str, start: str, way: str, folder: Path) -> Any:
    """A host that begins with a type of scaling, opened in one of the `WAYS`.

    Raises:
        NoStartError: there is none.
    """
    try:
        model = _begun(model_type, start, way, folder)
        outputs(model)
        model.config.validate()  # or transformers itself doesn't save it: Phi 3 takes longrope alone
    except Exception as error:  # whatever the host raises
        raise NoStartError(f"{type(error).__name__}: {error}") from error
    return model


def _begun(model_type: str, start: str, way: str, folder: Path) -> Any:
    model = plain(model_type)
    scaling = {"rope_type": start, **_lists(NAMED[start], pairs_of(model))}
    if way == "loaded":
        old = {} if start == "default" else {"type": start}  # as config.json often has it, too
        return built(model, with_settings(model.config, lambda kept, stated: kept | scaling | old))
    patched = patch_model(model, pos=RoPE(scaling=scaling), init="copy")
    if way == "memory":
        return patched
    if way == "plugin":
        patched.save_pretrained(folder)
    else:
        export_model(patched, folder, "native")
    return opened(folder)


# --- one cell ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def outputs(model: Any) -> dict[str, torch.Tensor]:
    """Of texts of several lengths, the longest first, and again at the end: dynamic scaling must forget it."""
    found: dict[str, torch.Tensor] = {}
    vocabulary = model.config.get_text_config().vocab_size
    for place, length in enumerate((*LENGTHS, LENGTHS[0])):
        ids = torch.arange(3, 3 + length)[None] * 7 % (vocabulary - 5) + 3
        more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        found |= {f"{place}: {name}": value for name, value in floating_tensors(model(ids, **more))}
    return found


def reopened(model: Any, form: str, folder: Path) -> Any:
    export_model(model, folder, form)
    return opened(folder)


def cell(start: Any, scheme: RoPE, folder: Path | None = None) -> str:
    """What comes of a request: "equal", "refused: ..." or "DIFFERS: ...".

    Args:
        start: of `begun`; it isn't changed.
        scheme: the request.
        folder: what comes of it is also saved there, in plugin and native form, and opened again.
    """
    model = copy.deepcopy(start)
    want = [
        [expected(one, scheme, getattr(part, STATED, None) if name is None else None) for name, one in each.items()]
        for part in parts(model.config)
        for each in [settings_of(part)]
    ]
    try:
        patch_model(model, pos=scheme)
    except NothingToPatchError:
        pass
    except PatchError as error:
        return f"refused: {type(error).__name__}: {error}"
    for part, each in zip(parts(model.config), want, strict=True):
        if scheme.max_positions not in (None, getattr(part, MAXIMUM)):
            return f"DIFFERS: its length is {getattr(part, MAXIMUM)}"
        for now, wanted in zip(settings_of(part).values(), each, strict=True):
            if {**now, "type": 0} != {**wanted, "type": 0}:
                return f"DIFFERS: settings {now}, and not {wanted}"
            if now.get("type", now["rope_type"]) != now["rope_type"]:
                return f"DIFFERS: type {now['type']} beside rope_type {now['rope_type']}"
    config = unpatched_config(start.config)
    config = with_settings(config, lambda kept, stated: expected(kept, scheme, stated), scheme.max_positions)
    host = built(start, config)
    truth = outputs(host)
    for name, one in [("", model), *((form, None) for form in ("plugin", "native") if folder is not None)]:
        if one is None:
            try:
                one = reopened(model, name, folder / name)
            except PatchError as error:
                return f"DIFFERS: no {name} form: {error}"
        if (error := difference(outputs(one), truth)) > 1e-12:
            return f"DIFFERS: {name or 'in memory'} by {error:.1e} from the host with {want}"
    return "equal"

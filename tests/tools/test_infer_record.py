"""Records that are proposed from what a small model does, against those that were written by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import infer_record
import proof
import pytest
import torch
import zoo
from infer_record import Proposal, propose_record
from sampled import sampled
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

from hfpatch.core.registry import ARCHITECTURES
from hfpatch.runtime.errors import UnsupportedError
from hfpatch.sites.records.record import Stack

pytestmark = pytest.mark.slow  # of maintainers: it proposes records
# families of text whose proposal does what the committed record does: these always, of the others a sample
FIXED = ["albert", "bart", "bert", "clip_text_model", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "roberta", "xlm"]
OTHERS = (
    "altclip_text_model bert-generation biogpt blenderbot blenderbot-small camembert canary chinese_clip_text_model "
    "clap_text_model cohere_asr data2vec-text distilbert electra ernie flava_text_model imagegpt layoutlm luke m2m_100 "
    "marian mbart megatron-bert mobilebert mpnet mvp nystromformer openai-gpt pegasus plbart rembert "
    "roberta-prelayernorm roc_bert siglip_text_model splinter tapas trocr visual_bert xglm xlm-roberta xmod yoso"
)
SAMPLE = sampled([name for name in OTHERS.split() if name in set(zoo.model_types())], 6)


def proposed(model_type: str) -> Proposal:
    model, inputs = proof.tiny(model_type)
    try:
        return propose_record(model)
    except UnsupportedError:
        return propose_record(model, inputs)


def differences(found: Stack, written: Stack) -> list[str]:
    """Fields in which two stacks differ that decide what is removed and rotated."""
    names = ("table", "attention", "projections", "reserved_rows", "states", "time", "others")
    return [name for name in names if getattr(found, name) != getattr(written, name)]


def small_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97)).eval()


@pytest.mark.parametrize("model_type", [*FIXED, *SAMPLE])
def test_a_recorded_family_is_found_again(model_type: str) -> None:
    proposal = proposed(model_type)
    found = {stack.owner: stack for stack in proposal.record.stacks}
    for written in ARCHITECTURES[model_type].stacks:
        assert differences(found[written.owner], written) == []
    assert proposal.holds, proposal.doubts
    assert proposal.longest


@pytest.mark.sweep
def test_most_recorded_classes_are_found_again() -> None:
    same: dict[str, bool] = {}
    for home in sorted(set(proof.HOMES.values()) & set(zoo.model_types())):
        if "input_ids" not in proof.tiny(home)[1]:
            continue
        try:
            proposal = proposed(home)
        except Exception:  # no small model, or nothing found in it
            found, good = {}, set()
        else:
            found = {stack.owner: stack for stack in proposal.record.stacks}
            good = {one.owner for one in proposal.proofs if one.holds}
        for owner, written in proof.STACKS.items():
            if proof.HOMES[owner] == home:
                same[owner] = owner in good and owner in found and not differences(found[owner], written)
    assert sum(same.values()) >= 0.75 * len(same), [owner for owner, good in same.items() if not good]


def test_what_is_printed_registers_a_record_that_works(tmp_path: Path) -> None:
    """A family that hfpatch has never heard of: pasted into a file of one's own, its model patches, saves and loads."""
    proposal = propose_record(small_gpt2())
    # that GPT-2 hands position_ids on by itself spares hfpatch that; a proposal doesn't count on it
    assert proposal.record.stacks == tuple(replace(one, hands_on=False) for one in ARCHITECTURES["gpt2"].stacks)
    file = tmp_path / "mine.py"
    file.write_text(proposal.code().replace("GPT2Model", "use.StrangeModel").replace("'gpt2'", "'strange'"))
    script = tmp_path / "use.py"
    script.write_text(
        "import torch, warnings\n"
        "from transformers import GPT2Config, GPT2Model\n"
        "import hfpatch, mine\n"
        "class StrangeModel(GPT2Model):\n"
        "    __module__ = 'strange.use'\n"
        "hfpatch.ARCHITECTURES.unregister('gpt2')\n"
        "warnings.simplefilter('ignore')\n"
        "model = StrangeModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=8)).eval()\n"
        "hfpatch.patch_model(model, pos='rope')\n"
        "assert model(torch.arange(40)[None]).last_hidden_state.shape == (1, 40, 32)\n"
        "assert all('rotary_emb' in block.attn._modules for block in model.h)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model_type", ["ctrl", "gpt_neo", "fsmt", "deberta"])
def test_the_code_says_what_the_record_does(model_type: str) -> None:
    """Every field survives the way through text: owner, layouts, limits, windows."""
    proposal = proposed(model_type)
    code = proposal.code().replace(f"ARCHITECTURES.register({model_type!r})", "ARCHITECTURES.register('~pasted')")
    try:
        exec(code, {})
        assert ARCHITECTURES["~pasted"] == proposal.record
    finally:
        ARCHITECTURES.unregister("~pasted")


def test_the_model_in_hand_is_not_touched() -> None:
    model = small_gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names, state = set(ARCHITECTURES), torch.get_rng_state()
    propose_record(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(ARCHITECTURES) == names
    assert torch.equal(torch.get_rng_state(), state)
    assert not model._forward_hooks
    assert model.config.use_cache


def test_weights_are_not_needed() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    assert propose_record(model).holds


def test_command_line() -> None:
    command = [sys.executable, infer_record.__file__, "opt"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in ("Stack(", "'OPTDecoder',", "reserved_rows=2", "# OPTDecoder: shift", "# text of 512 tokens runs"):
        assert part in printed


def test_products_beside_the_keys_are_told() -> None:
    """What a proposal can't get right, its proof says."""
    proposal = proposed("bros")
    assert not proposal.holds
    assert any("BrosModel" in doubt for doubt in proposal.doubts)
    assert "look at this" in str(proposal)


def test_what_has_no_record_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    with pytest.raises(UnsupportedError, match="no table of positions"):
        propose_record(LlamaModel(LlamaConfig(**sizes, vocab_size=97)))
    with pytest.raises(UnsupportedError, match="no small model"):
        propose_record(nn.Linear(2, 2))

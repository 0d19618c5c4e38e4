"""compile_model: one graph per class of block, whatever was patched. Graphs are counted; controls break the count."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from sampled import slow_but
from tiny_models import RECORDED, difference, inputs, outputs, patch, tiny, tiny_config
from torch import nn

from hfpatch.compile import compile_model, compiled_calls, repeated_blocks, uncompile_model
from hfpatch.errors import OptionError, WrappedModelError
from hfpatch.runtime.lens import LENS
from hfpatch.runtime.patch_errors import UnsupportedError

EXACT = {"norm": "rms", "pos": "rope"}
SCHEMES = [
    {},
    {"norm": "rms"},
    {"norm": "dyt"},
    {"norm": "derf"},
    {"pos": "rope"},
    {"pos": "nope"},
    EXACT,
    {"norm": "dyt", "pos": "alibi"},
    {"mlp": "geglu"},
]
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
HEADS = {
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "bart": "AutoModelForSeq2SeqLM",
}
HEADS |= dict.fromkeys(("gpt2", "opt", "gpt_neo"), "AutoModelForCausalLM")


class Graphs(list):
    """A backend that runs graphs as they are and keeps them."""

    def __call__(self, graph, example_inputs):
        self.append(graph)
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def deeper(family, **options):
    """A tiny model of three layers: with two, a graph per layer could pass for a recompilation."""
    kind = type(tiny_config(family))
    own = {name: 3 for name in LAYERS if name in kind().to_dict()}
    if family == "gpt_neo":
        own = {"num_layers": 3, "attention_types": [[["global"], 3]]}
    return tiny(family, HEADS.get(family, "AutoModel"), **own, **options)


def cut(given, length):
    """The same inputs with `length` tokens; images and sound stay."""
    return {name: x[:, :length] if torch.is_tensor(x) and x.ndim == 2 else x for name, x in given.items()}


def without_cache(model):
    return {} if "use_cache" not in model.config.to_dict() else {"use_cache": False}


def case_name(value):
    return value if isinstance(value, str) else "+".join(value.values()) or "unpatched"


CASES = random.Random(0).sample([(family, request_) for family in RECORDED for request_ in SCHEMES], 81)


@pytest.mark.sample(2, slow=3)
@pytest.mark.parametrize(("family", "request_"), slow_but(CASES, 2), ids=case_name)
def test_one_graph_per_class_of_block(family, request_):
    """No graph break (fullgraph), no recompilation per layer, one for a second length and none for a third."""
    try:
        model = patch(deeper(family), **request_, init="copy") if request_ else deeper(family)
    except UnsupportedError:
        assert (family, request_.get("mlp")) in [("whisper", "geglu")] or request_.get("pos") == "alibi"
        pytest.skip("this scheme is refused for this family")
    given, graphs = inputs(model) | without_cache(model), Graphs()
    batches = [given, *(cut(given, length) for length in (7, 5))]
    expected = [outputs(model, **batch) for batch in batches]
    blocks = dict(repeated_blocks(model))
    classes = Counter(type(block) for block in blocks.values())
    assert min(classes.values()) == 3
    assert compile_model(model, backend=graphs, fullgraph=True) is model
    found, count = [outputs(model, **batches[0])], len(graphs)
    assert count == len(classes), "one graph serves all layers"
    found += [outputs(model, **batch) for batch in batches[1:]]
    assert len(graphs) <= 2 * len(classes), "one recompilation, for lengths"
    assert max(difference(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5
    assert compiled_calls(model) == dict.fromkeys(blocks, len(batches))


def test_count_sees_a_graph_per_layer():
    """The control: what depends on a block's number is compiled anew for every layer."""

    class Numbered(nn.Module):
        def __init__(self, number, bound):
            super().__init__()
            self.linear, self.number, self.bound = nn.Linear(4, 4), number, bound

        def forward(self, x):
            return self.linear(x) * (self.number + 1 if self.bound else 1)

    for bound in (True, False):
        graphs = Graphs()
        model = nn.Sequential(*(Numbered(i, bound) for i in range(3)))
        outer = compile_model(nn.Sequential(model), backend=graphs)
        with torch.no_grad():  # the first block's input has no gradient, the others' do
            outer(torch.ones(2, 4))
        assert len(graphs) == (3 if bound else 1)


@pytest.mark.slow
def test_many_models_in_one_process():
    """More graphs than torch's limit of eight recompilations: each model has its own."""
    compiled = []
    for request_ in SCHEMES[1:5]:
        model, graphs = patch(deeper("gpt2", **NO_DROPOUT), **request_, init="copy"), Graphs()
        given = inputs(model) | {"use_cache": False}
        expected = outputs(model, **given)
        compile_model(model, backend=graphs)
        for train in (True, False):
            for length in (12, 9):
                model.train(train)(**cut(given, length)).logits.sum().backward()
        assert difference(outputs(model, **given), expected) < 1e-5
        assert len(graphs) <= 6
        compiled.append((model, given, expected, graphs, len(graphs)))
    assert sum(len(graphs) for *_, graphs, _ in compiled) > 8
    for model, given, expected, graphs, count in compiled:
        assert difference(outputs(model, **given), expected) < 1e-5
        assert len(graphs) == count, "the others didn't push its graphs out"


@pytest.mark.slow
def test_generating_with_a_static_cache():
    model, graphs = patch(deeper("gpt2"), **EXACT), Graphs()
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs(model), **settings)
    compile_model(model, "model", backend=graphs)
    found = model.generate(**inputs(model), **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert (torch.stack(found.logits) - torch.stack(expected.logits)).abs().max() < 1e-4
    assert compiled_calls(model)[""] == 8
    assert len(graphs) <= 3, "prefill and decoding, once more where lengths become dynamic"


def test_blocks_with_a_cache_run_uncompiled():
    model = patch(deeper("gpt2"), **EXACT)
    given, expected = inputs(model), outputs(model)
    compile_model(model, backend="eager")
    assert difference(outputs(model, **given, use_cache=True), expected) == 0
    assert set(compiled_calls(model).values()) == {0}
    outputs(model, **given, use_cache=False)
    assert set(compiled_calls(model).values()) == {1}


def checked(model):
    """What compiled code makes sure of before each forward: of which objects."""
    found = []

    def keep(entries):
        found.extend(str(entry.orig_guard.name) for entry in entries)
        return [True] * len(entries)

    compiled = torch.compile(model, backend="eager", fullgraph=True, options={"guard_filter_fn": keep})
    with torch.no_grad():
        compiled(**inputs(model) | without_cache(model))
    return found


def inside(names, part):
    """What is checked in one part, by its name there."""
    return {name.partition(part)[2] for name in names if part in name}


@pytest.mark.slow
def test_compiled_code_checks_little_of_norms_and_lenses():
    """Where a token is decoded these checks take longer than the norm itself."""
    before = checked(deeper("gpt2"))
    after = [name.replace(f".__dict__['{LENS}']", f".{LENS}") for name in checked(patch(deeper("gpt2"), **EXACT))]
    norm_before, norm_after = (inside(names, "._modules['1']._modules['ln_1']") for names in (before, after))
    assert {".eps", "._parameters['weight']"} <= norm_before
    assert "._parameters['weight']" in norm_after
    assert len(norm_after) <= len(norm_before)
    first, *others = (inside(after, f"['{layer}']._modules['attn'].{LENS}") for layer in range(3))
    assert len(first) > 5
    assert others == [{""}] * 2, "that the lens of all attentions is the first one's"


# In place


@pytest.mark.parametrize("regions", ["blocks", "model"])
def test_checkpoints_know_nothing_of_it(regions, tmp_path):
    model = patch(deeper("bert"), **EXACT)
    keys, kind = list(model.state_dict()), type(model)
    expected, graphs = outputs(model), Graphs()
    compile_model(model, regions, backend=graphs)
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    model.save_pretrained(tmp_path)
    assert not graphs, "the fingerprint's forward isn't compiled"
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert difference(outputs(loaded), expected) == 0
    assert compiled_calls(loaded) == {}


@pytest.mark.parametrize(
    ("family", "request_", "regions"),
    [("bert", EXACT, "blocks"), ("bert", EXACT, "model"), ("opt", {"norm": "deepnorm"}, "blocks")],
    ids=["blocks", "the model itself", "blocks with a lens"],
)
def test_copies_are_not_compiled(family, request_, regions):
    model = compile_model(patch(deeper(family), **request_), regions, backend=Graphs())
    assert compiled_calls(copy.deepcopy(model)) == compiled_calls(pickle.loads(pickle.dumps(model))) == {}
    assert compiled_calls(model)


@pytest.mark.slow
def test_again_replaces_and_undone_is_as_before():
    model = patch(deeper("bert"), **EXACT)
    first, second = Graphs(), Graphs()
    compile_model(model, backend=first)
    compile_model(model, "model", backend=second)
    outputs(model)
    assert (len(first), len(second)) == (0, 1)
    assert compiled_calls(model) == {"": 1}
    with pytest.raises(WrappedModelError, match="is compiled"):
        patch(model, norm="dyt")
    outputs(uncompile_model(model))
    assert len(second) == 1
    assert compiled_calls(model) == {}
    assert set(compiled_calls(patch(model, norm="dyt", compile=True)).values()) == {0}


@pytest.mark.parametrize(("regions", "error"), [("layers", OptionError), ("blocks", UnsupportedError)])
def test_regions_that_there_are_not(regions, error):
    with pytest.raises(error, match="regions"):
        compile_model(nn.Linear(2, 2), regions)


# Together with what users do with a model beside compiling it: compiled code runs, and computes the same


@pytest.fixture
def model():
    return patch(deeper("gpt2", **NO_DROPOUT), **EXACT, init="copy")


def gradients(model, given):
    model.zero_grad()
    (model(**given, labels=given["input_ids"]).loss * 10).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (found[name] - gradient).abs().max() / scale < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "checkpointing"), [("aot_eager", True), ("inductor", False)])
def test_training(model, backend, checkpointing):
    given = inputs(model) | {"use_cache": False}
    expected = gradients(model.train(), given)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compile_model(model, backend=backend)
    assert_same(gradients(model, given), expected)
    calls = set(compiled_calls(model).values())
    assert min(calls) >= 1 if checkpointing else calls == {1}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_hidden_states_and_attentions(family):
    """transformers leaves hooks behind, where dynamo breaks graphs."""
    model = patch(deeper(family, attn_implementation="eager"), **EXACT, init="copy")
    given, graphs = inputs(model) | ({"use_cache": False} if family == "gpt2" else {}), Graphs()
    asked = {name: {f"output_{name}": True} for name in ("hidden_states", "attentions")}
    with torch.no_grad():
        plain, expected = model(**given)[0], {name: model(**given, **ask)[name] for name, ask in asked.items()}
        compile_model(model, backend=graphs)
        for name in ("hidden_states", "attentions", "hidden_states"):
            found = model(**given, **asked[name])[name]
            assert len(found) == len(expected[name]) >= 2
            assert max(difference(a, b) for a, b in zip(found, expected[name], strict=True)) < 1e-4
        assert difference(model(**given)[0], plain) < 1e-4
    print(len(graphs))
    assert set(compiled_calls(model).values()) == {4}


def test_adapters(model):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    given, graphs = inputs(model) | {"use_cache": False}, Graphs()
    expected = outputs(adapted, **given)
    compile_model(adapted, backend=graphs)
    assert difference(outputs(adapted, **given), expected) < 1e-5
    assert len(graphs) == 1
    assert not [name for name in adapted.state_dict() if "_orig_mod" in name]


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", ["compiled", "prepared"])
def test_accelerate_with_mixed_precision(model, first):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    given, graphs = inputs(model) | {"use_cache": False}, Graphs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = outputs(model, **given)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    if first == "compiled":
        prepared = accelerator.prepare(compile_model(model, backend=graphs))
    else:
        prepared = compile_model(accelerator.prepare(model), backend=graphs)
    assert difference(outputs(prepared, **given), expected) < 1e-2
    assert set(compiled_calls(prepared).values()) == {1}
    assert len(graphs) == 1
    AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_compiled_says_nothing_that_an_older_torch_reads_otherwise() -> None:
    """torch 2.9 takes strict=False of zip for True; `.ci/matrix floors` runs all of these tests there."""
    sources = (Path(__file__).parents[1] / "hfpatch/runtime").rglob("*.py")
    assert [path.name for path in sources if "strict=False" in path.read_text()] == []


@pytest.mark.slow
def test_fsdp2():
    """Two processes over gloo: blocks compiled, then sharded; losses as in one process."""
    script = Path(__file__).parent / "support/compiled_fsdp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("same losses") == 2

"""Run by test_compile.py under torchrun: a patched model, compiled and sharded, against itself in one process."""

import copy

import torch
import torch.distributed as dist
from tiny_models import inputs, patch, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hfpatch.compile import compile_model, compiled_calls


def losses(model, given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        loss = model(**given, labels=given["input_ids"], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


torch.set_num_threads(1)
dist.init_process_group("gloo")
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = patch(tiny("gpt2", "AutoModelForCausalLM", **no_dropout), norm="rms", pos="rope", init="copy").train()
given = inputs(model)
expected = losses(copy.deepcopy(model), given)
compile_model(model, backend="aot_eager")
mesh = init_device_mesh("cpu", (2,))
for block in model.transformer.h:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
found = losses(model, given)
assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4, (found, expected)
assert expected[0] - expected[-1] > 1e-3, "something was learnt"
assert set(compiled_calls(model).values()) == {3}, compiled_calls(model)
print("same losses", flush=True)
dist.destroy_process_group()

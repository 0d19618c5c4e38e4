"""Converts and runs checkpoints by llama.cpp, in a Python of its own: `convert` for many folders, `score` for one file.

python gguf_tool.py convert LLAMA_CPP FOLDER ...   # FOLDER.gguf beside each; prints {folder: error or null}
python gguf_tool.py score FILE VOCABULARY TOKENS   # prints the log-probabilities of what follows the tokens

The converter knows pre-tokenizers by a hash of what they make of a text, and the tests' tokenizer isn't among them: it
is told that it is GPT-2's, which decides nothing here as prompts are tokens. The rest of it runs as it is.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
from pathlib import Path
from typing import Any

BY_SENTENCEPIECE = ("GemmaForCausalLM", "NemotronForCausalLM")


def convert(llama_cpp: str, folders: list[str]) -> dict[str, str | None]:
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    failed: dict[str, str | None] = {}
    said, handler = list[str](), logging.Handler(logging.ERROR)
    handler.emit = lambda line: said.append(line.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    for folder in folders:
        said.clear()
        if json.loads(Path(folder, "config.json").read_text())["architectures"][0] in BY_SENTENCEPIECE:
            write_sentencepiece(folder)
        sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", f"{folder}.gguf", "--outtype", "f32"]
        try:
            runpy.run_path(f"{llama_cpp}/convert_hf_to_gguf.py", run_name="__main__")
        except (Exception, SystemExit) as error:
            failed[folder] = " ".join((f"{type(error).__name__}: {error}", *said))
        else:
            failed[folder] = None
    return failed


def write_sentencepiece(folder: str) -> None:
    """A tokenizer.model of a few pieces, for converters that read nothing else."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.Train(
        sentence_iterator=iter(["abcdefghij klmnopqrstuvwxyz"] * 100),
        model_prefix=f"{folder}/tokenizer",
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def score(file: str, vocabulary: int, tokens: list[int]) -> list[float]:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_gpu_layers, settings.warmup = file, 64, 0, False
    settings.n_parallel, settings.cpuparams.n_threads = 1, 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # half precision would round
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # as would this one
    asked = {"prompt": tokens, "n_predict": 1, "n_probs": vocabulary, "temperature": 0.0, "cache_prompt": False}
    reply: Any = xllamacpp.Server(settings).handle_completions(asked)
    reply = json.loads(reply) if isinstance(reply, (str, bytes)) else reply
    found = {one["id"]: one["logprob"] for one in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    return [found[index] for index in range(vocabulary)]


if __name__ == "__main__":
    verb, first, *rest = sys.argv[1:]
    found: Any = convert(first, rest) if verb == "convert" else score(first, int(rest[0]), json.loads(rest[1]))
    print("\nRESULT " + json.dumps(found), flush=True)

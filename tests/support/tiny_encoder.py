"""Tiny BERTs with their tokenizer, and Python source for them to read."""

from pathlib import Path

from tiny_models import randomise
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerFast

POSITIONS = 24


def source(number):
    """A module of six functions whose docstrings and bodies share a word that no other has."""
    words = [f"{a}{b}" for a in ("tal", "ron", "mis", "ver", "kol", "dun") for b in (f"a{number}", f"o{number}")]
    functions = [
        f'def f_{word}(x):\n    """Turn every {word} into {word}ish, as file {number} does it."""\n'
        f"    y = {word}(x)\n    return y + {i}\n"
        for i, word in enumerate(words[::2])
    ]
    return f'"""What file {number} is about: words."""\n\n' + "\n\n".join(functions)


def write_sources(folder):
    """Twenty modules; their paths."""
    for number in range(20):
        (folder / f"m{number}.py").write_text(source(number))
    return sorted(map(str, folder.iterdir()))


def make_tokenizer(texts, positions=POSITIONS):
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions, **names)


def write_bert(kind, out, files, positions=POSITIONS):
    """A tiny BERT with dropout (`kind` is its class), and its tokenizer; the folder as a string."""
    tokenizer = make_tokenizer([Path(f).read_text() for f in files], positions)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, initializer_range=0.4, **sizes)
    model = randomise(kind(config))
    for name, parameter in model.named_parameters():
        if name.endswith("LayerNorm.bias"):  # a large shift, equal for all texts, would make them all alike
            parameter.data *= 0.1
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return str(out)

"""How far a patched model is from its original, in the terms of its users: text, spoken sentences, passages.

Each judge has the model's `calibration` for a repair, and `figures` of a patched model beside the original on text that
nobody calibrated on. The text is WikiText-2: validation calibrates, test judges.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as Whisper

Figures = dict[str, float]
Inputs = list[dict[str, Tensor]]


def wikitext(split: str, folder: Path | None) -> str:
    """WikiText-2's "valid" or "test": from `valid.txt` and `test.txt` in a folder, or from the Hub."""
    if folder is not None:
        return (folder / f"{split}.txt").read_text(encoding="utf-8")
    from datasets import load_dataset  # type: ignore[import-untyped]

    name = {"valid": "validation", "test": "test"}[split]
    return "".join(load_dataset("Salesforce/wikitext", "wikitext-2-v1", split=name)["text"])


def paragraphs(text: str) -> list[str]:
    """Its paragraphs as people write them: headings, and spaces before marks, are left out."""
    lines = (line.strip() for line in text.splitlines() if not line.strip().startswith("="))
    joined = (re.sub(r" @(\W)@ ", r"\1", line) for line in lines if line)
    return [re.sub(r" ([.,;:!?)]|'s\b)|(\() ", r"\1\2", line) for line in joined]


def spread(items: list[Any], count: int) -> list[Any]:
    """So many of them, evenly spaced."""
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


# --- distances --------------------------------------------------------------------------------------------------------


def divergences(original: Tensor, patched: Tensor) -> Tensor:
    """KL(original || patched) of each token's next one, in nats; logits (T, v)."""
    truth, found = (F.log_softmax(logits.double(), -1) for logits in (original, patched))
    return (truth.exp() * (truth - found)).sum(-1)


def of_tokens(each: Tensor) -> Figures:
    """Mean, median, 99th percentile and worst of the tokens; NaN if one isn't finite, and how many aren't."""
    kinds = {"mean": each.mean(), "median": each.median(), "99 %": each.quantile(0.99), "worst": each.max()}
    broken = int((~each.isfinite()).sum())
    figures = {f"KL {kind}": float("nan") if broken else float(value) for kind, value in kinds.items()}
    return {**figures, "not finite": broken, "tokens": each.numel()}


def word_error(sentences: Iterable[str], heard: Iterable[str]) -> float:
    """Words that were left out, put in or mistaken, as a share of the words that were said."""
    wrong = said = 0
    for sentence, other in zip(sentences, heard, strict=True):
        words, found = (re.findall(r"[a-z0-9']+", text.lower()) for text in (sentence, other))
        costs = list(range(len(found) + 1))  # to make the words so far of so many of those that were heard
        for i, word in enumerate(words, 1):
            left, costs[0] = costs[0], i
            for j, one in enumerate(found, 1):
                left, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, left + (word != one))
        wrong, said = wrong + costs[-1], said + len(words)
    return wrong / said


# --- language models --------------------------------------------------------------------------------------------------


class LanguageModel:
    """Judged by the distribution of the next token, on windows of test text, and by perplexity."""

    SEQUENCES, TOKENS = 64, 128  # of the calibration, unless others are asked for
    WINDOW: ClassVar[int] = 256

    def __init__(self, folder: Path, text: Path | None, judged: int | None = None, bos: bool = False) -> None:
        self.folder, self.text, self.count, self.bos = folder, text, judged or 16, bos
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.judged = f"{self.count} windows of {self.WINDOW} tokens"

    def open(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def _windows(self, split: str, count: int, length: int) -> Tensor:
        """The first windows of a text; each begins with BOS if the tokenizer puts it there, or if it is asked for."""
        ids = self.tokenizer(wikitext(split, self.text), return_tensors="pt")["input_ids"][0]
        bos = self.tokenizer.bos_token_id
        ids = torch.cat([torch.tensor([bos]), ids]) if self.bos and ids[0] != bos else ids
        first = ids[:1] if ids[0] == bos else ids[:0]
        size = length - len(first)
        rows = ids[len(first) :][: count * size].unfold(0, size, size)
        return torch.cat([first.expand(len(rows), -1), rows], -1)

    def calibration(self, sequences: int, tokens: int) -> Inputs:
        return [{"input_ids": few} for few in self._windows("valid", sequences, tokens).split(8)]

    @torch.no_grad()
    def figures(self, original: Any, patched: Any) -> Figures:
        each, losses = [], []
        for window in self._windows("test", self.count, self.WINDOW):
            logits = [model(input_ids=window[None]).logits[0] for model in (original, patched)]
            each.append(divergences(*logits))
            losses.append([float(F.cross_entropy(one[:-1].double(), window[1:])) for one in logits])
        before, after = torch.tensor(losses).mean(0).exp().tolist()
        return {"perplexity of the original": before, "perplexity": after, **of_tokens(torch.cat(each))}


# --- sentence encoders ------------------------------------------------------------------------------------------------


class SentenceEncoder:
    """Judged by its embeddings of the halves of passages: cosine to the original's, and whether halves are found.

    An embedding is the mean of the last hidden states, as the two models here take it. *found*: the share of first
    halves whose second half is nearer than that of any other passage.
    """

    SEQUENCES, TOKENS = 32, 128
    WORDS: ClassVar[int] = 60  # of half a passage, at least

    def __init__(self, folder: Path, text: Path | None, judged: int | None = None) -> None:
        self.folder, self.text, self.count = folder, text, judged or 64
        self._truth: Tensor | None = None  # the original's embeddings
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.judged = f"{self.count} passages in halves of {self.WORDS} words"

    def open(self) -> Any:
        return AutoModel.from_pretrained(self.folder, dtype=torch.float32).eval()

    def _passages(self, split: str, count: int) -> list[list[str]]:
        words = [paragraph.split() for paragraph in paragraphs(wikitext(split, self.text))]
        return spread([some for some in words if len(some) >= 2 * self.WORDS], count)

    def _batches(self, texts: list[str], tokens: int) -> Iterator[dict[str, Tensor]]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": tokens, "return_tensors": "pt"}
        for i in range(0, len(texts), 16):
            yield dict(self.tokenizer(texts[i : i + 16], **options))

    def calibration(self, sequences: int, tokens: int) -> Inputs:
        return list(self._batches([" ".join(some) for some in self._passages("valid", sequences)], tokens))

    @torch.no_grad()
    def _embeddings(self, model: Any, texts: list[str]) -> Tensor:
        found = []
        for batch in self._batches(texts, tokens=256):
            mask = batch["attention_mask"][..., None]
            states = model(**batch).last_hidden_state
            found.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)

    def figures(self, original: Any, patched: Any) -> Figures:
        passages = self._passages("test", self.count)
        half = self.WORDS
        texts = [" ".join(some[start : start + half]) for start in (0, half) for some in passages]
        if self._truth is None:
            self._truth = self._embeddings(original, texts)
        truth, found = self._truth, self._embeddings(patched, texts)
        cosines = (truth * found).sum(-1)
        shares = [self._found(embedded) for embedded in (truth, found)]
        return {
            "cosine mean": float(cosines.mean()),
            "cosine lowest": float(cosines.min()),
            "found by the original": shares[0],
            "found": shares[1],
            "not finite": int((~found.isfinite().all(-1)).sum()),
            "passages": len(passages),
        }

    @staticmethod
    def _found(embedded: Tensor) -> float:
        first, second = embedded.chunk(2)
        return float(((first @ second.T).argmax(-1) == torch.arange(len(first))).double().mean())


# --- speech -----------------------------------------------------------------------------------------------------------

RATE = 16_000
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3")


def spoken(sentences: list[str]) -> list[np.ndarray]:
    """Sentences said by the program espeak-ng, with four voices in turn, at RATE."""
    said: list[np.ndarray] = []
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/said.wav"
        for i, sentence in enumerate(sentences):
            voice = VOICES[i % len(VOICES)]
            subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", file, sentence], check=True)
            with wave.open(file) as audio:
                rate, frames = audio.getframerate(), audio.readframes(audio.getnframes())
            samples = torch.frombuffer(bytearray(frames), dtype=torch.int16).float() / 2**15
            count = round(len(samples) * RATE / rate)
            low = F.interpolate(samples[None, None, None], (1, count), mode="bilinear", antialias=True)
            said.append(low.flatten().numpy())
    return said


def hummed(sentences: list[str]) -> list[np.ndarray]:
    """Vowels without words, as long as the sentences: pulses through resonances that change four times a second."""
    clips = []
    for i, sentence in enumerate(sentences):
        draw = np.random.default_rng(i)
        count = RATE * max(2, len(sentence) // 15)
        changes = np.arange(0, count, RATE // 4)

        def track(low: float, high: float, draw: Any = draw, count: int = count, at: Any = changes) -> np.ndarray:
            return np.interp(np.arange(count), at, draw.uniform(low, high, len(at)))

        pitch = np.cumsum(track(90, 220)) / RATE
        formants, loud = [track(300, 900), track(900, 2400), track(2400, 3200)], track(-0.3, 1).clip(0)
        hertz = np.gradient(pitch) * RATE
        waves = [
            sum(1 / (1 + ((n * hertz - at) / 120) ** 2) for at in formants) * np.sin(2 * np.pi * n * pitch)
            for n in range(1, 24)
        ]
        noise = 0.003 * draw.standard_normal(count)
        clips.append((loud * sum(waves) / 8 + noise).astype("f4"))
    return clips


class Speech:
    """Whisper, judged by its words on spoken sentences, and by the next token where it is told the words so far.

    Without the program espeak-ng the sounds are vowels, on which only the second can be measured: its decoder reads
    real sentences, and its encoder sounds that don't say them.
    """

    SEQUENCES, TOKENS = 16, 32  # clips, and tokens of their sentences
    PROMPT: ClassVar[list[int]] = [50257, 50362]  # English without timestamps
    END: ClassVar[int] = 50256

    def __init__(self, folder: Path, text: Path | None, judged: int | None = None) -> None:
        self.folder, self.text, self.count = folder, text, judged or 24
        self.tokenizer, self.extract = AutoTokenizer.from_pretrained(folder), WhisperFeatureExtractor()
        self.speaks = shutil.which("espeak-ng") is not None
        self.judged = f"{self.count} {'spoken sentences' if self.speaks else 'clips of hummed vowels'}"

    def open(self) -> Any:
        return Whisper.from_pretrained(self.folder, dtype=torch.float32).eval()

    def _sentences(self, split: str, count: int) -> list[str]:
        every = (re.split(r"(?<=[a-z]{2}\.) ", paragraph) for paragraph in paragraphs(wikitext(split, self.text)))
        plain = [one for some in every for one in some if re.fullmatch(r"[A-Z][A-Za-z,' ]+\.", one)]
        return spread([one for one in plain if 6 <= len(one.split()) <= 14], count)

    def _clips(self, split: str, count: int, tokens: int) -> tuple[list[str], Inputs]:
        sentences = self._sentences(split, count)
        sounds = (spoken if self.speaks else hummed)(sentences)
        batches = []
        for sentence, sound in zip(sentences, sounds, strict=True):
            features = self.extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
            words = self.tokenizer(" " + sentence, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*self.PROMPT, *words][:tokens]])
            batches.append({"input_features": features, "decoder_input_ids": ids})
        return sentences, batches

    def calibration(self, sequences: int, tokens: int) -> Inputs:
        return self._clips("valid", sequences, tokens)[1]

    @torch.no_grad()
    def heard(self, model: Any, features: Tensor, most: int = 60) -> str:
        """The most likely words, one after another."""
        encoded, ids = model.get_encoder()(features), torch.tensor([self.PROMPT])
        for _ in range(most):
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
            if len(ids[0]) == len(self.PROMPT):
                logits[[220, self.END]] = -torch.inf  # something is said
            ids = torch.cat([ids, logits.argmax()[None, None]], -1)
            if ids[0, -1] == self.END:
                break
        return self.tokenizer.decode(ids[0], skip_special_tokens=True)

    @torch.no_grad()
    def figures(self, original: Any, patched: Any) -> Figures:
        sentences, clips = self._clips("test", self.count, tokens=64)
        figures: Figures = {}
        if self.speaks:
            for model, name in ((original, "word error of the original"), (patched, "word error")):
                figures[name] = word_error(sentences, [self.heard(model, clip["input_features"]) for clip in clips])
        each = [divergences(*(model(**clip).logits[0] for model in (original, patched))) for clip in clips]
        return {**figures, **of_tokens(torch.cat(each))}


JUDGES: dict[str, Any] = {"language": LanguageModel, "speech": Speech, "sentence": SentenceEncoder}

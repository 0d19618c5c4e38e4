"""Labelled texts: which words were hidden."""

import pytest
from harness import labelled
from texts import Document


class TestHiddenWords:
    @pytest.mark.slow
    def test_of_the_plays(self):
        """Figures in docs/results are of these texts."""
        _, texts = labelled.read_labelled()
        assert texts.split.value_counts().to_dict() == {"train": 5271, "dev": 930, "test": 668}
        assert texts.labels.explode().nunique() == 24

    def test_by_hand(self, monkeypatch):
        monkeypatch.setattr(labelled, "HIDDEN_WORDS", 2)
        monkeypatch.setattr(labelled, "split_of", lambda name: name)
        speeches = [
            "KING:\nThou art, King,\nnot a kingdom.\nAnother",
            "no more\n\n \nThou and thou",
            "thou with with with",
        ]
        found = labelled.hide_words([Document("train", "\n\n".join(speeches)), Document("test", "thou")])
        assert [(document.name, *item) for document, item in found] == [
            ("train", "BLANK:\nBLANK art, BLANK,\nnot a kingdom.", ("king", "thou")),
            ("train", "BLANK and BLANK", ("thou",)),
            ("train", "BLANK with with with", ("thou",)),
            ("test", "BLANK", ("thou",)),
        ]

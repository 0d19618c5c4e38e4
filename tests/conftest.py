"""One thread, no network, no progress bars."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

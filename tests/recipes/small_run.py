"""Flags of a run of finetune.py that takes seconds."""

SMALL = "--block_size 16 --heldout_blocks 20 --batch_size 4 --baseline_steps 6 --steps 4 --eval_every 2 --calibration 8"

"""Settings of all tests: one thread per rank, no tracker, two sizes of property tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import hypothesis
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

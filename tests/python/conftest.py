"""MINFERENCE_TEST_DEVICE=cuda runs the Hugging Face tests on that device: all their models and tensors are
made there."""

import os

device = os.environ.get("MINFERENCE_TEST_DEVICE")
if device:
    import torch

    torch.set_default_device(device)

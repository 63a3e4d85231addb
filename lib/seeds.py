"""Random numbers that depend only on a key, so that a sample depends neither on its batch nor on its rank."""
import hashlib

import numpy as np
import torch


def uniforms(shape, *key):
    """A float64 tensor of uniform numbers from 0 to the largest float32 below 1."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return torch.from_numpy(generator.random(shape)).clamp(max=1 - 2 ** -24)


def server_seed(*key):
    """Sampling seed for a server, below 2^31."""
    return int(uniforms(1, *key).item() * 2 ** 31)

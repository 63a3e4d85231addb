"""Random numbers that depend on a key alone, so that a sample depends neither on its batch nor on its rank."""
import hashlib

import numpy as np
import torch


def uniforms(shape, *key):
    """Uniform numbers from 0 to the greatest below 1 in float32, a float64 tensor."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return torch.from_numpy(generator.random(shape)).clamp(max=1 - 2 ** -24)


def server_seed(*key):
    """The seed below 2^31 that a server samples with."""
    return int(uniforms(1, *key).item() * 2 ** 31)

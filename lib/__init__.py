"""Plumbing, which a reader of the method may skip."""

VERSION = "0.2.0"               # of the whole program; CITATION.cff has the same

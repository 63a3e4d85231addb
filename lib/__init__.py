"""Infrastructure; a reader of the method can skip it."""
import importlib.util
import sys

VERSION = "0.3.0"               # of the whole program; CITATION.cff has the same

if importlib.util.find_spec("torch") is None:
    print("error: this Python has no torch; bash run.sh makes .venv, then: source .venv/bin/activate", file=sys.stderr)
    sys.exit(2)

"""Flags that several stages share, and presets. It imports nothing that takes seconds, as flags are read first."""
import argparse
import functools
import importlib.util
import math
import sys

from lib import VERSION

UNTRAINED = "untrained"         # --critic: the base model, with no training


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than None and False."""

    def _get_help_string(self, action):
        says_nothing = action.default is None or action.default is False or "(default:" in action.help
        return action.help if says_nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as for all other bad input."""

    def error(self, message):
        self.exit(2, f"error: {message}\n")


def argument_parser(docstring):
    """A parser with --version, whose --help shows the stage's docstring and every default."""
    sys.__stdout__.reconfigure(errors="backslashreplace")            # text that cannot be encoded must not end a run
    wide = functools.partial(Formatter, max_help_position=40, width=120)
    parser = Parser(description=docstring, formatter_class=wide, usage="%(prog)s … (arguments below)")
    parser.add_argument("--version", action="version", version=f"SWEET-RL, minimal {VERSION}")
    return parser


def set_preset(parser, presets, argv):
    """Add --preset. Its values become the parser's defaults, so explicit flags win and --help shows them.
    presets: {name: {argument: value}}."""
    parser.add_argument("--preset", choices=presets, help="settings of the paper or its code (docs/reproduce.md)")
    first = Parser(add_help=False)
    first.add_argument("--preset")
    parser.set_defaults(**presets.get(first.parse_known_args(argv)[0].preset, {}))


def pick(kind, flags):
    """The NamedTuple `kind`, filled with its flags. flags: all of a stage, {name: value}."""
    return kind(**{name: flags[name] for name in kind._fields})


# ---------------------------------------------------------------------------------------------------------------------
# types of flags: finite numbers with bounds, texts that are not empty

def number_flag(low, high, kind=float):
    """A type: a finite number from `low` to `high`; with kind=int a whole one."""
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "whole" if kind is int else "finite"
            raise argparse.ArgumentTypeError(f"must be a {what} number from {low} to {high}, not {text[:40]}")
        return value
    return read


positive_int = number_flag(1, 10 ** 9, int)
non_negative_float = number_flag(0, 10 ** 9)
share_flag = number_flag(0, 1)
learning_rate_flag = number_flag(0, 1000)
return_gap_flag = number_flag(0, 2)
num_tokens_flag = number_flag(1, 10 ** 6, int)                           # per turn: each has a random number
num_samples_flag = number_flag(1, 10 ** 4, int)                          # per turn, or in flight
seed_flag = number_flag(-2 ** 32, 2 ** 32, int)                          # its product with the steps fits in 64 bits


def temperature_flag(text):
    """A type: 0, or a temperature large enough to divide logits by."""
    return 0.0 if number_flag(0, 100)(text) == 0 else number_flag(1e-3, 100)(text)


def text_flag(text):
    """A type: a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("cannot be empty")
    return text


def project_flag(text):
    """A type: a project of trackio, which must be installed."""
    if importlib.util.find_spec("trackio") is None:
        raise argparse.ArgumentTypeError("needs trackio: pip install trackio")
    return text


def named_paths(text):
    """A type: NAME=PATH,PATH,… as (name, [path, …]). NAME must be usable as a file name."""
    name, _, paths = text.partition("=")
    if not name or not paths or "/" in name:
        raise argparse.ArgumentTypeError(f"{text[:80]}: must be NAME=PATH, where NAME has no /")
    return name, paths.split(",")


def is_server(name):
    """Whether the name of a model is the address of a server."""
    return name.startswith(("http://", "https://"))


def server_flag(text):
    """A type: the address of a server."""
    if not is_server(text):
        raise argparse.ArgumentTypeError("must be http://HOST:PORT/v1#NAME")
    return text


def add_world(parser):
    """Flags for a domain's Environment (colbench/domain.py), for the stages that score answers."""
    group = parser.add_argument_group("scoring")
    group.add_argument("--unsafe-scorer", action="store_true", help="run answers with resource limits only, if the "
                       "system allows no isolation: they can read and write your files")
    group.add_argument("--similarity", choices=["clip", "pixels"], default="clip", help="how screenshots are "
                       "compared: cosine of CLIP embeddings (the paper's), or colours and structure (no weights)")
    group.add_argument("--clip-model", type=text_flag, metavar="MODEL", help="--similarity clip: folder or hub id "
                       "(None: openai/clip-vit-base-patch32)")
    add_browser_and_overwrite(parser, group)


def add_browser_and_overwrite(parser, group):
    group.add_argument("--browser", type=text_flag, metavar="PATH", help="Chromium or Chrome, if the domain needs "
                       "one (None: the first one found)")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that other arguments made")


def yes_or_no(text):
    """A type: True for yes, False for no."""
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"must be yes or no, not {text[:40]}")
    return text == "yes"


def add_reference(parser):
    """The flag of the stages that score actions with a critic."""
    parser.add_argument("--reference-sees-c", type=yes_or_no, metavar="yes|no", help="whether eq. 3's reference "
                        "model reads c in ranking (None: as in the critic's training; untrained: no)")


def add_critic(parser, is_needed=False):
    """The flags of methods that score actions with a critic."""
    parser.add_argument("--critic", type=text_flag, required=is_needed, help="critic folder of 03, or untrained: "
                        "--model itself")
    add_reference(parser)


def add_candidates(parser):
    """Flags of candidates and their pairs."""
    group = parser.add_argument_group("SWEET's candidates and pairs (other methods do not use these)")
    group.add_argument("--data-frac", type=share_flag, default=0.1, help="share of the trajectories that are "
                       "used (with a few hundred, use 1)")
    group.add_argument("--num-candidates", type=num_samples_flag, default=16, help="actions sampled per turn")
    group.add_argument("--pairs-per-turn", type=positive_int, default=4, help="DPO pairs per turn")
    group.add_argument("--temperature", type=temperature_flag, default=1.0, help="of the candidates")
    group.add_argument("--max-new-tokens", type=num_tokens_flag, default=1024, help="most tokens in a candidate")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--candidates", type=text_flag, metavar="FILE", help="candidates.jsonl of another run "
                        "with the same model, seed, trajectories and sampling")
    source.add_argument("--sampler", type=server_flag, metavar="URL,…", help="servers of --model's weights, "
                        "http://HOST:PORT/v1#NAME, that return token ids, as vLLM does (not bit-reproducible)")
    group.add_argument("--concurrency", type=num_samples_flag, default=256, help="candidates in flight per rank")
    group.add_argument("--pairs-together", action="store_true", help="one example of all pairs of a turn (faster); "
                       "a batch has --batch-size / --pairs-per-turn of them")


def add_training(parser, max_length, epochs=None, batch_size=None):
    """The flags that 03 and 04 share, with the defaults that differ."""
    parser.add_argument("--trajectories", type=text_flag, required=True, help="trajectories file (02)")
    parser.add_argument("--model", type=text_flag, required=True, help="model to start from (folder, hub id, smollm2)")
    parser.add_argument("--out", type=text_flag, required=True, help="folder to write")
    parser.add_argument("--epochs", type=positive_int, default=epochs, help="passes over the examples")
    parser.add_argument("--batch-size", type=positive_int, default=batch_size, help="examples per step, over all ranks")
    parser.add_argument("--lr", type=learning_rate_flag, default=2e-7, help="peak learning rate (warm-up, "
                        "cosine): the paper's, for 8B; models/tiny needs 3e-5 to 1e-3")
    parser.add_argument("--beta", type=non_negative_float, default=0.1, help="scale of the log-ratios in the loss")
    parser.add_argument("--nll-coef", type=non_negative_float, default=0.01, help="weight of the chosen side's NLL")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="arithmetic; trained parameters stay float32")
    parser.add_argument("--seed", type=seed_flag, default=0, help="seed of order and samples")
    group = parser.add_argument_group("the data")
    group.add_argument("--num-trajectories", type=positive_int, help="use only this many (nested subsets, by --seed)")
    group.add_argument("--max-length", type=positive_int, default=max_length,
                       help="drop longer trajectories (tokens); SWEET: longer pairs")
    group.add_argument("--min-return-gap", type=return_gap_flag, help="least difference in reward of a pair, if "
                       "rewards are graded (None: the domain's)")
    group.add_argument("--max-steps", type=positive_int, help="stop (and end the schedule) after this many steps")
    group = parser.add_argument_group("LoRA (needs peft)")
    group.add_argument("--lora", type=positive_int, metavar="RANK", help="train an adapter, on a model in --dtype")
    group.add_argument("--lora-targets", type=text_flag, nargs="+", metavar="NAME",
                       help="layers with an adapter, e.g. q_proj v_proj (None: all linear ones)")
    group.add_argument("--merge", action="store_true", help="write a whole model instead of an adapter folder")
    group = parser.add_argument_group("memory and speed")
    group.add_argument("--micro-batch-size", type=positive_int, default=8, help="examples per forward pass")
    group.add_argument("--max-tokens", type=positive_int, default=16384, help="tokens per pass without gradients")
    group.add_argument("--activation-checkpointing", action="store_true", help="less memory, a third more time")
    group.add_argument("--compile", action="store_true", help="compile the layers: slower start, faster steps")
    group.add_argument("--dry-run", type=positive_int, metavar="RANKS", help="only predict the memory per rank")
    group.add_argument("--save-every", type=positive_int, default=200, help="steps between saved states")
    group.add_argument("--track", type=project_flag, metavar="PROJECT", help="also log to this project of trackio")
    add_browser_and_overwrite(parser, group)

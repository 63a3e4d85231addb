"""--track PROJECT: what a stage logs goes to trackio, too, a tracker on this machine with the interface of wandb."""
import time

from lib.costs import read_record
from lib.runtime import InputError, is_main

EVERY_S = 5


def check_track(args):
    """InputError where --track is given and trackio is missing."""
    if args.track:
        try:
            import trackio  # noqa: F401
        except ImportError:
            raise InputError("--track: needs trackio: pip install trackio") from None


class Track:
    """The run of args.out in the project args.track, on rank 0; does nothing without --track.

    rows: what a run that goes on keeps of what it logged, dicts with "step". Its curve is drawn again from these: what
    a killed run had not sent is not missing, what is computed again is not there twice. None: the curve goes on as it
    is."""

    def __init__(self, args, rows=None):
        self.run = None
        if args.track is None or not is_main():
            return
        import trackio
        name = f"{args.out} {read_record(args.out, 'args').get('id', '')}".strip()
        if rows is not None:
            try:
                for old in trackio.Api().runs(args.track):
                    if old.name == name:
                        old.delete()
            except ValueError:
                pass                                                 # there is no such project yet
        self.run = trackio.init(project=args.track, name=name, config=vars(args), resume="allow")
        for row in rows or ():
            self.log(**row)

    def log(self, step, **numbers):
        if self.run:
            self.run.log(numbers, step=step)


class Counters:
    """How a rollout goes on rank 0: by the number of dialogues their mean return so far and, of this start, tokens a
    second. stats: what counts the tokens of each model, as rollout_lines() takes it."""

    def __init__(self, args, stats):
        self.track, self.stats = Track(args), stats
        self.number, self.sum, self.begin = 0, 0.0, time.monotonic()
        self.last = self.begin

    def resume(self, returns):
        """Returns of the dialogues that are there already."""
        if self.track.run:
            for value in returns:
                self.number, self.sum = self.number + 1, self.sum + value

    def add(self, value):
        """One more dialogue, of this return."""
        self.number, self.sum = self.number + 1, self.sum + value
        if time.monotonic() - self.last >= EVERY_S:
            self.log()

    def log(self):
        self.last = time.monotonic()
        tokens = sum(own.get("server_completion_tokens", 0) + own.get("decode_tokens", 0)
                     for own in self.stats.values())
        self.track.log(self.number, mean_return=self.sum / max(1, self.number),
                       tokens_per_s=tokens / (self.last - self.begin))

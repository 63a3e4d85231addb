"""--track PROJECT: what a stage logs goes to trackio, too, a tracker on this machine with the interface of wandb."""
import time

from lib.runtime import is_main, optional


def project_flag(text):
    """A type of a flag: a project of trackio, which must be installed."""
    optional("trackio", "--track: needs")
    return text


class Track:
    """The curve of the output `out` in a project of trackio, on rank 0: each start of a stage is a run of its own.
    Without a project it does nothing. config: the arguments of the stage, a dict."""

    def __init__(self, project, out, config):
        self.run = None
        if project is not None and is_main():
            import trackio
            name = f"{out} {time.strftime('%Y-%m-%d %H:%M:%S')}"
            self.run = trackio.init(project=project, name=name, config=config)

    def log(self, step, **numbers):
        if self.run:
            self.run.log(numbers, step=step)

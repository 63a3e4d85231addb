"""--track PROJECT: what a stage logs goes to trackio, too, a tracker on this machine with the interface of wandb."""
from lib.runtime import is_main, optional


def project_flag(text):
    """A type of a flag: a project of trackio, which must be installed."""
    optional("trackio", "--track: needs")
    return text


class Track:
    """The curve of the output `out` in a project of trackio, on rank 0. Without a project it does nothing.

    config: the arguments of the stage, a dict.
    rows: what a run that goes on keeps of what it logged, dicts with "step". The curve is drawn again from these, so
    that what a killed run had not sent is not missing, and what is computed again is not there twice.
    None: the curve goes on as it is."""

    def __init__(self, project, out, config, rows=None):
        self.run = None
        if project is None or not is_main():
            return
        import trackio
        name = str(out)
        if rows is not None:
            try:
                for old in trackio.Api().runs(project):
                    if old.name == name:
                        old.delete()
            except ValueError:
                pass                                                 # there is no such project yet
        self.run = trackio.init(project=project, name=name, config=config, resume="allow")
        for row in rows or ():
            self.log(**row)

    def log(self, step, **numbers):
        if self.run:
            self.run.log(numbers, step=step)

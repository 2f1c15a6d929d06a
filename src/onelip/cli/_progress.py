"""Progress of long work on stderr: a bar in a terminal, a line for each stage elsewhere."""

import sys


class StageProgress:
    """Context manager and callback (done, total, what) for `onelip.certify` and `onelip.attack`."""

    def __enter__(self) -> "StageProgress":
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.stage, self.task = "", self.bar.add_task("", total=None)
        self.bar.start()
        return self

    def __call__(self, done: int, total: int, what: str) -> None:
        # Anything else is the name of a layer.
        stage = {"images": "certifying images", "attacking images": what}.get(what, "proving layers")
        if stage != self.stage and not sys.stderr.isatty():
            print(f"{stage}: {total}", file=sys.stderr, flush=True)
        self.stage = stage
        shown = stage if stage != "proving layers" else f"proving {what}"
        self.bar.update(self.task, description=shown, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

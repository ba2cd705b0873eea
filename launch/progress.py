"""What a person sees while a run goes on: one live line on a terminal, plain lines in a log file."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isozyme.launch.step import StepResult


def _console() -> Console:
    """Standard output: as wide as the terminal, or 120 columns in a log file."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=120)


class Display:
    """The progress of one run, shown by rank 0 and by no other.

    Args:
        shown: whether this rank shows anything.
        total: steps of the run.
        start: the step that it begins with.
        console: where to write; stdout by default.
    """

    def __init__(self, *, shown: bool, total: int, start: int = 0, console: Console | None = None) -> None:
        self.console = console or _console()
        self._shown = shown
        self._total = total
        self._bar: Progress | None = None
        if shown and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", total=total, completed=start, text="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, result: StepResult, *, lr: float, tokens_per_s: float, logged: bool) -> None:
        """Show a finished step; in a log file only if it is `logged`."""
        if not self._shown:
            return
        text = (
            f"loss {result.loss:.4f}  {result.bits_per_base:.4f} bits/base  norm {result.grad_norm:.2f}  "
            f"lr {lr:.2e}  {tokens_per_s:,.0f} tokens/s"
        )
        if result.skipped:
            text = "skipped: no valid label"
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, text=text)
        elif logged:
            self.console.print(f"step {step + 1}/{self._total}  {text}", markup=False)

    def say(self, text: str) -> None:
        """Print a line beside the progress."""
        if self._shown:
            self.console.print(text, markup=False)

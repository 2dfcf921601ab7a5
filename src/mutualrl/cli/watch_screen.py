"""Screen of `mutualrl watch`: curves, progress of each policy, newest rescues, and the ends of the logs."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static, TabbedContent, TabPane
from textual_plotext import PlotextPlot

from mutualrl.console.display import clean, duration
from mutualrl.errors import MutualRLError
from mutualrl.process.status import RunState
from mutualrl.reporting.signs import Signs, rgb
from mutualrl.runs.live import Curve, LivePolicy, LiveRun
from mutualrl.storage.files import JsonObject

COLUMNS = ("policy", "step", "reward", "accuracy", "gate", "waiting", "doing")
MOST_SHOWN = 20  # rescues
LONGEST = 300  # characters per text of a rescue
WIDE = 120  # minimum columns for the gate's curve beside the others
OWN, PEER = "bold red", "bold green"


class Confirm(ModalScreen[bool]):
    """Yes/no dialog: y is yes, n or Escape is no."""

    CSS = """
    Confirm { align: center middle; }
    #question { width: auto; max-width: 90%; height: auto; padding: 1 2; border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Yield the question."""
        yield Static(self._question, id="question", markup=False)

    def action_answer(self, answer: bool) -> None:
        """Answer the question."""
        self.dismiss(answer)


class WatchScreen(App[None]):
    """App that follows a run until `q` is pressed. Markup and escape sequences in the run's files have no effect."""

    CSS = """
    #head { dock: top; height: 1; padding: 0 1; background: $boost; }
    #curves { height: 2fr; min-height: 7; }
    #curves PlotextPlot { width: 1fr; }
    #table { height: auto; max-height: 12; padding: 0 1; }
    #details { height: 3fr; min-height: 6; }
    #details TabPane { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stop", "Stop and save"),
        Binding("o", "report", "Open the report"),
        Binding("q,ctrl+c", "quit", "Leave; the run continues", key_display="q"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        live: LiveRun,
        *,
        title: str,
        measure: str,
        steps: int,
        seconds: float,
        look: Callable[[], bool],
        stop: Callable[[], str] | None,
        report: Callable[[], Path],
    ) -> None:
        """All three callables run in a thread, and may raise MutualRLError or OSError.

        `look`: called every `seconds` before the files are read; returns whether the run is live. `stop`: sends a
        stop request to the run and returns a message; None if that is impossible from here. `report`: writes the
        report and returns its page.
        """
        super().__init__()
        self._live = live
        self._heading = title
        self._measure = measure
        self._steps = steps
        self._seconds = seconds
        self._look, self._stop, self._report = look, stop, report
        self._state: str = RunState.RUNNING
        self._reporting = False
        self._signs = Signs(live.policies)  # as on the page of the run
        self._shown: dict[str, str] = {}  # last content of each widget: only changes are redrawn

    def compose(self) -> ComposeResult:
        """Yield the parts of the screen, from top to bottom."""
        yield Static(id="head", markup=False)
        with Horizontal(id="curves"):
            yield PlotextPlot(id="reward")
            yield PlotextPlot(id="accuracy")
            yield PlotextPlot(id="gate")
        with VerticalScroll(id="table"):
            yield Static(id="policies")  # a DataTable caches every value a cell has ever had
        with TabbedContent(id="details"):
            with TabPane("Rescues", id="rescues"), VerticalScroll():
                yield Static(id="rescue-texts")
            for place, name in enumerate(self._live.policies):
                with TabPane(f"Log of {name}", id=f"log-{place}"), VerticalScroll(id=f"scroll-{place}"):
                    yield Static(id=f"log-text-{place}")
        yield Footer()

    def on_mount(self) -> None:
        """Start polling the run."""
        for place in range(len(self._live.policies)):
            self.query_one(f"#scroll-{place}", VerticalScroll).anchor()  # follows the end of a log
        self._choose_curves()
        self._show()
        self._watch()

    @property
    def _main(self) -> Screen[None]:
        """Return the main screen, also while a dialog covers it."""
        return self.screen_stack[0]

    def on_resize(self, event: Resize) -> None:
        """Choose the curves that fit the new width."""
        self._choose_curves()

    def _choose_curves(self) -> None:
        gated = any(policy.gate_rate.points for policy in self._live.policies.values())
        self._main.query_one("#gate").display = gated and self.size.width >= WIDE

    @work(thread=True, exclusive=True, group="watch")
    def _watch(self) -> None:
        """Poll the run until it ends or the screen closes."""
        while self.is_running:
            problem = None
            try:
                is_live = self._look()
                self._live.update(logs=True)
            except (MutualRLError, OSError) as error:  # e.g. a bucket that is temporarily unreachable
                is_live, problem = True, str(error)
            self.call_from_thread(self._set_state, problem, is_live)
            if not is_live:
                return
            wake = time.monotonic() + self._seconds
            while self.is_running and time.monotonic() < wake:
                time.sleep(0.1)

    def _set_state(self, problem: str | None, is_live: bool) -> None:
        if problem is not None:
            self._state = clean(problem, 200)
        else:
            self._state = RunState.RUNNING if is_live else RunState.ENDED
        self._choose_curves()
        self._show()

    # ---- display

    def _show(self) -> None:
        self._put("#head", Text(self._head(), no_wrap=True, overflow="ellipsis"))
        policies = list(self._live.policies.values())
        self._put_table([self._cells(policy) for policy in policies])
        self._draw("#reward", "training reward", policies, [policy.reward for policy in policies])
        self._draw("#accuracy", self._measure, policies, [policy.accuracy for policy in policies])
        self._draw("#gate", "gate rate", policies, [policy.gate_rate for policy in policies])
        self._put("#rescue-texts", rescue_texts(policies))
        for place, policy in enumerate(policies):
            log = "\n".join(policy.log) or "no log here: it is on the machine where the policy runs"
            self._put(f"#log-text-{place}", Text(log))

    def _put(self, selector: str, text: Text) -> None:
        if self._shown.get(selector) != text.markup:
            self._shown[selector] = text.markup
            self._main.query_one(selector, Static).update(text)

    def _put_table(self, rows: Sequence[Sequence[str]]) -> None:
        if self._shown.get("#policies") == repr(rows):
            return
        self._shown["#policies"] = repr(rows)
        table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for row in rows:
            red, green, blue = rgb(self._signs.colour(row[0]))
            name, *cells = (Text(value, no_wrap=True) for value in row)
            name.stylize(f"rgb({red},{green},{blue})")
            table.add_row(name, *cells)
        self._main.query_one("#policies", Static).update(table)

    def _head(self) -> str:
        step = min((policy.step for policy in self._live.policies.values()), default=0)
        seconds = self._live.seconds_left(self._steps)
        remaining = (
            f" · about {duration(seconds)} of training left" if self._state == RunState.RUNNING and seconds > 0 else ""
        )
        return one_line(f"step {step}/{self._steps} · {self._state}{remaining} · {self._heading}")

    def _cells(self, policy: LivePolicy) -> list[str]:
        return [
            policy.name,
            f"{policy.step}/{self._steps}",
            number(policy.reward.last),
            number(policy.accuracy.last),
            number(policy.gate_rate.last),
            "" if policy.waiting is None else f"{policy.waiting:.0%}",
            one_line(policy.doing),
        ]

    def _draw(self, selector: str, title: str, policies: Sequence[LivePolicy], curves: Sequence[Curve]) -> None:
        points = "".join(repr(curve.points[-1:]) + str(len(curve.points)) for curve in curves)
        if self._shown.get(selector) == points:
            return
        self._shown[selector] = points
        plot = self._main.query_one(selector, PlotextPlot)
        plot.plt.clear_data()
        plot.plt.title(title)
        for policy, curve in zip(policies, curves, strict=True):
            if curve.points:
                steps, values = zip(*curve.points, strict=True)
                colour = rgb(self._signs.colour(policy.name))
                plot.plt.plot(steps, values, label=policy.name, color=colour, marker="braille")
        recorded = [step for curve in curves for step, _ in curve.points]
        ticks = whole_ticks(min(recorded), max(recorded)) if recorded else []
        plot.plt.xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        plot.refresh()

    # ---- keys

    def action_stop(self) -> None:
        """Stop the run after confirmation; notify if that is impossible from here."""
        if self._stop is None:
            self.notify("Stop each policy where it runs: Ctrl-C there, or cancel it in its scheduler", severity="error")
            return

        def answered(yes: bool | None) -> None:
            if yes and self._stop is not None:
                self._in_thread(self._stop)

        question = "Stop the run? Each policy saves a checkpoint; the run prints how to resume.  [y/n]"
        self.push_screen(Confirm(question), answered)

    def action_report(self) -> None:
        """Write the report, and open it if there is a browser."""
        if self._reporting:
            return
        self._reporting = True
        self.notify("Writing the report ...")
        self._in_thread(self._write_report)

    def _write_report(self) -> str:
        try:
            return opened(self._report())
        finally:
            self._reporting = False

    @work(thread=True)
    def _in_thread(self, job: Callable[[], str]) -> None:
        try:
            message, failed = job(), False
        except (MutualRLError, OSError, ValueError) as error:
            message, failed = str(error), True
        severity: Literal["information", "error"] = "error" if failed else "information"
        self.call_from_thread(self.notify, clean(message, 1000), severity=severity, markup=False)


def rescue_texts(policies: Sequence[LivePolicy]) -> Text:
    """Return the newest rescues of all policies: prompt, the policy's completion, the peer's completion or, after it as
    a hint, the policy's own."""
    rescues = [(row.get("step"), policy.name, row) for policy in policies for row in policy.rescues]
    rescues.sort(key=lambda rescue: rescue[0] if type(rescue[0]) is int else 0, reverse=True)
    if not rescues:
        return Text("none yet: no text was taught")
    text = Text()
    for step, name, row in rescues[:MOST_SHOWN]:
        _add_rescue(text, str(step), name, row)
    return text


def _add_rescue(text: Text, step: str, name: str, row: JsonObject) -> None:
    peer = one_line(str(row.get("peer")))[:64]
    text.append(f"step {clean(step, 20)}  ", "dim")
    text.append(f"{one_line(row.get('prompt'))}\n")
    failures = row.get("own")
    for failure in failures[:1] if isinstance(failures, list) else []:
        text.append(f"  ✗ {name}: ", OWN)
        text.append(f"{one_line(failure.get('text') if isinstance(failure, dict) else None)}\n")
    if row.get("hint"):
        text.append(f"  ? {peer} (hint): ", PEER)
        text.append(f"{one_line(row.get('hint'))}\n")
    text.append(f"  ✓ {name if row.get('hint') else peer}: ", PEER)
    text.append(f"{one_line(row.get('answer'))}\n")


def whole_ticks(first: int, last: int, count: int = 4) -> list[float]:
    """Return tick positions for an axis of steps: both ends, and integers between them."""
    return sorted({float(first + round(place * (last - first) / (count - 1))) for place in range(count)})


def one_line(value: object) -> str:
    """Return a text, or the turns of a run with tools, as one cleaned line."""
    if isinstance(value, list):
        turns = [each for each in value if isinstance(each, dict)]
        value = " ".join(f"[{turn.get('role')}] {turn.get('content')}" for turn in turns)
    return " ".join(clean(value if isinstance(value, str) else "", LONGEST).split())


def number(value: float | None) -> str:
    """Return a fraction or a reward with two decimals."""
    return "" if value is None else f"{value:.2f}"


def opened(page: Path) -> str:
    """Open a page in the desktop's browser, and return a message. Without a desktop, e.g. over ssh, the page is not
    opened: a browser in the terminal would take over the screen."""
    desktop = sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if desktop and webbrowser.open(page.as_uri()):
        return f"Opened {page}"
    return f"Written: {page}"

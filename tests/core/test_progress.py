import io
import time

from rich.console import Console

from bitsmith.core.progress import Reporter


def test_plain_lines_where_there_is_no_terminal(spoken: io.StringIO, reporter: Reporter) -> None:
    assert list(reporter.track(range(5), total=5, label="Layers")) == list(range(5))
    reporter.say("a [bold]b[/bold] :smile: " + "x" * 300)
    reporter.warn("careful [x]")
    lines = spoken.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Layers: 5/5, ")
    assert lines[1] == "a [bold]b[/bold] :smile: " + "x" * 300
    assert lines[2] == "warning: careful [x]"


def test_long_work_is_reported_on_the_way(spoken: io.StringIO, reporter: Reporter, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    list(reporter.track(range(6), total=6, label="Layers"))
    # An item every 4 s, a line at least 10 s after the last: items 3 and 6.
    assert spoken.getvalue().splitlines() == [
        "Layers: 3/6, 12 s so far, about 12 s left",
        "Layers: 6/6, 24 s so far, about 0 s left",
    ]


def test_a_bar_on_a_terminal_passes_the_items_on() -> None:
    screen = io.StringIO()
    terminal = Reporter(Console(file=screen, force_terminal=True, width=100))
    assert list(terminal.track(iter("abc"), total=3, label="Layers")) == ["a", "b", "c"]
    assert "Layers" in screen.getvalue()


def test_quiet_says_nothing_but_warnings(spoken: io.StringIO) -> None:
    quiet = Reporter(Console(file=spoken, width=100), quiet=True)
    quiet.say("hello")
    assert list(quiet.track([1], total=1, label="Layers")) == [1]
    assert spoken.getvalue() == ""
    quiet.warn("careful")
    assert spoken.getvalue() == "warning: careful\n"

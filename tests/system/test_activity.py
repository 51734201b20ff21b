"""How long the rest of a round will take."""

from fl_lightning.system import activity
from fl_lightning.system.activity import Pace


def test_the_pace_of_a_round_says_how_long_it_takes(monkeypatch):
    heard, clock = [], iter([0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr("fl_lightning.system.activity.time.monotonic", lambda: next(clock))
    with activity.heard_by(heard.append):
        pace = Pace("clients trained", [1.0, 3.0, 2.0])
        pace.done(1)
        pace.done(0)
        pace.done(2)
    assert heard == [
        "0 of 3 clients trained",
        "1 of 3 clients trained, 10 s left",
        "2 of 3 clients trained, 10 s left",
        "3 of 3 clients trained",
    ]

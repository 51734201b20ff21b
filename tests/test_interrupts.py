import signal

import pytest

from fl_lightning import interrupts


def test_an_interrupt_that_was_swallowed_is_raised_later():
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts.install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # as if a garbage-collection callback had dropped it
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()  # heard: not raised again
    finally:
        signal.signal(signal.SIGINT, before)

"""Signals ask a run to save and stop; a second Ctrl-C does not wait."""

from __future__ import annotations

import signal

import pytest
import torch

from sop_faiss.train import stop as stopping
from sop_faiss.train.stop import StopRequest

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interruptible():
    """As in a terminal, also where the tests run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_asks_as_often_as_it_likes(number):
    before = signal.getsignal(number)
    with StopRequest().listening() as stop:
        assert not stop.anywhere(CPU)
        for _ in range(3):
            signal.raise_signal(number)
        assert stop.anywhere(CPU)
    assert signal.getsignal(number) is before


def test_ctrl_c_lets_the_run_save_and_is_an_interruption_then(caplog):
    reached = False
    with pytest.raises(KeyboardInterrupt, match="`resume`"), StopRequest().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # torchrun passes the same one on
        assert stop.anywhere(CPU)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [record.getMessage() for record in caplog.records] == [
        "interrupted: saving after this step; press Ctrl-C again to stop at once"
    ]


def test_where_nothing_is_continued_ctrl_c_stops_at_once(caplog):
    with pytest.raises(KeyboardInterrupt) as raised, StopRequest(saves_on_interrupt=False).listening():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("not reached")
    assert not caplog.records and not str(raised.value)


def test_a_second_ctrl_c_stops_at_once(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt, match="from the last checkpoint"), StopRequest().listening():
        signal.raise_signal(signal.SIGINT)
        clock[0] += 1.5
        signal.raise_signal(signal.SIGINT)
        pytest.fail("not reached")


def test_what_goes_wrong_while_stopping_is_told():
    with pytest.raises(ZeroDivisionError), StopRequest().listening():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_a_background_job_is_not_interrupted():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

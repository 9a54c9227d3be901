"""What ends a run early, and what watches that it goes on."""

import os
import signal
import subprocess
import sys

import pytest
from common import TINY, change

from minitf import config
from minitf.runtime.watch import StopRequest, Watchdog, WatchdogConfig, process_age, start_ticks, stop_on_signals

STALL = """
import sys, threading
from minitf.runtime import watch
watch.REARM = 0.0
w = watch.Watchdog(watch.WatchdogConfig(factor=2.0, at_least=0.3, exit={exit}))
def collective_that_never_ends(): threading.Event().wait({wait})
for step in range(1, 4): w.beat(step)
collective_that_never_ends()
w.beat(4); w.pause()
print("went on")
"""


def run_stalling(**values):
    return subprocess.run([sys.executable, "-c", STALL.format(**values)], capture_output=True, text=True, check=False)


def test_a_step_that_takes_too_long_prints_all_stacks_and_goes_on():
    done = run_stalling(exit=False, wait=1.5)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "watchdog: step 3 or the next takes more than 0 s" in done.stderr
    assert "collective_that_never_ends" in done.stderr


def test_a_step_that_takes_too_long_can_end_the_process():
    done = run_stalling(exit=True, wait=None)  # for ever: no test would wait for it
    assert (done.returncode, done.stdout) == (1, "")
    assert "the process ends (watchdog.exit). All threads:" in done.stderr
    assert "collective_that_never_ends" in done.stderr


def test_the_limit_follows_the_runs_own_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("minitf.runtime.watch.time.monotonic", lambda: now[0])
    watchdog = Watchdog(WatchdogConfig(factor=10.0, at_least=5.0))
    limits = []
    for step, took in enumerate([0.0, 1.0, 1.0, 1.0, 100.0, 1.0], 1):
        now[0] += took
        watchdog.beat(step)
        limits.append(watchdog.limit())
    assert limits == [None, None, 10.0, 10.0, 10.0, 10.0]
    watchdog.pause()
    now[0] += 1000.0  # an evaluation: no step
    watchdog.beat(7)
    assert watchdog.limit() == 10.0
    watchdog.pause()
    quick = Watchdog(WatchdogConfig(factor=10.0, at_least=5.0))
    for step in range(5):
        now[0] += 0.01
        quick.beat(step)
    assert quick.limit() == 5.0
    quick.pause()
    assert Watchdog(WatchdogConfig(factor=None)).limit() is None


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_first_signal_is_a_request_and_the_second_acts_as_before(name, capfd):
    number = signal.Signals[name]
    acted = []
    before = signal.signal(number, lambda *args: acted.append(name))
    try:
        with stop_on_signals() as stop:
            assert stop.reason is None
            signal.raise_signal(number)
            assert (stop.reason, acted) == (name, [])
            signal.raise_signal(number)
            assert acted == [name]
        signal.raise_signal(number)
        assert acted == [name, name]
    finally:
        signal.signal(number, before)
    assert f"{name}: the run saves and ends within two steps" in capfd.readouterr().err


def test_signals_act_as_before_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_max_run_time_counts_from_the_start_of_the_process():
    assert StopRequest(process_age() - 1).reason == "max_run_time"
    assert StopRequest(process_age() + 1000).reason is None
    assert StopRequest().reason is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), ("11h30m", 41400), ("1d12h", 129600), ("1d1h1m1s", 90061)]
)
def test_times_are_read(text, seconds):
    assert config.seconds("max_run_time", text) == seconds


@pytest.mark.parametrize("text", ["", "12", "1h30", "30m1h", "h", "-5m", "1.5h", "0m"])
def test_other_times_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match=rf"max_run_time={text}: must be"):
        config.validate(change(TINY, max_run_time=text))


def test_a_process_is_known_by_its_start():
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_ticks(child.pid) >= start_ticks(os.getpid())
    child.kill()
    # Killed but not yet waited for: it does not run any more.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    child.wait()
    assert start_ticks(child.pid) is None


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.reason is None
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

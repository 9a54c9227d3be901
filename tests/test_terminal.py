"""Output never ends a run."""

import io
import os
import sys

import pytest
from common import arguments, change, run_module, text_config

from minitf.runtime.terminal import lasting_output


def test_a_letter_that_cannot_be_shown_is_written_as_its_escape(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with lasting_output():
        print("С\udce9 a")
    assert raw.getvalue() == b"\\u0421\\udce9 a\n"


def test_output_that_is_gone_goes_nowhere(monkeypatch):
    reads, writes = os.pipe()
    stream = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", stream)
    with lasting_output():
        print("seen", flush=True)
        assert os.read(reads, 5) == b"seen\n"
        os.close(reads)
        for _ in range(3):
            print("not seen", flush=True)
    stream.close()  # what it held is gone, too: no error


@pytest.mark.slow
def test_a_run_in_ascii_with_a_closed_pipe_ends_as_any_other(corpus, tmp_path):
    import subprocess

    folder = tmp_path / "С"
    folder.mkdir()
    cfg = text_config(corpus, steps=6, log_every=1, sample_every=2, sample__prompts=("a",), checkpoint__last=True)
    (folder / "train.txt").write_text((corpus / "train.txt").read_text() + "С" * 40)
    cfg = change(cfg, data__path=str(folder / "train.txt"), sample__prompts=("С",), sample__max_new_tokens=4)
    command = [sys.executable, "-m", "minitf.train", *arguments(cfg, folder / "w")]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    first = process.stdout.readline()
    process.stdout.close()  # as head does
    err = process.stderr.read().decode()
    assert process.wait() == 0, err
    assert b"minitf" in first
    assert "Traceback" not in err
    assert (folder / "w/checkpoints/6").is_dir()
    shown = run_module("minitf.evaluate", "--workdir", str(folder / "w"), PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr

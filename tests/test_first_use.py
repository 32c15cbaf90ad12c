"""Tests that modules imported only when needed can be used first by many threads and tasks
concurrently.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, traceback
import atts

sys.setswitchinterval(1e-5)  # threads take turns often, so that they meet inside of imports

def names():
    return [getattr(atts, name) for name in atts.__all__]

def tokenizer():
    from atts.models import path
    from atts.models.tokenizers import ModelTokenizer
    return ModelTokenizer(path("draft"), "draft").encode("one")

def configuration():
    from atts.local.model_config import read_model_config
    from atts.models import path
    return read_model_config(path("target"), "target")

def run():
    from atts.testing import toy_problems
    return atts.evaluate_sync(toy_problems(1), atts.Setup(draft="scripted", target="scripted"))

def meet(use):
    start.wait()
    try:
        use()
    except BaseException:
        print(traceback.format_exc(limit=-3))

uses = [tokenizer, configuration, names, run] * 3
start = threading.Barrier(len(uses))
threads = [threading.Thread(target=meet, args=(use,)) for use in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.both
def test_threads_may_use_late_imports_at_once(tmp_path: Path) -> None:
    """Threads of a new process load tokenizers, read configurations and run evaluations
    concurrently without errors.
    """
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""Child processes that hang, crash, fail and end: real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_dflash.agent.children import CHILDREN
from otel_dflash.agent.children.child import INHERITED_VARIABLES, Child, NoAnswerError
from otel_dflash.session import process_start
from tests.processes import poll, read_line

PROGRAM = "tests.agent.child_program"
ANSWER_S = 30.0
LATE_S = 2.0  # long enough for the child to begin what it hangs in
PARENT = """
import sys, time
from otel_dflash.agent.children.child import Child
child = Child(sys.argv[1])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a child shares with the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    os.mkfifo(tmp_path / "gate")
    return tmp_path


@pytest.fixture
def child(shared: Path) -> Iterator[Child]:
    child = Child(PROGRAM)
    yield child
    with os.fdopen(os.open(shared / "gate", os.O_RDWR | os.O_NONBLOCK), "wb"):
        poll(lambda: child.is_gone)


def failure(child: Child, request: str, timeout_s: float = ANSWER_S) -> tuple[str, bool]:
    """Return what is reported instead of an answer: the text, and whether the child was abandoned."""
    child.request(request)
    with pytest.raises(NoAnswerError) as caught:
        child.answer(timeout_s)
    return str(caught.value), caught.value.is_abandoned


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_one_that_hangs_in_an_announced_call_is_left_alone_and_ends_when_the_call_returns(
    child: Child, shared: Path
) -> None:
    assert failure(child, "hang_in_a_call", LATE_S) == (
        f"child_program did not answer within 2 s: process {child.pid} hangs in drive and is left alone",
        True,
    )
    assert (child.is_gone, state(child.pid)) == (False, "S")
    (shared / "gate").write_text("the driver answers")
    poll(lambda: child.is_gone)


def test_one_that_hangs_outside_a_call_is_ended(child: Child) -> None:
    assert failure(child, "hang", LATE_S) == ("child_program did not answer within 2 s and was ended", False)
    assert child.is_gone


def test_one_that_closes_its_stdout_and_lives_is_ended(child: Child) -> None:
    assert failure(child, "close_stdout") == ("child_program closed its stdout and was ended", False)
    assert child.is_gone


def test_one_that_closes_its_stdout_in_an_announced_call_is_left_alone(child: Child, shared: Path) -> None:
    assert failure(child, "close_stdout_in_a_call") == (
        f"child_program closed its stdout: process {child.pid} hangs in drive and is left alone",
        True,
    )
    assert (child.is_gone, state(child.pid)) == (False, "S")
    (shared / "gate").write_text("the driver answers")
    poll(lambda: child.is_gone)


def test_one_that_floods_its_pipe_is_ended(child: Child) -> None:
    assert failure(child, "flood", LATE_S) == ("child_program did not answer within 2 s and was ended", False)
    assert child.is_gone


def test_none_is_killed_in_a_call_that_it_began_just_then(shared: Path) -> None:
    """The child is in a call half of the time, and each of these deadlines meets it anywhere."""
    inside = shared / "inside"
    ended = 0
    for turn in range(16):
        inside.write_bytes(b"\0")
        child = Child(PROGRAM)
        child.request("call_for_ever")
        poll(lambda: inside.read_bytes() == b"\1")
        with pytest.raises(NoAnswerError) as caught:
            child.answer(turn / 16_000)
        if not caught.value.is_abandoned:
            ended += 1
            assert inside.read_bytes() == b"\0"
        poll(lambda child=child: child.is_gone)  # type: ignore[misc]
    print(f"{ended} of 16 were ended, the others abandoned")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("crash", "child_program was killed by signal 11"),
        ("crash_in_a_call", "child_program ended with exit code 3"),
        ("fail", "child_program failed: ValueError: no such thing"),
        ("unheard of", "child_program failed: KeyError: 'unheard of'"),
    ],
)
def test_one_that_crashes_or_fails_is_reported_and_gone(request_: str, said: str, child: Child) -> None:
    assert failure(child, request_) == (said, False)
    assert child.is_gone


def test_one_whose_module_is_not_there_is_reported(shared: Path) -> None:
    assert failure(Child("otel_dflash.agent.children.absent"), "anything") == (
        "absent ended with exit code 1",
        False,
    )


def test_what_libraries_print_does_not_disturb_the_answers(child: Child) -> None:
    for _ in range(2):
        child.request("chatter")
        assert child.answer(ANSWER_S) == ["quiet", "x" * 1_000_000]
    child.close()


def test_it_inherits_no_credential(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_RESOURCE_ATTRIBUTES",
        "WANDB_API_KEY",
        "HTTPS_PROXY",
        "X",
    ):
        monkeypatch.setenv(name, "secret")
    child = Child(PROGRAM)
    child.request("environment")
    inherited = child.answer(ANSWER_S)
    child.close()
    assert set(inherited) <= set(INHERITED_VARIABLES)
    assert inherited["PATH"] == os.environ["PATH"]
    assert "secret" not in inherited.values()


@pytest.mark.parametrize("module", [PROGRAM, *CHILDREN.values()])
def test_it_ends_at_the_end_of_its_stdin(module: str, shared: Path) -> None:
    child = Child(module)
    child.close()
    assert child.is_gone


def test_it_ends_when_its_parent_is_killed(shared: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, PROGRAM], stdout=subprocess.PIPE) as parent:
        pid = int(read_line(parent))
        parent.send_signal(signal.SIGKILL)
    poll(lambda: process_start(pid) is None)

"""The example trainer: the algorithm on cases small enough to write down, and short real runs in processes of
their own."""

from __future__ import annotations

import ast
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

# the example is a script beside its modules
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "dflash"))

from blocks import block_mask, draw_anchors, loss_weights
from data import make_batch
from flags import parse
from model import MASK, Drafter, Target, pack_hidden, target_layer_ids
from pipeline import Batch, BucketQueue, Item
from sections import Slow, parse_slow

EXAMPLE = Path(__file__).parents[1] / "examples" / "dflash"
TRAIN = (sys.executable, str(EXAMPLE / "train.py"))
TELEMETRY_LINES_MAX = 15
MODULES = sorted(EXAMPLE.glob("*.py"))


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OTEL_DFLASH_DISABLED": "true"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:  # its pipes are closed even if it takes too long
        try:
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    return process.returncode, out, err


# The algorithm


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (6, 2, [1, 3]), (6, 1, [3]), (28, 5, [1, 7, 13, 19, 25])],
)
def test_target_layers_are_spread_as_published(
    target_layers: int, draft_layers: int, expected: list[int]
) -> None:
    assert target_layer_ids(target_layers, draft_layers) == expected


def test_pack_hidden_equals_cat_and_fills_the_buffer_in_place() -> None:
    hidden = list(torch.randn(7, 3, 5, 4))
    buffer = torch.zeros(4, 9, 8)
    packed = pack_hidden(hidden, [1, 3], buffer)
    assert torch.equal(packed, torch.cat([hidden[2], hidden[4]], dim=-1))
    assert packed.data_ptr() == buffer.data_ptr()


def test_block_sees_itself_and_the_context_strictly_before_its_anchor() -> None:
    mask = block_mask(torch.tensor([[1, 3, 0]]), torch.tensor([[True, True, False]]), block=2, context=4)
    rows = ["".join("#" if visible else "." for visible in row) for row in mask[0].tolist()]
    assert rows == [
        "#..." + "##....",  # anchor 1
        "#..." + "##....",
        "###." + "..##..",  # anchor 3
        "###." + "..##..",
        "...." + "....#.",  # not kept: each token only itself
        "...." + ".....#",
    ]


def test_loss_weights_decay_and_skip_anchor_end_unsupervised_and_unkept() -> None:
    loss_mask = torch.tensor([[False, True, True, False, True, True]])
    weights = loss_weights(
        torch.tensor([[1, 4, 1]]), torch.tensor([[True, True, False]]), loss_mask, block=4, gamma=2.0
    )
    expected = [[0, 1, 0, 0.36787944], [0, 1, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(weights.view(3, 4), torch.tensor(expected, dtype=weights.dtype))


def test_anchors_lie_where_they_and_the_next_token_are_supervised() -> None:
    loss_mask = torch.tensor([[False, True, True, True, False, True], [False] * 5 + [True]])
    for seed in range(20):
        anchors, keep = draw_anchors(loss_mask, 3, torch.Generator().manual_seed(seed))
        assert [sorted(row[kept].tolist()) for row, kept in zip(anchors, keep, strict=True)] == [[1, 2], []]


def test_draft_depends_on_hidden_states_before_the_anchor_alone() -> None:
    torch.manual_seed(0)
    target = Target(width=16, heads=2, layers=5)
    drafter = Drafter(target, block=4)
    anchors, keep = torch.tensor([[3]]), torch.tensor([[True]])
    tokens, positions = torch.tensor([[65, MASK, MASK, MASK]]), torch.arange(3, 7)[None]
    packed = torch.randn(1, 6, 2 * 16)

    def draft(changed: int) -> torch.Tensor:
        other = packed.clone()
        other[:, changed] += 1
        with torch.no_grad():
            return torch.as_tensor(
                drafter(target, other, tokens, positions, block_mask(anchors, keep, 4, context=6))
            )

    assert torch.equal(draft(3), draft(5))
    assert not torch.allclose(draft(2), draft(3))


def test_only_fusion_norms_and_draft_layers_are_trained() -> None:
    drafter = Drafter(Target(width=16, heads=2, layers=5))
    assert {name.split(".")[0] for name, _ in drafter.named_parameters()} == {
        "fuse",
        "context_norm",
        "layers",
        "norm",
    }


def test_batch_counts_tokens_without_padding() -> None:
    batch = make_batch([torch.full((60,), 7), torch.full((64,), 7)], number=3, bucket=64)
    assert (batch.tokens, batch.loss_tokens, batch.bucket, tuple(batch.ids.shape)) == (
        124,
        124 - 2 * 32,
        64,
        (2, 64),
    )
    assert int(batch.loss_mask.sum()) == batch.loss_tokens


# The queue


def item(number: int, bucket: int = 64) -> Item:
    return Item(Batch(number, bucket, tokens=1, loss_tokens=1), hidden=None)


def test_bucket_queue_gives_nothing_before_min_ready() -> None:
    hidden_states = BucketQueue(capacity=6, min_ready=3)
    for number, bucket in enumerate((64, 64, 96, 64, 128)):
        hidden_states.put(item(number, bucket))
        if number < 2:
            with pytest.raises(queue.Empty):
                hidden_states.get_nowait()
    assert len({hidden_states.get_nowait().batch.number for _ in range(3)}) == 3
    with pytest.raises(queue.Empty):
        hidden_states.get(timeout=0.01)
    assert hidden_states.qsize() == 2


def test_bucket_queue_keeps_order_in_a_lane_and_mixes_lanes() -> None:
    hidden_states = BucketQueue(capacity=60, min_ready=1)
    for number in range(60):
        hidden_states.put(item(number, bucket=64 if number < 30 else 128))
    got = [hidden_states.get().batch.number for _ in range(60)]
    assert [number for number in got if number < 30] == list(range(30))
    assert [number for number in got if number >= 30] == list(range(30, 60))
    assert got != sorted(got)


def test_bucket_queue_is_bounded() -> None:
    hidden_states = BucketQueue(capacity=2, min_ready=1)
    hidden_states.put(item(0))
    hidden_states.put(item(1))
    with pytest.raises(queue.Full):
        hidden_states.put_nowait(item(2))
    with pytest.raises(ValueError, match=re.escape("min_ready must be 1..capacity (2), got 3")):
        BucketQueue(capacity=2, min_ready=3)


def test_bucket_queue_hands_every_item_to_one_of_many_waiting_threads() -> None:
    hidden_states, got, lock = BucketQueue(capacity=4, min_ready=2), list[int](), threading.Lock()

    def consume() -> None:
        for _ in range(50):
            number = hidden_states.get(timeout=30).batch.number
            with lock:
                got.append(number)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(201):  # one stays: below min_ready
        hidden_states.put(item(number, bucket=(64, 96, 128)[number % 3]), timeout=30)
    for thread in threads:
        thread.join(30)
    assert (len(got), len(set(got)), hidden_states.qsize()) == (200, 200, 1)


# Flags


def test_slow_is_read() -> None:
    assert parse_slow("target:1:pack_hidden=20ms") == Slow("target", 1, "pack_hidden", 0.02, "sleep")
    assert parse_slow("drafter:*:optimizer=0.5s:lock") == Slow("drafter", None, "optimizer", 0.5, "lock")


@pytest.mark.parametrize("kind", ["sleep", "cpu", "lock"])
def test_planted_delay_takes_its_time(kind: str) -> None:
    start_s = time.perf_counter()
    Slow("target", 0, "pack_hidden", 0.01, kind).wait()
    assert time.perf_counter() - start_s >= 0.009


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slow", "target:1:pack_hidden"], "must look like target:1:pack_hidden=20ms"),
        (["--slow", "target:1:pack_hidden=20"], "must look like target:1:pack_hidden=20ms"),
        (
            ["--slow", "trainer:1:forward=20ms"],
            "the role must be one of target, postprocess, drafter, got 'trainer'",
        ),
        (
            ["--slow", "target:1:forward=20ms"],
            "a section of target must be one of queue_get, model_forward, pack_hidden, queue_put",
        ),
        (
            ["--slow", "target:1:pack_hidden=20ms:gpu"],
            "the kind must be one of sleep, cpu, lock, error, got 'gpu'",
        ),
        (["--slow", "target:2:pack_hidden=20ms"], "there is no target 2, only 2 (from 0)"),
        (["--steps", "0"], "must be a whole number of at least 1, got '0'"),
        (["--log-interval", "nan"], "must be a number of seconds above 0, got 'nan'"),
        (["--deterministic", "--drafters", "2"], "--deterministic runs one target and one drafter"),
        (["--min-ready", "20"], "--min-ready 20 can't be reached: --capacity is 16"),
        (["--text", "missing.txt"], "no such file: missing.txt"),
        (["--text", str(EXAMPLE / "monitor.py")], "must have at least 20000 bytes"),
        (["--counts", "missing/counts.json"], "not a file in an existing directory"),
    ],
)
def test_wrong_flag_is_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# What telemetry adds


def test_telemetry_adds_at_most_15_lines_and_nothing_else_mentions_it() -> None:
    marked = []
    for module in MODULES:
        for line in module.read_text().splitlines():
            if line.endswith("# telemetry"):
                marked.append(line)
            else:
                assert not re.search(r"otel_dflash|\.worker\b|\bstep\.(set|produced|consumed|id)\b", line), (
                    line
                )
    assert 0 < len(marked) <= TELEMETRY_LINES_MAX


def test_example_imports_torch_tqdm_and_the_standard_library() -> None:
    allowed = {"torch", "tqdm", "otel_dflash", *(module.stem for module in MODULES), *sys.stdlib_module_names}
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, module.name


# Runs


def test_simulated_five_and_three_workers_count_what_they_do(tmp_path: Path) -> None:
    counts_file = tmp_path / "counts.json"
    arguments = (
        "--simulate",
        "--targets",
        "5",
        "--drafters",
        "3",
        "--steps",
        "30",
        "--counts",
        str(counts_file),
    )
    code, out, err = finish(start(*TRAIN, *arguments))
    assert (code, "nothing was trained or decoded" in out) == (0, True), err
    counts = json.loads(counts_file.read_text())
    assert counts["weights_sha256"] is None
    assert [step["step"] for step in counts["drafter_steps"]] == list(range(30))
    consumed = [number for step in counts["drafter_steps"] for number in step["consumed"]]
    assert len(consumed) == len(set(consumed)) == 2 * 30
    phases, steps = counts["phases"], counts["steps"]
    workers = {role: "".join(sorted(by_index)) for role, by_index in phases.items()}
    assert workers == {"target": "01234", "postprocess": "0", "drafter": "012"}
    for index, drafter in phases["drafter"].items():
        own = sum(step["drafter"] == int(index) for step in counts["drafter_steps"])
        assert steps["drafter"][index] == own
        assert drafter == {"queue_get": 2 * own, "forward": 2 * own, "backward": 2 * own, "optimizer": own}
    for index, target in phases["target"].items():  # stopped somewhere in its last step
        begun = steps["target"][index]
        assert list(target.values()) == sorted(target.values(), reverse=True)
        assert (target["queue_get"], begun - target["queue_put"] <= 1) == (begun, True)
    assert phases["postprocess"]["0"]["d2h"] == steps["postprocess"]["0"] >= 60


def test_failing_worker_ends_the_run_with_its_error_and_exit_code_1() -> None:
    code, out, err = finish(
        start(*TRAIN, "--simulate", "--steps", "1000000", "--slow", "target:1:pack_hidden=1ms:error")
    )
    assert code == 1
    assert err.splitlines()[-1] == "sections.PlantedError: planted by --slow in target.pack_hidden"
    assert "steps in" not in out


def test_ctrl_c_ends_the_run_with_130_and_no_traceback() -> None:
    process = start(*TRAIN, "--simulate", "--steps", "1000000", "--log-interval", "0.2")
    assert process.stderr
    assert process.stderr.readline().startswith("[monitor]")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err.splitlines()[-1], "Traceback" in err) == (130, "interrupted", False)


@pytest.mark.slow
def test_short_runs_train_decode_losslessly_and_repeat_bit_by_bit(tmp_path: Path) -> None:
    runs = [["--deterministic"], ["--deterministic"], ["--targets", "2", "--drafters", "2"]]
    for i, arguments in enumerate(runs):
        arguments += [
            "--teach-steps",
            "30",
            "--steps",
            "12",
            "--decode-tokens",
            "12",
            "--counts",
            str(tmp_path / f"{i}.json"),
        ]
    program = (
        f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); import train; sys.exit(max(map(train.main, "
        f"{runs!r})))"
    )
    code, out, err = finish(start(sys.executable, "-c", program))  # in one process: the imports take longest
    assert code == 0, err
    assert out.count("lossless           yes") == 3
    losses = re.findall(r"held-out loss +(\S+) before, (\S+) after", out)
    assert [float(after) < float(before) for before, after in losses] == [True, True, True]
    assert all(float(length) >= 1 for length in re.findall(r"acceptance length +(\S+)", out))
    counts: list[dict[str, Any]] = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    assert [len(count["drafter_steps"]) for count in counts] == [12, 12, 12]
    hashes = [count["weights_sha256"] for count in counts]
    assert hashes[0] == hashes[1] != hashes[2]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes)

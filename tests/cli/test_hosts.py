"""Several processes: two with four CPU devices each match one with eight; if one dies, the other ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mars_jax import hub
from mars_jax.cli.generate.command import main
from mars_jax.models import ModelConfig, init_params
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError

ROOT = Path(__file__).parent.parent.parent
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    norm_eps=1e-5,
)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Return the arguments of a command on eight devices."""
    folder = tmp_path_factory.mktemp("hosts")
    hub.save(folder / "model", CONFIG, init_params(CONFIG, jax.random.key(0), scale=0.3))
    prompts = [{"prompt_tokens": [1 + i, 2, 3, 1 + i, 2, 3, 1 + i]} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    command = f"--target {folder / 'model'} --draft ngram --mesh data=2,model=4 --batch-size 4 --ignore-eos "
    return (command + f"--prompts-file {folder / 'prompts.jsonl'} --json").split()


def start(arguments, *flags, command="generate", devices=4):
    xla_flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    environment = os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "mars_jax", command, *arguments, *flags],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start_two(arguments, *flags, **options):
    connection = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--process-id"]
    return [start(arguments, *flags, *connection, str(i), **options) for i in range(2)]


def finish(*processes):
    """Wait for the processes, which must succeed; return stdout and stderr of each."""
    printed = [process.communicate(timeout=900) for process in processes]
    assert all(process.returncode == 0 for process in processes), printed
    return printed


def rows(text):
    decoded = [json.loads(line) for line in text.splitlines()]
    return [(row["prompt_tokens"], row["tokens"], row["steps"]) for row in decoded]


@pytest.mark.slow
def test_two_processes_of_four_devices_give_the_tokens_of_one_of_eight(arguments, tmp_path, capsys):
    arguments = [*arguments, "--max-new-tokens", "24"]
    assert main(arguments) == 0
    expected = capsys.readouterr().out
    # Also write to a file, as if an earlier run had been interrupted after its first row.
    file = tmp_path / "rows.jsonl"
    assert main([*arguments, "--output", str(file)]) == 0
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    printed = finish(*start_two(arguments, "--output", str(file), "--resume"))
    assert rows(printed[0][0]) == rows(expected)[1:] and len(rows(expected)) == 6
    assert rows(file.read_text()) == rows(expected)
    assert "tokens/s" in printed[0][1]
    assert printed[1][0] == "" and "tokens/s" not in printed[1][1]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others(arguments):
    first, second = start_two([*arguments, "--max-new-tokens", "1900"])
    assert first.stdout.readline()  # the first batch is done and the second is running
    second.kill()
    _, errors = first.communicate(timeout=hosts.HEARTBEAT + 40)
    assert first.returncode not in (0, None), errors
    second.communicate()
    assert second.returncode == -signal.SIGKILL


STUDIES = {
    "benchmark": "--verify exact --temperatures 0",
    "calibrate": "--risk regret --bound 0.9 --confidence 0.5 --thetas 0.9 0.5",
}
"""Flags of each command that measures."""


def study(path):
    """Return the rows of a benchmark or the file of a calibration, without times, date and provenance."""
    if path.is_dir():
        rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    else:
        rows = [json.loads(path.read_text())]
    keys = {key for row in rows for key in row if "second" not in key} - {"date", "made"}
    return [{key: value for key, value in row.items() if key in keys} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_two_processes_measure_what_one_does(name, tmp_path):
    flags = "--task arithmetic --problems 4 --max-new-tokens 16 --draft ngram --dtype float32 --batch-size 2"
    flags = [*flags.split(), "--mesh", "data=2", *STUDIES[name].split(), "--output"]
    single, double = tmp_path / "one", tmp_path / "two"
    finish(start([*flags, str(single)], command=name, devices=2))
    printed = finish(*start_two([*flags, str(double)], command=name, devices=1))
    assert study(double) == study(single)
    assert printed[1][0] == "" and printed[0][0]
    if name == "benchmark":
        # Resume as if the run had been killed: both processes must skip the same rows, and only the first one writes.
        rows = (double / "rows.jsonl").read_text().splitlines(keepends=True)
        (double / "rows.jsonl").write_text("".join(rows[:-3]))
        finish(*start_two([*flags, str(double)], command=name, devices=1))
        assert study(double) == study(single)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ((None, 2, 0), "--coordinator is missing"),
        (("localhost:1", 2, None), "--process-id is missing"),
        (("localhost:1", 2, 2), "--process-id is 2: expected one from 0 to 1"),
    ],
)
def test_numbers_that_make_no_run_are_named(settings, expected):
    with pytest.raises(MarsError, match=expected):
        hosts.connect(*settings)


FIRST = ["--target", "tiny/target", "--mesh", "data=2", "--num-processes", "2", "--process-id", "0"]
FIRST += ["--coordinator"]


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp6"), reason="needs Linux's table of sockets")
def test_the_first_process_listens_where_it_was_told_and_nowhere_else():
    port = free_port()
    process = start([*FIRST, f"127.0.0.1:{port}", "hello"])
    try:
        addresses: set[str] = set()
        while not addresses and process.poll() is None:
            for table in ("/proc/net/tcp", "/proc/net/tcp6"):
                sockets = [line.split() for line in Path(table).read_text().splitlines()[1:]]
                local = [fields[1].split(":") for fields in sockets if fields[3] == "0A"]  # listening sockets
                addresses |= {address for address, number in local if int(number, 16) == port}
            time.sleep(0.05)
        assert addresses in ({"0100007F"}, {"0000000000000000FFFF00000100007F"})
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_an_address_of_another_machine_is_refused_by_the_first_process():
    _, err = start([*FIRST, "192.0.2.1:4567", "hello"]).communicate(timeout=60)
    problem = "--coordinator is 192.0.2.1:4567, but this machine cannot listen on it"
    assert err.startswith(f"error: {problem}: use an address of process 0's")


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    """Train a head. Only the first process writes checkpoints and logs."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cat. The cat sat on a mat and saw a dog. " * 70)

    def flags(output, work):
        sizes = "--tokens 2048 --step-tokens 256 --length 64 --steps-ahead 2 --learning-rate 1e-2"
        where = f"--mesh data=2,model=4 --data {text} --output {tmp_path / output} --work {tmp_path / work}"
        return f"eagle3 --target tiny/draft --dtype float32 {where} {sizes}".split()

    def losses(work):
        lines = (tmp_path / work / "log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def head(output):
        return hub.load_eagle(str(tmp_path / output), target.config, target.params)[1]

    finish(start(flags("one", "one-work"), command="distill", devices=8))
    finish(*start_two(flags("two", "two-work"), command="distill"))
    # This run resumes from the last checkpoint, so the head is identical.
    finish(*start_two(flags("again", "two-work"), command="distill"))
    assert len(losses("one-work")) == len(losses("two-work")) == 8
    np.testing.assert_allclose(losses("two-work"), losses("one-work"), rtol=2e-3)
    target = hub.load("tiny/draft")
    single, double, resumed = head("one"), head("two"), head("again")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-2), single, double)
    jax.tree.map(np.testing.assert_array_equal, double, resumed)

"""Tests of the provenance of a report. Oracles: git, and digests of hashlib."""

import datetime
import hashlib
import subprocess
import sys

import numpy as np
import pytest

from mars_jax.lab import provenance
from mars_jax.serve.rows import fingerprint
from scripts import common


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Use a temporary repository with one commit in place of this one."""

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "bench.py").write_text("pass\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    provenance._code.cache_clear()
    yield tmp_path, git
    provenance._code.cache_clear()


def test_a_report_names_its_commit_script_command_and_weights(checkout, monkeypatch):
    root, git = checkout
    argv = [str(root / "scripts" / "bench.py"), "--data", "/data/eval", "--turns", "3"]
    monkeypatch.setattr(sys, "argv", argv)
    params = {"w": np.ones((2, 3))}
    data = root / "eval"
    data.mkdir()
    (data / "a.txt").write_text("one\n")
    report = common.provenance("numpy", data=[data, data / "a.txt"], target=params)
    (data / "a.txt").write_text("two\n")
    edited = common.provenance(data=[data, data / "a.txt"])["data"]
    assert report["data"].keys() == edited.keys() == {"eval", "a.txt"}
    assert all(report["data"][name] != edited[name] for name in edited)
    assert git("rev-parse", "HEAD").startswith(report["commit"]) and report["dirty"] is False
    assert report["command"] == "python -m scripts.bench --data eval --turns 3"
    assert report["script"] == {"scripts/bench.py": hashlib.sha256(b"pass\n").hexdigest()[:12]}
    assert report["weights"] == {"target": fingerprint(params)} and report["numpy"] == np.__version__
    assert report["cores"] == len(report["affinity"]) and report["processor"]
    minutes = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(report["date"])
    assert minutes < datetime.timedelta(minutes=2)
    assert str(root) not in str(report)


@pytest.mark.parametrize(("name", "dirty"), [("report.json", False), ("scripts/new.py", True)])
def test_a_checkout_is_dirty_by_its_code_and_not_by_its_reports(checkout, name, dirty):
    root, _ = checkout
    (root / name).write_text("1\n")
    assert provenance.stamp()["dirty"] is dirty


def test_a_package_below_another_repository_has_no_commit(checkout, monkeypatch):
    root, _ = checkout
    monkeypatch.setattr(provenance, "ROOT", root / "scripts")
    assert provenance.stamp()["commit"] is None

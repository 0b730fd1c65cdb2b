"""Thresholds that were calibrated: the files that `mars-jax calibrate` writes and that every command takes as --theta.

Nothing here imports jax.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax import specs
from mars_jax.cli.rule_flags import is_number
from mars_jax.core.errors import MarsError
from mars_jax.core.home import check_path
from mars_jax.core.limits import JSON_BYTES
from mars_jax.core.reading import read_text
from mars_jax.specs import Given, RuleChoice, choose

FORMAT = "mars-jax theta 3"
SETTINGS = ("target", "draft", "num_draft_tokens", "tree", "temperature")
"""Settings that a threshold was calibrated for besides its rule: elsewhere its promise does not hold."""


class ThetaFile(NamedTuple):
    """A threshold from a file, and what it is for."""

    path: str
    theta: float
    spec: str  # of the rule
    rule: dict[str, Any]  # all settings of the rule but theta
    settings: dict[str, Any]  # by `SETTINGS`
    weights: dict[str, str]  # as of `fingerprints`

    @property
    def choice(self) -> RuleChoice:
        """The rule with its threshold."""
        return RuleChoice(self.spec, {**self.rule, "theta": self.theta})

    def check(self, run: Mapping[str, Any]) -> None:
        """Raise MarsError where a run has other settings; those that `run` leaves out do not count.

        Models are told by the last part of their path, since a checkpoint may be elsewhere on another machine, and
        once they are loaded by their weights: see `check_weights`.
        """
        for name in SETTINGS:
            if name in run:
                theirs, ours = self.settings[name], run[name]
                if name in ("target", "draft"):
                    theirs, ours = _last(theirs), _last(ours)
                self._compare(name, plain(theirs), plain(ours), self.settings[name], run[name])

    def check_rule(self, rule: RuleChoice) -> None:
        """Raise MarsError where the rule of a run, apart from theta, is another one."""
        self._compare("rule", _last(self.spec), _last(rule.spec), self.spec, rule.spec)
        self.check_settings(rule.settled())

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise MarsError where settings of the rule differ from those in the file; theta is not among them."""
        for name, value in settings.items():
            if name != "theta":
                self._compare(name, self.rule.get(name), value, self.rule.get(name), value)

    def check_weights(self, target: Any, drafter: Any, rule: Any) -> None:
        """Raise MarsError where the weights of a run are not those of the calibration; see `fingerprints`."""
        found = fingerprints(target, drafter, rule)
        for name in self.weights | found:
            if self.weights.get(name) != found.get(name):
                raise MarsError(
                    f"'{self.path}' was calibrated with other weights of the {name}, or in another --dtype: calibrate "
                    "for these with mars-jax calibrate, or give a number."
                )

    def _compare(self, name: str, theirs: Any, ours: Any, shown_theirs: Any, shown_ours: Any) -> None:
        if theirs != ours:
            raise MarsError(
                f"'{self.path}' was calibrated for the {name.replace('_', ' ')} {_word(shown_theirs)}, and this run "
                f"has {_word(shown_ours)}: calibrate for it with mars-jax calibrate, or give a number."
            )


def rule_of_file(spec: str | None, given: Mapping[str, Given]) -> tuple[RuleChoice, ThetaFile]:
    """The file that theta names, and the rule in it with its threshold: what `--theta FILE` calls.

    Args:
      spec: of the rule, where one is named.
      given: its settings, from `given_settings`.

    Raises:
      MarsError: as `file_of`; a rule or settings that are not those in the file.
    """
    file = file_of(given["theta"])
    if spec is not None:
        file.check_rule(RuleChoice(spec, file.rule))
    elif specs.is_own(file.spec):
        raise MarsError(
            f"'{file.path}' is for the rule {file.spec}: name it as --verify too, since that runs its code."
        )
    spec = spec or file.spec
    file.check_settings(choose(spec, {k: v for k, v in given.items() if k != "theta"}).settings)
    return RuleChoice(spec, file.rule).but(theta=file.theta), file


def file_of(given: Given) -> ThetaFile:
    """The file that a threshold names.

    Raises:
      MarsError: as `read_theta`, or there is no such file.
    """
    check_path(given.text, given.shown)
    if not Path(given.text).exists():
        raise MarsError(
            f"{given.shown} is {given.text}: expected a number above 0 (inf is strict), or a file that "
            "mars-jax calibrate wrote."
        )
    return read_theta(given.text)


def fingerprints(target: Any, drafter: Any, rule: Any) -> dict[str, str]:
    """A name for the weights of each that has any. Where there are several processes, all call it.

    Args:
      target: a `Pretrained`.
      drafter: a `LoadedDrafter`.
      rule: a `LoadedRule`.
    """
    from jax.tree import leaves

    from mars_jax.serve.fingerprint import fingerprint

    found = {"target": fingerprint(target.params, target.path), "draft": fingerprint(drafter.params)}
    return found | ({"rule": fingerprint(rule.params)} if leaves(rule.params) else {})


def thetas_of(
    rule: RuleChoice, texts: list[str], run: Mapping[str, Any]
) -> tuple[list[float], list[ThetaFile]]:
    """Thresholds of --thetas, each a number or a file for this rule and run; and the files.

    Raises:
      MarsError: a rule without a threshold, a value out of range, a file for something else.
    """
    if "theta" not in rule.options:
        raise MarsError(f"--thetas does not apply to {specs.not_in(rule, 'theta')}.")
    setting, structure = rule.setting("theta")
    values, files = [], []
    for text in texts:
        if is_number(text):
            values.append(setting.from_text(text, shown="--thetas", **structure))
            continue
        file = file_of(Given(text, "--thetas"))
        file.check(run)
        file.check_rule(rule)
        values.append(file.theta)
        files.append(file)
    return values, files


def read_theta(path: str) -> ThetaFile:
    """Read what `mars-jax calibrate` wrote. A rule of the user's own is not looked at, let alone run.

    Raises:
      MarsError: the file cannot be read, or is something else.
    """
    try:
        data = json.loads(read_text(path, JSON_BYTES))
        if data["format"] != FORMAT:
            raise ValueError
        theta = float(data["theta"])
        settings = {name: data["settings"][name] for name in SETTINGS}
        weights = {name: str(data["weights"][name]) for name in {"target", "draft", *data["weights"]}}
        spec, rule = data["rule"]["verify"], dict(data["rule"]["settings"])
        rule = {name: float(v) if v in ("inf", "-inf") else v for name, v in rule.items()}
        rule["theta"] = theta
        if math.isnan(theta):
            raise ValueError
        if not specs.is_own(spec):
            # A setting that the file is older than had its default.
            rule = RuleChoice(spec, rule).settled()
        del rule["theta"]
    except OSError as error:
        raise MarsError(
            f"'{path}' cannot be read ({error.strerror}): name a file of mars_jax.calibrate."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MarsError(
            f"'{path}' holds no threshold of this version: give a number, or a file that mars-jax calibrate wrote."
        ) from None
    return ThetaFile(path, theta, spec, rule, settings, weights)


def settings_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The settings of a run by its flags, those that it leaves to the file left out."""
    flags = {name: getattr(args, name) for name in ("target", "draft", "num_draft_tokens", "tree")}
    return {name: plain(value) for name, value in (flags | more).items()}


def _last(name: Any) -> Any:
    """The last part of a path."""
    return str(name).rpartition("/")[2] or name


def plain(value: Any) -> Any:
    """A setting as JSON gives it back. A dynamic tree is told from a static one by its name."""
    if isinstance(value, specs.Dynamic):
        return {"dynamic": [value.top_k, value.depth, value.nodes]}
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(plain(value))

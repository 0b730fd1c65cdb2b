"""Files of calibrated thresholds. `mars-jax calibrate` writes them, and every command accepts them in --theta."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mars_jax.cli.rule_flags import is_number
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.utils.errors import MarsError
from mars_jax.utils.limits import JSON_BYTES
from mars_jax.utils.paths import check_path, read_text
from mars_jax.utils.types import JsonObject
from mars_jax.verify import Given, RuleChoice, choose, is_own, not_in

if TYPE_CHECKING:
    from mars_jax.core.rule import LoadedRule
    from mars_jax.drafters import LoadedDrafter
    from mars_jax.hub.pretrained import Pretrained

FORMAT = "mars-jax theta 3"
SETTINGS = ("target", "draft", "num_draft_tokens", "tree", "temperature")
"""Settings, other than the rule, for which a threshold is calibrated. Its guarantee holds only for these settings."""


class ThetaFile(NamedTuple):
    """A threshold from a file, with the rule, models and settings it was calibrated for."""

    path: str
    theta: float
    spec: str  # spec of the rule
    rule: JsonObject  # all settings of the rule except theta
    settings: JsonObject  # keyed by `SETTINGS`
    weights: dict[str, str]  # from `pair_fingerprints`

    def check(self, run: Mapping[str, object]) -> None:
        """Raise MarsError if the settings of a run differ from those of the calibration.

        Settings that are missing from `run` are not compared.
        Models are compared by the last part of their path, since a checkpoint may have a different path on another
        machine. After loading, `check_weights` compares their weights.
        """
        for name in SETTINGS:
            compared_part = _last if name in ("target", "draft") else json_restored
            if name in run and compared_part(self.settings[name]) != compared_part(run[name]):
                raise self._refusal(name, self.settings[name], json_restored(run[name]))

    def check_rule(self, rule: RuleChoice) -> None:
        """Raise MarsError if a run's rule differs from that of the calibration. Only its theta may differ."""
        if _last(self.spec) != _last(rule.spec):
            raise self._refusal("rule", self.spec, rule.spec)
        self.check_settings(rule.settled())

    def check_settings(self, settings: Mapping[str, object]) -> None:
        """Raise MarsError if settings of the rule, apart from theta, differ from those in the file."""
        for name, value in settings.items():
            if name != "theta" and self.rule.get(name) != value:
                raise self._refusal(name, self.rule.get(name), value)

    def check_weights(self, target: Pretrained, drafter: LoadedDrafter, rule: LoadedRule) -> None:
        """Raise MarsError if a run's weights differ from those of the calibration; see `pair_fingerprints`."""
        run_fingerprints = pair_fingerprints(target, drafter, rule)
        # A component, such as a rule with a trained head, may have weights only in the file or only in this run.
        for name in self.weights | run_fingerprints:
            if self.weights.get(name) != run_fingerprints.get(name):
                raise MarsError(
                    f"'{self.path}' was calibrated with other weights of the {name}, or in another --dtype: calibrate "
                    "for these with mars-jax calibrate, or give a number."
                )

    def _refusal(self, name: str, calibrated: object, current: object) -> MarsError:
        return MarsError(
            f"'{self.path}' was calibrated for the {name.replace('_', ' ')} {_word(calibrated)}, and this run "
            f"has {_word(current)}: calibrate for it with mars-jax calibrate, or give a number."
        )


def rule_of_file(spec: str | None, given: Mapping[str, Given]) -> tuple[RuleChoice, ThetaFile]:
    """Return the rule of a threshold file, with its calibrated theta, and the parsed file. Used for `--theta FILE`.

    Args:
      spec: spec of the rule that the user named, or None to use the rule of the file.
      given: the rule settings that the user gave, from `given_settings`.

    Raises:
      MarsError: the rule or its settings differ from those in the file; see also `file_of`.
    """
    theta_file = file_of(given["theta"])
    if spec is not None:
        theta_file.check_rule(RuleChoice(spec, theta_file.rule))
    elif is_own(theta_file.spec):
        raise MarsError(
            f"'{theta_file.path}' is for the rule {theta_file.spec}: name it as --verify too, since that runs its code."
        )
    else:
        spec = theta_file.spec
    # Flags may repeat settings from the file but must not contradict them.
    theta_file.check_settings(choose(spec, {k: v for k, v in given.items() if k != "theta"}).settings)
    return RuleChoice(spec, theta_file.rule).but(theta=theta_file.theta), theta_file


def file_of(given: Given) -> ThetaFile:
    """Read the threshold file that a user named in place of a number.

    Raises:
      MarsError: the file does not exist; see also `read_theta`.
    """
    check_path(given.text, given.shown)
    if not Path(given.text).exists():
        raise MarsError(
            f"{given.shown} is {given.text}: expected a number above 0 (inf is strict), or a file that "
            "mars-jax calibrate wrote."
        )
    return read_theta(given.text)


def pair_fingerprints(target: Pretrained, drafter: LoadedDrafter, rule: LoadedRule) -> dict[str, str]:
    """Return fingerprints of the weights of the target, the draft and, if it has weights, the rule.

    In a run with several processes, all of them must call this function.
    """
    from jax.tree import leaves

    from mars_jax.serve.rows import fingerprint

    fingerprints = {"target": fingerprint(target.params, target.path), "draft": fingerprint(drafter.params)}
    if leaves(rule.params):
        fingerprints["rule"] = fingerprint(rule.params)
    return fingerprints


def thetas_of(
    rule: RuleChoice, texts: list[str], run: Mapping[str, object]
) -> tuple[list[float], list[ThetaFile]]:
    """Return the thresholds in --thetas, and the threshold files among its arguments.

    Each argument is a number, or a file with a threshold that was calibrated for this rule and this run.

    Raises:
      MarsError: the rule has no threshold, a value is out of range, or a file is for a different rule or run.
    """
    if "theta" not in rule.options:
        raise MarsError(f"--thetas does not apply to {not_in(rule, 'theta')}.")
    setting, structure = rule.setting("theta")
    thetas, theta_files = [], []
    for text in texts:
        if is_number(text):
            thetas.append(setting.from_text(text, shown="--thetas", **structure))
            continue
        file = file_of(Given(text, "--thetas"))
        file.check(run)
        file.check_rule(rule)
        thetas.append(file.theta)
        theta_files.append(file)
    return thetas, theta_files


def read_theta(path: str) -> ThetaFile:
    """Read a file that `mars-jax calibrate` wrote, without importing or running a user's rule.

    Raises:
      MarsError: the file cannot be read or is not a threshold file.
    """
    try:
        report = json.loads(read_text(path, JSON_BYTES))
        if report["format"] != FORMAT:
            raise ValueError
        theta = float(report["theta"])
        settings = {name: report["settings"][name] for name in SETTINGS}
        digests = {name: str(report["weights"][name]) for name in {"target", "draft", *report["weights"]}}
        spec, options = report["rule"]["verify"], dict(report["rule"]["settings"])
        # JSON has no infinities, so the file stores them as strings.
        options |= {name: float(value) for name, value in options.items() if value in ("inf", "-inf")}
        options["theta"] = theta
        if math.isnan(theta):
            raise ValueError
        # Checking the settings of a user's rule runs the user's code, so do not check them here. `check_rule` checks
        # them later, if the user names the rule on the command line.
        if not is_own(spec):
            # Settings that were added after the file was written get their defaults.
            options = RuleChoice(spec, options).settled()
        del options["theta"]
    except OSError as error:
        raise MarsError(
            f"'{path}' cannot be read ({error.strerror}): name a file that mars-jax calibrate wrote."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MarsError(
            f"'{path}' holds no threshold of this version: give a number, or a file that mars-jax calibrate wrote."
        ) from None
    return ThetaFile(path, theta, spec, options, settings, digests)


def run_settings(args: argparse.Namespace, temperature: float | None = None) -> JsonObject:
    """Return the settings of a run from its flags, with `temperature` if the run has only one."""
    settings = {name: json_restored(getattr(args, name)) for name in SETTINGS if name != "temperature"}
    if temperature is not None:
        settings["temperature"] = temperature
    return settings


def _last(name: object) -> object:
    """Return the last part of a path."""
    return str(name).rpartition("/")[2] or name


def json_restored(value: object) -> object:
    """Return a setting as it would be read back from JSON: a dynamic tree as a dict, and a tuple as a list."""
    if isinstance(value, Dynamic):
        return {"dynamic": [value.top_k, value.depth, value.nodes]}
    return list(value) if isinstance(value, tuple) else value


def _word(value: object) -> str:
    if value is None:
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)

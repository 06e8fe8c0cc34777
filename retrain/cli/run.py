"""`retrain [FILE.toml] [--overwrite] [--quiet] [--skip-parity] [flags]`: a training, a campaign or
a squeeze job.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.cli.parameters import given_path
from retrain.cli.shared import load_dotenv
from retrain.errors import ConfigurationError, RetrainError
from retrain.install import install_hint

if TYPE_CHECKING:
    from retrain.config.overrides import Overrides
    from retrain.config.schema import Squeeze, TrainConfig
    from retrain.records.run_folder import RunFolder
    from retrain.squeeze.job import SqueezeResult

_SWITCHES = {"--overwrite": False, "--quiet": False, "--verbose": False, "--skip-parity": False}
"""Flags that are not keys of the schema, in the order of RunArguments; none takes a value."""


@dataclass(frozen=True)
class RunArguments:
    path: Path | None
    """The configuration file; None means ./retrain.toml."""
    overrides: "Overrides"
    overwrite: bool
    quiet: bool
    verbose: bool
    skip_parity: bool


def run_file(arguments: Sequence[str]) -> int:
    parsed = parse_arguments(arguments)
    loaded = "Loaded .env" if load_dotenv() else ""
    from retrain.config import load_config
    from retrain.records.run_folder import RunFolder, kind_of

    try:
        if parsed.path and kind_of(parsed.path) == "run":
            raise ConfigurationError(
                f"{parsed.path} is a run's folder, not a configuration file; continue it with"
                f" `{RunFolder(parsed.path).resume_command}`."
            )
        # A typo shows before seconds of imports.
        config, note = continued(parsed.path, parsed.overrides) or (
            load_config(parsed.path, parsed.overrides),
            "",
        )
        _refuse_two_intents(parsed, config)
    except RetrainError:
        # A variable of .env may be the mistake.
        if loaded and not parsed.quiet:
            print(loaded, flush=True)
        raise
    said = [line for line in (loaded, note) if line]
    if config.kind != "run" and said and not parsed.quiet:
        print("\n".join(said), flush=True)
    if config.kind == "squeeze":
        from retrain.records.terminal import clean
        from retrain.squeeze import run_squeeze

        squeezed = run_squeeze(config, overwrite=parsed.overwrite, quiet=parsed.quiet)
        line = _draw_squeeze(config.squeeze, Path(config.logging.log_dir).parent, squeezed)
        if not parsed.quiet:
            print(clean(line))
    elif config.kind == "campaign":
        if parsed.overwrite:
            raise ConfigurationError(
                "--overwrite is for a single run, not for a campaign; name another --log-dir,"
                " or delete the old folder yourself."
            )
        if parsed.skip_parity:
            raise ConfigurationError(
                "--skip-parity is for a single run, since a comparison needs runs that passed"
                " the parity gate; leave it out."
            )
        from retrain.campaign import run_campaign

        run_campaign(config, quiet=parsed.quiet)
    else:
        from retrain.run.loop import train
        from retrain.tracking.base import Verbosity
        from retrain.types import LogLine

        train(
            config,
            overwrite=parsed.overwrite,
            quiet=parsed.quiet,
            verbosity=Verbosity.VERBOSE if parsed.verbose else Verbosity.NORMAL,
            skip_parity=parsed.skip_parity,
            said=[LogLine(line) if line is loaded else line for line in said],
        )
    return 0


def continued(path: object, overrides: "Overrides") -> "tuple[TrainConfig, str] | None":
    """Return the configuration that `retrain --resume RUN_DIR` continues with, and a line that
    names its file. Return None for any other command line, such as a command line with a file,
    `path`.

    The configuration is the run's own config.toml. A ./retrain.toml that describes the same run
    goes first, since it has the newer values of the keys that a resume may change.
    """
    from retrain.config import load_config
    from retrain.config.load import DEFAULT_FILE
    from retrain.records.run_folder import RunFolder, kind_of

    named = [
        given_path(str(given.value), given.origin)
        for given in overrides.given
        if given.path == "resume.from"
    ]
    if "" in named:
        raise ConfigurationError(
            "--resume names no folder; name the folder of a run, or leave out --resume and"
            " [resume] from."
        )
    if path or not named:
        return None
    folder, beside = RunFolder(Path(named[0])), Path(DEFAULT_FILE)
    kind = kind_of(folder.path)
    if kind != "run" or not folder.config.is_file():
        if not beside.exists():
            _refuse_unreadable(folder, kind)
        return None
    own = load_config(folder.config, overrides)
    if not beside.exists():
        return own, f"Read {folder.config}."
    try:
        newer = load_config(beside, overrides)
    except ConfigurationError as error:
        return own, f"Read {folder.config}, and not {beside}: {error.problems[0]}"
    fixed, changed = _differences(own, newer)
    if fixed:
        return own, f"Read {folder.config}, and not {beside}, which describes another run: {fixed}."
    changes = changed and f", with changes: {changed}"
    return newer, f"Read {beside}, which describes this run{changes}."


def _refuse_unreadable(folder: "RunFolder", kind: str) -> None:
    """Raise ConfigurationError for a folder that resumes only with a configuration file."""
    path = folder.path
    if kind in ("run", "campaign"):
        what = "a campaign" if kind == "campaign" else f"no {folder.config.name} yet"
        raise ConfigurationError(
            f"{path} holds {what}. To continue, name the file that the {kind} began with:"
            f" `retrain FILE --resume {path}`."
        )
    if not path.exists():
        raise ConfigurationError(f"--resume {path} does not exist; name the folder of a run.")
    folder.refuse_run(resuming=True)


def _differences(own: "TrainConfig", newer: "TrainConfig") -> tuple[str, str]:
    """Name the values of `newer` that differ from the configuration of a run: first the values that
    the run cannot change, then the others.
    """
    from retrain.config import config_from_toml, dump_toml, replaced
    from retrain.config.stored import differing_keys, shown_value
    from retrain.records.redact import Redactor

    # The run drew its own seed because of the -1.
    if newer.training.seed == -1:
        newer = replaced(newer, {"training.seed": own.training.seed})
    # Both as config.toml has them, with secrets masked and through TOML.
    own, newer = (config_from_toml(dump_toml(Redactor().config(config))) for config in (own, newer))
    words: dict[bool, list[str]] = {False: [], True: []}
    for key in differing_keys(own, newer):
        if key.path != "logging.log_dir":
            value, before = shown_value(newer, key.path), shown_value(own, key.path)
            words[key.traits.may_change_at_resume].append(
                f"[{key.section}] {key.name} = {value} (was {before})"
            )
    return ", ".join(words[False][:3]), ", ".join(words[True])


def _refuse_two_intents(parsed: RunArguments, config: "TrainConfig") -> None:
    """Raise ConfigurationError for a command line that both continues a run and starts one."""
    resumed = config.resume.from_
    if not resumed:
        return
    if parsed.overwrite:
        raise ConfigurationError(
            f"--overwrite starts over, and [resume] from = {resumed!r} continues a run; leave"
            " one out."
        )
    given = config.logging.log_dir
    if (
        config.origins["logging.log_dir"].startswith("flag")
        and Path(given).resolve() != Path(resumed).resolve()
    ):
        raise ConfigurationError(
            f"--log-dir {given} is not the folder of [resume] from = {resumed!r}; leave"
            " --log-dir out, or copy the folder and resume the copy."
        )


def _draw_squeeze(settings: "Squeeze", runs: Path, squeezed: "SqueezeResult") -> str:
    """Draw the variance curve, and return a line that says where it is, or why there is none.

    The picture is in the folder of the squeezed adapter. For an adapter that the job only analyzes,
    it is in the folder of the `runs`, under the name of the adapter.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return f"The variance curve needs matplotlib; {install_hint('report')}."
    from retrain.report.data import SqueezeCurve
    from retrain.report.figures import write_squeeze_picture
    from retrain.tracking.build import SQUEEZE_RUN

    if settings.output_path:
        picture = Path(settings.output_path) / "squeeze.png"
    else:
        adapter = Path(settings.adapter_path).resolve()
        # Three parts of the path, since most adapters are some run's checkpoints/final.
        picture = runs / SQUEEZE_RUN / f"{'-'.join(adapter.parts[1:][-3:])}.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        write_squeeze_picture(SqueezeCurve.model_validate(squeezed.to_json(), strict=True), picture)
    except OSError as error:
        return (
            f"retrain did not draw the variance curve: {picture} is not writable"
            f" ({error.strerror or error})."
        )
    return f"Picture: {picture}"


def parse_arguments(arguments: Sequence[str]) -> RunArguments:
    """Split a command line into file, switches and flags. Raises ConfigurationError for a second
    file and for all unknown flags.
    """
    from retrain.config.overrides import parse_overrides

    overrides = parse_overrides(arguments, _SWITCHES)
    switches = [argument for argument in overrides.rest if argument.startswith("--")]
    files = [argument for argument in overrides.rest if argument not in switches]
    for switch in switches:
        if switch not in _SWITCHES:
            name, _, value = switch.partition("=")
            raise ConfigurationError(f"{name} takes no value; leave {value!r} out.")
    if {"--quiet", "--verbose"}.issubset(switches):
        raise ConfigurationError("--quiet and --verbose contradict each other; give one.")
    for name in files:
        if name.startswith("-"):
            raise ConfigurationError(
                f"{name} is not a flag; flags have two dashes, as --quiet has."
            )
    if len(files) > 1:
        raise ConfigurationError(
            f"retrain runs one file at a time, and got {' and '.join(files)}; a value needs its"
            " flag before it, and a switch takes true or false alone."
        )
    path = Path(given_path(files[0], "FILE")) if files else None
    return RunArguments(path, overrides, *(name in switches for name in _SWITCHES))

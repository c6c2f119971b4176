"""The options of `memmix convert` and `memmix plan` that say which layer gets which mixer, with which options."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.commands.checks import choice_of_layers, library
from hf_memmix.commands.common import KeepCount, KeepLayers
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import DEFAULT_MIXER


class LayerOptions:
    """The options."""

    mixer: Annotated[
        str | None,
        typer.Option(help="Mixer that replaces the attention; a wrong name lists all.", show_default=DEFAULT_MIXER),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option(
            help='Layers of several mixers, e.g. "ska=3,7 attention=0 mamba2=rest", or "echo", the layout of Echo.'
        ),
    ] = None
    keep_layers: KeepLayers = None
    keep_count: KeepCount = None
    keep_without_rope: Annotated[
        str | None,
        typer.Option(help='Kept layers that lose their rotary embeddings: "all" or, by index, "0-3,8".'),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the mixer, e.g. window=384 or gka.local_window=64; repeatable."),
    ] = None


@dataclass(frozen=True)
class LayerChoices:
    """What a user has chosen, before the number of layers is known.

    Args:
        given: the values of `LayerOptions`.
        plan: a plan of `memmix select`, or None.
        kept: the `LayerChoice` of the --keep options, or None.
        plain, mixers: the options, without and with the name of their mixer.
    """

    given: SimpleNamespace
    plan: Path | None
    kept: object
    plain: dict
    mixers: dict[str, dict]

    @classmethod
    def of(cls, args: SimpleNamespace, plan: Path | None = None) -> "LayerChoices":
        """The choices of a command. Raises UserError if two of them contradict each other, or one is unknown."""
        from hf_memmix.mixer_names import check_mixer_name

        kept = choice_of_layers(args.keep_layers, args.keep_count)
        _refuse_two_choices(args.mixer, args.layers, plan, kept)
        if args.mixer is not None:
            check_mixer_name(args.mixer)
        return cls(args, plan, kept, *_parse_options(args.option or []))

    def arguments(self, num_layers: int, default: str = DEFAULT_MIXER) -> tuple[dict, dict[str, dict], Path | None]:
        """What `convert_model` gets for a model of `num_layers` layers.

        default: the mixer, where no option names one.

        Returns:
            its arguments; the user's options by mixer, which are its argument `mixers` unless others come with them;
            and the folder of the aligned mixers of the plan, or None.
        """
        given = self.given
        arguments, aligned = _choice(given.mixer, given.layers, self.kept, self.plan, num_layers, default)
        if given.keep_without_rope is not None:
            arguments["keep_without_rope"] = _without_rope(given.keep_without_rope, arguments, num_layers)
        return arguments, _options_of_user(arguments, self.plain, self.mixers), aligned


def _refuse_two_choices(mixer: str | None, layers: str | None, plan: Path | None, kept) -> None:
    """Raise ValueError if two options choose the mixers of the layers. `kept`: the choice of the --keep options."""
    if plan is not None and kept is not None:
        raise UserError(f"{kept.written}, but --plan also chooses the layers that stay attention; give one of them")
    if layers is not None and kept is not None:
        raise UserError(f'{kept.written}, but --layers also says which layers stay attention: write "attention=..."')
    if layers is not None and (mixer is not None or plan is not None):
        other = "--mixer" if plan is None else "--plan"
        raise UserError(f"--layers is {layers!r}, but {other} also chooses the mixers; give one of them")


def _choice(mixer: str | None, layers: str | None, chosen, plan: Path | None, num_layers: int, default: str) -> tuple:
    """What `convert_model` gets for the layers, and the folder of the aligned mixers of a plan or None."""
    from hf_memmix.conversion.layer_choice import layers_to_keep
    from hf_memmix.conversion.layer_plan import plan_arguments, read_plan, trained_folder
    from hf_memmix.conversion.mixer_layout import mixer_types_of

    if plan is not None:
        planned = read_plan(plan, num_layers)
        arguments = plan_arguments(planned)
        if mixer not in (None, arguments.get("mixer")):
            raise UserError(f"--mixer is {mixer!r}, but --plan also chooses the mixers; give one of them")
        return arguments, trained_folder(planned, plan)
    if layers is not None:
        return {"layers": mixer_types_of(layers, num_layers, "--layers")}, None
    keep = "none" if chosen is None else chosen
    layers_to_keep(keep, num_layers)
    return {"mixer": default if mixer is None else mixer, "keep": keep}, None


def _without_rope(choice: str, arguments: dict, num_layers: int) -> list[int]:
    """The layers of --keep-without-rope. `arguments`: what `convert_model` gets for the layers."""
    from hf_memmix.conversion.layer_choice import layers_to_keep, layers_without_rope
    from hf_memmix.mixer_names import ATTENTION

    if "layers" in arguments:
        kept = [layer for layer, kind in enumerate(arguments["layers"]) if kind == ATTENTION]
    else:
        kept = layers_to_keep(arguments["keep"], num_layers)
    return layers_without_rope(choice, kept, num_layers, "--keep-without-rope")


def _options_of_user(arguments: dict, plain: dict, mixers: dict[str, dict]) -> dict[str, dict]:
    """The user's options by mixer, each of which is checked: this needs torch and the mixers, not the whole library.

    Args:
        arguments: what `convert_model` gets for the layers.
        plain, mixers: the options, without and with the name of their mixer.

    Raises:
        UserError: no layer reads an option, it is given twice, it is unknown, or its value is out of its bounds.
    """
    from hf_memmix.conversion.mixer_layout import WINDOW, options_by_mixer
    from hf_memmix.mixer_names import ATTENTION

    if not (plain or mixers):
        return {}
    used = [kind for kind in dict.fromkeys(arguments.get("layers") or [arguments["mixer"]]) if kind != ATTENTION]
    for kind in used if len(used) == 1 else ():
        if twice := sorted(plain.keys() & mixers.get(kind, {}).keys()):
            raise UserError(f"--option gives {twice[0]} and {kind}.{twice[0]}, which are the same; give one of them")
    # a plan or a trained student may say that there are windows beside memories
    beside = {} if WINDOW in used else {kind: own for kind, own in mixers.items() if kind == WINDOW}
    options = options_by_mixer(used, {kind: own for kind, own in mixers.items() if kind not in beside}, plain) | beside
    with library(models=False):
        from hf_memmix.mixers import MIXERS

    for kind, own in options.items():
        try:
            MIXERS[kind].options_class.check_each(own)
        except UserError as error:
            raise UserError(f"mixers[{kind!r}]: {error}") from error
    return options


def _parse_options(pairs: list[str]) -> tuple[dict, dict[str, dict]]:
    """The options NAME=VALUE, and by mixer those of the form MIXER.NAME=VALUE."""
    import yaml

    from hf_memmix.conversion.yaml_text import read_yaml

    plain, mixers = {}, {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        mixer, dot, own = name.rpartition(".")
        if (
            not (sign and own)
            or (dot and not mixer)
            or name in ("teacher", "mixer", "mixers", "keep", "layers", "seed")
        ):
            raise UserError(f"--option {pair!r} is not NAME=VALUE with an option of the mixer")
        try:
            value = read_yaml(text)
        except yaml.YAMLError:
            raise UserError(
                f"--option {pair!r}: {text!r} is not a value; give e.g. 21, 0.02, true, null or [12,10]"
            ) from None
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML reads 1e-3 as text
        place = mixers.setdefault(mixer, {}) if mixer else plain
        if own in place:
            raise UserError(f"--option gives {name} twice, as {place[own]!r} and as {value!r}; give it once")
        place[own] = value
    return plain, mixers

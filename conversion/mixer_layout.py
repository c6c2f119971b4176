"""Which layer gets which mixer, as users write it: {"ska": [3, 7], "attention": [0], "mamba2": "rest"}.

Commands and plans write the same as a text, "ska=3,7 attention=0 mamba2=rest", as one name per layer, or as the name
of a preset. `mixer_types_of` turns all of them into one name per layer, the form of a model's `mixer_types`.
"""

from collections.abc import Callable, Mapping, Sequence

from hf_memmix.conversion.layer_choice import LayerChoice, layer_text
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import ATTENTION, mixer_names

REST = "rest"
WINDOW = "window"  # its options are those of the windows beside memories, too
EXAMPLE = '"ska=3,7 attention=0 mamba2=rest"'


def _echo(num_layers: int) -> list[str]:
    from hf_memmix.models.echo import echo_layers  # needs transformers

    return echo_layers(num_layers)


# layouts of published models by name: f(number of layers) -> one name per layer
PRESETS: dict[str, Callable[[int], list[str]]] = {"echo": _echo}

Layers = Mapping[str, object] | Sequence[str] | str


def mixer_types_of(layers: Layers, num_layers: int, name: str = "layers") -> list[str]:
    """One entry per layer, "attention" or the name of a mixer.

    Args:
        layers: layers by mixer, each as in `LayerChoice.of` or "rest", which stands for all layers that no other entry
            names; or the same as a text; or one name per layer; or a name in `PRESETS`.
        num_layers: number of layers of the model.
        name: name of the argument or option in error messages.

    Raises:
        ValueError: `layers` has another form, names an unknown mixer, a layer twice or a layer that does not exist,
            leaves a layer without a mixer, has "rest" twice, or leaves attention in all layers.
    """
    if isinstance(layers, str):
        text = layers.strip()
        layers = PRESETS[text](num_layers) if text in PRESETS else _parsed(text, name)
    if isinstance(layers, Mapping):
        types = _assigned(layers, num_layers, name)
    elif isinstance(layers, Sequence) and all(isinstance(kind, str) for kind in layers):
        types = list(layers)
        _check_names(types, name)
    else:
        raise UserError(f"{name} is {layers!r}; give layers by mixer, e.g. {EXAMPLE}, or one name per layer")
    if len(types) != num_layers:
        raise UserError(f"{name} has {len(types)} entries, but there are {num_layers} layers; give one name per layer")
    if set(types) == {ATTENTION}:
        raise UserError(f"{name} keeps attention in all {num_layers} layers, so nothing is left to convert")
    return types


def _parsed(text: str, name: str) -> dict[str, str]:
    """The mapping in a text such as "ska=3,7 attention=0 mamba2=rest"."""
    layers = {}
    for part in text.split():
        mixer, sign, chosen = part.partition("=")
        if not (mixer and sign and chosen):
            presets = ", ".join(PRESETS)
            raise UserError(f"{name} is {text!r}; give layers by mixer, e.g. {EXAMPLE}, or a preset: {presets}")
        if mixer in layers:
            raise UserError(f"{name} is {text!r}, which names {mixer} twice; write all its layers in one list")
        layers[mixer] = chosen
    if not layers:
        raise UserError(f"{name} is empty; give layers by mixer, e.g. {EXAMPLE}")
    return layers


def _assigned(layers: Mapping[str, object], num_layers: int, name: str) -> list[str]:
    _check_names(layers, name)
    rest = [mixer for mixer, chosen in layers.items() if isinstance(chosen, str) and chosen.strip() == REST]
    if len(rest) > 1:
        raise UserError(f'{name} gives "{REST}" to {" and to ".join(rest)}; give it to one of them')
    types: list[str | None] = [None] * num_layers
    for mixer, chosen in layers.items():
        if mixer in rest:
            continue
        for layer in _choice(chosen, f"{name} of {mixer}").layers(num_layers):
            if types[layer] is not None:
                raise UserError(f"{name} gives layer {layer} to {types[layer]} and to {mixer}; give it to one of them")
            types[layer] = mixer
    if not rest and None in types:
        left = layer_text([layer for layer, mixer in enumerate(types) if mixer is None])
        raise UserError(f'{name} leaves layers {left} without a mixer; name them, or give one mixer "{REST}"')
    return [mixer or rest[0] for mixer in types]


def _choice(chosen, name: str) -> LayerChoice:
    if chosen is None or isinstance(chosen, (bool, int, Mapping)):
        raise UserError(f'{name} is {chosen!r}; give a list of layer indices, a text such as "0-3,8", or "{REST}"')
    return LayerChoice.of(chosen, name)


def _check_names(names, name: str) -> None:
    known = [ATTENTION, *mixer_names()]
    if unknown := [mixer for mixer in names if mixer not in known]:
        raise UserError(f"{name} names {unknown[0]!r}, which is not a mixer; known: {', '.join(known)}")


def options_by_mixer(used: list[str], mixers: dict[str, dict] | None, plain: dict) -> dict[str, dict]:
    """The user's options of every mixer in `used`. Raises ValueError for options that no layer would read."""
    mixers = {} if mixers is None else mixers
    wrong = not isinstance(mixers, dict) or any(not isinstance(own, dict) for own in mixers.values())
    if wrong:
        raise UserError(f'mixers is {mixers!r}; give options by mixer, e.g. {{"gka": {{"solver_phases": [30]}}}}')
    beside = any({**mixers.get(kind, {}), **plain}.get("local_window") for kind in used)
    if unused := [name for name in mixers if name not in used and not (beside and name == WINDOW)]:
        raise UserError(f"mixers has options of {unused[0]!r}, but no layer uses it; used here: {', '.join(used)}")
    if WINDOW not in used and (size := mixers.get(WINDOW, {}).get("window")) is not None:
        raise UserError(
            f"mixers[{WINDOW!r}] has window={size!r}, but no layer is a window alone; the size of a window beside a"
            " memory is local_window, an option of the memory"
        )
    if plain and len(used) > 1:
        name = next(iter(plain))
        raise UserError(
            f"{name} is an option of one mixer, but the layers use {', '.join(used)}; name the mixer: --option"
            f' {used[0]}.{name}={plain[name]}, or in Python mixers={{"{used[0]}": {{"{name}": {plain[name]!r}}}}}'
        )
    if twice := [name for kind in used for name in plain if name in mixers.get(kind, {})]:
        name = twice[0]
        raise UserError(
            f"{name} is given twice, as {name}={plain[name]!r} and in mixers[{used[0]!r}] as"
            f" {mixers[used[0]][name]!r}; give it once"
        )
    options = {kind: dict(mixers.get(kind, {})) | plain for kind in used}
    return options | ({WINDOW: dict(mixers.get(WINDOW, {}))} if beside and WINDOW not in used else {})


def told_before(options: dict[str, dict], config) -> list[str]:
    """Lines that a user should read before a conversion: for each window in the options by mixer that is as long as
    all that the teacher can read, or longer; and for a teacher that scales q by its position, as Ministral 3 does.
    """
    limit = getattr(config, "max_position_embeddings", None)
    sizes = {f"{mixer}.{name}": own.get(name) for mixer, own in options.items() for name in ("window", "local_window")}
    lines = [
        f"{name}={size} is not shorter than the {limit} tokens that the teacher reads: such a window is all of its"
        " attention, and the cache of these layers is not smaller; give a smaller one"
        for name, size in sizes.items()
        if isinstance(size, int) and limit and size >= limit
    ]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        first = rope.get("original_max_position_embeddings")
        lines.append(
            f"from position {first} on, the teacher scales q by its position (llama_4_scaling_beta="
            f"{rope['llama_4_scaling_beta']}), and converted layers do not: train the student at such lengths, or keep"
            " its contexts shorter"
        )
    return lines

"""`memmix generate`: continue a prompt, or chat."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.commands.checks import check_placement, given_model, library
from hf_memmix.commands.common import Device, DeviceMap, Json, err, load, print_json, tokenizer_of
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.errors import UserError, check_temperature
from hf_memmix.operating_system import WINDOWS


@one_line_errors
def generate(
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; with --chat the only message.", show_default=False)
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A folder or a Hub id; default: the bundled GKA model.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat by the model's template: one message a line, or --prompt alone.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: the message of the system, which comes first.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest number of new tokens.", show_default="128, in a chat 512")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of the sampling; 0 takes the most likely token.")
    ] = 0.8,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the likeliest tokens that have this probability together.",
            show_default="0.95",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=-(2**63), max=2**64 - 1, help="Seed of the sampling.", show_default="0")
    ] = None,
    device: Device = None,
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or chat, and print the text as it is generated.

    Special tokens are printed too. In a chat, the model reads only the new message in each turn, unless the template
    changes earlier turns.
    """
    from hf_memmix.assets import asset_path

    _check_messages(prompt, chat, system, as_json)
    check_temperature(temperature, {"--top-p": top_p, "--seed": seed})
    check_placement(device, device_map)
    folder = given_model(model) or asset_path("tiny_gka")
    with library():
        import torch

    torch.manual_seed(seed or 0)
    network, tokenizer = load(folder, device, device_map=device_map), tokenizer_of(folder)
    options = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_p": 0.95 if top_p is None else top_p}
    options["max_new_tokens"] = max_new_tokens or (512 if chat else 128)
    about = {"model": str(model or folder)}
    if chat:
        _chat(network, tokenizer, options, prompt, system, about, as_json)
    else:
        _continue(network, tokenizer, options, prompt, about, as_json)


def _check_messages(prompt: str | None, chat: bool, system: str | None, as_json: bool) -> None:
    """Raise UserError for a missing or empty prompt, text that is not UTF-8, and options that would be ignored."""
    for name, text in (("--prompt", prompt), ("--system", system)):
        try:
            (text or "").encode()
        except UnicodeError as error:
            raise _not_utf8(name, error) from None
    if prompt is None and not chat:
        raise UserError("there is no prompt; give --prompt, or --chat for a conversation")
    if prompt is None and as_json:
        raise UserError("--json prints one answer; give the message by --prompt too")
    if prompt == "":
        raise UserError("the prompt is empty; give at least one word")
    if system is not None and not chat:
        raise UserError("--system belongs to --chat; give --chat too, or leave it out")


def _continue(network, tokenizer, options: dict, prompt: str, about: dict, as_json: bool) -> None:
    import time

    from transformers import TextStreamer

    from hf_memmix.conversion.limits import check_length, check_tokens

    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(network.device)
    read = inputs["input_ids"].shape[1]
    if read == 0:
        raise UserError("the prompt is empty; give at least one word")
    check_tokens(inputs["input_ids"][0].tolist(), network, tokenizer, "--prompt")
    total = read + options["max_new_tokens"]
    check_length(network, "model", total, "prompt with --max-new-tokens", "ask for fewer")
    streamer = None if as_json else TextStreamer(tokenizer)
    start = time.perf_counter()
    tokens = network.generate(**inputs, **options, streamer=streamer)[0]
    seconds = time.perf_counter() - start
    new = len(tokens) - read
    if as_json:
        text = tokenizer.decode(tokens)
        print_json(about | {"text": text, "new_tokens": new, "tokens_per_second": new / seconds})
    else:
        err.print(f"{new} tokens, {new / seconds:.1f} tokens/s", style="dim")


def _chat(network, tokenizer, options: dict, prompt: str | None, system: str | None, about: dict, as_json: bool):
    import time

    from hf_memmix.training.chat import Chat

    chat = Chat(network, tokenizer, options, system)
    for message in _lines() if prompt is None else [prompt]:
        start = time.perf_counter()
        turn = chat.say(message, stream=not as_json)
        seconds = time.perf_counter() - start
        if as_json:
            numbers = {"new_tokens": turn.new_tokens, "tokens_per_second": turn.new_tokens / seconds}
            print_json(about | {"text": turn.text, "messages": chat.messages} | numbers)
        else:
            speed = f"{turn.new_tokens} tokens, {turn.new_tokens / seconds:.1f} tokens/s"
            err.print(f"{speed}; read {turn.read_tokens} of {turn.all_tokens} tokens", style="dim")


def _lines() -> Iterator[str]:
    """The messages of a user, one a line, to the end of the input (on a terminal Ctrl-D). Empty lines are skipped."""
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):  # the console of Windows has a history by itself
            import readline  # noqa: F401, gives `input` a history

        err.print(f"one message a line; {'Ctrl-Z and Enter end' if WINDOWS else 'Ctrl-D ends'}", style="dim")
    while True:
        if asks and not sys.stdout.isatty():  # `input` would write into the file of the answers
            err.print("> ", end="")
        try:
            line = input("> " if asks and sys.stdout.isatty() else "").strip()
            line.encode()
        except EOFError:
            return
        except UnicodeError as error:
            raise _not_utf8("the input", error) from None
        if line:
            yield line


def _not_utf8(name: str, error: UnicodeError) -> UserError:
    return UserError(
        f"{name} is not UTF-8 (character {error.start} is a byte of another encoding); convert it, e.g. by iconv"
    )
